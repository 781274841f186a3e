"""Compare all-reduces over two hosts that are namespaces of this machine, joined by a slow link.

.. code-block:: console

    $ sudo .venv/bin/python -m tests.helpers.bench_hosts --ranks-per-host 2,4 --rate 1gbit
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from ringstrategy.bench.all_reduce import AllReduceConfig, AllReduceRow, measure
from ringstrategy.bench.environment import describe
from ringstrategy.bench.report import write_json
from ringstrategy.bench.sizes import format_size, parse_sizes
from tests.helpers.hosts import TwoHosts, enter, make_hosts, obstacle_to_hosts

__all__ = ["enter_host_of_rank", "main"]


def enter_host_of_rank(hosts: TwoHosts, ranks_per_host: int, rank: int) -> None:
    """Move a rank to its host: the first ranks to the first."""
    enter(hosts, rank // ranks_per_host)


def main() -> None:
    """Measure, and print a line per size and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-host", default="2,4", help="numbers, separated by commas (default: %(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc understands it (default: %(default)s)")
    parser.add_argument("--sizes", default="25MiB", help="of the buffer, separated by commas (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats (default: %(default)s)")
    parser.add_argument(
        "--algorithms", default="hierarchical,backend", help="separated by commas; ratios are to the last"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if obstacle := obstacle_to_hosts():
        sys.exit(obstacle)
    algorithms = tuple(options.algorithms.split(","))
    per_host = options.ranks_per_host
    words = f"--ranks-per-host {per_host} --rate {options.rate} --sizes {options.sizes} --repeats {options.repeats}"
    environment = describe(f"python -m tests.helpers.bench_hosts {words} --algorithms {options.algorithms}")
    found: list[AllReduceRow] = []
    for count in map(int, options.ranks_per_host.split(",")):
        config = AllReduceConfig(
            ranks=2 * count,
            sizes=parse_sizes(options.sizes),
            algorithms=algorithms,
            repeats=options.repeats,
            warmup=1,
        )
        with make_hosts(options.rate) as hosts:
            rows = measure(config, partial(enter_host_of_rank, hosts, count))
        found += rows
        for size in config.sizes:
            seconds = {row.collective: row.median_s for row in rows if row.bytes == size}
            last = seconds[algorithms[-1]]
            print(
                f"2 hosts x {count} ranks, {options.rate}, {format_size(size)}: "
                + ", ".join(f"{name} {took * 1e3:.1f} ms ({last / took:.2f}x)" for name, took in seconds.items()),
                flush=True,
            )
    if options.json:
        write_json(options.json, environment, found)


if __name__ == "__main__":
    main()
