"""Compare training steps over two hosts that are namespaces of this machine, joined by a slow link.

.. code-block:: console

    $ sudo .venv/bin/python -m tests.helpers.bench_steps_on_hosts --rate 1gbit
"""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from ringstrategy.bench.environment import describe
from ringstrategy.bench.report import write_json
from ringstrategy.bench.train_step import Contender, Place, TrainStepConfig, measure
from tests.helpers.hosts import LINK, TwoHosts, make_hosts, obstacle_to_hosts

__all__ = ["main", "places"]


def places(hosts: TwoHosts) -> list[Place]:
    """Both hosts, with what Lightning's own launcher is told on them."""
    with socket.socket() as sock:  # free here, and so, most likely, in the new namespaces
        sock.bind(("", 0))
        port = str(sock.getsockname()[1])
    environment = {"MASTER_ADDR": hosts.address, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": LINK}
    return [Place(tuple(hosts.on(host, [])), environment) for host in (0, 1)]


def main() -> None:
    """Measure, and print a line per strategy, with its speed relative to the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc understands it (default: %(default)s)")
    parser.add_argument("--strategies", default="ring_ddp,ring_ddp+bf16,ring_ddp+fp16,ddp")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if obstacle := obstacle_to_hosts():
        sys.exit(obstacle)
    config = TrainStepConfig(
        model=options.model,
        batch_size=options.batch_size,
        ranks=2 * options.ranks_per_host,
        strategies=tuple(map(Contender.parse, options.strategies.split(","))),
        steps=options.steps,
        warmup=options.warmup,
        rounds=options.rounds,
    )
    environment = describe(f"{config.command} (2 hosts, {options.rate})")
    with make_hosts(options.rate) as hosts:
        rows = measure(config, lambda text: print(text, file=sys.stderr), places(hosts))
    for row in rows:
        what = f"2 hosts x {options.ranks_per_host}, {options.rate}: {row.strategy}"
        print(f"{what} {row.median_s * 1e3:.0f} ms ({rows[0].median_s / row.median_s:.2f}x)")
    if options.json:
        write_json(options.json, environment, rows)


if __name__ == "__main__":
    main()
