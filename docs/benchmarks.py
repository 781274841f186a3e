"""Measure, and write the benchmarks page and the README's tables from what was measured.

    python docs/benchmarks.py measure [NAME ...]   # all, or some; on an otherwise idle machine
    python docs/benchmarks.py write                # the pages, from docs/benchmarks/*.json

`make benchmarks` does both. The part over two hosts needs root, for network namespaces; without it, that part stays as
it was.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from ringstrategy.bench import report
from ringstrategy.bench.all_reduce import AllReduceRow
from ringstrategy.bench.environment import in_a_line
from ringstrategy.bench.pipeline import PipelineRow
from ringstrategy.bench.plot import plot_all_reduce
from ringstrategy.bench.sizes import format_size
from ringstrategy.bench.train_step import TrainStepRow
from ringstrategy.quantities import format_time

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "benchmarks"
IMAGES = HERE / "images"
PAGE = HERE / "benchmarks.md"
README = ROOT / "README.md"

Rows = list[Any]


@dataclass(frozen=True)
class Benchmark:
    """One measurement of the page.

    Attributes:
        name: of its JSON.
        command: that makes it; ``--json FILE`` is added.
        row: what a row of the JSON is read as.
        tables: of the rows.
        as_root: whether the command needs it.
    """

    name: str
    command: str
    row: type[Any]
    tables: Callable[[Rows], list[Table]]
    as_root: bool = False

    @property
    def file(self) -> Path:
        """Where its result is."""
        return RESULTS / f"{self.name}.json"

    def read(self) -> tuple[dict[str, Any], Rows]:
        """What it was measured on, and the rows."""
        found = json.loads(self.file.read_text())
        return found["environment"], [self.row(**row) for row in found["rows"]]


@dataclass(frozen=True)
class Section:
    """A heading of the page, what is said there, and what was measured."""

    title: str
    text: str
    benchmarks: tuple[Benchmark, ...]


def _by_ranks(rows: Rows) -> list[Table]:
    return [report.all_reduce_table(list(group)) for _, group in groupby(rows, key=lambda row: row.ranks)]


def _all_reduce(ranks: int, repeats: int) -> Benchmark:
    algorithms = "shared_memory,backend,ring,tree,naive,measure"
    command = f"ringstrategy bench all-reduce --ranks {ranks} --repeats {repeats} --algorithms {algorithms}"
    return Benchmark(f"all-reduce-{ranks}", command, AllReduceRow, _by_ranks)


def _train_step(model: str, batch_size: int) -> Benchmark:
    command = (
        f"ringstrategy bench train-step --model {model} --batch-size {batch_size} --steps 20 --rounds 3"
        " --strategies ring_ddp,ddp,ddp+keep,none,none+keep"
    )
    return Benchmark(f"train-step-{model}", command, TrainStepRow, lambda rows: [report.train_step_table(rows)])


ALL_REDUCE = Section(
    "All-reduce",
    """\
The collectives take turns repeat by repeat in one run, and every repeat checks every element of a sum. `algbw` is the
size over the time, `busbw` is `algbw * 2(n-1)/n`, as nccl-tests counts them. `backend` is gloo's own all-reduce, over
whose send and receive go `ring`, `tree` and `naive` ([algorithms](algorithms.md)). `shared_memory` is what `ring_ddp`
uses within a host. The timed calls of a repeat reuse one buffer, as in nccl-tests. With 4 ranks on 2 cores, two share a
core.""",
    (_all_reduce(2, 20), _all_reduce(4, 10)),
)
TRAIN_STEP = Section(
    "Training step",
    """\
Real `Trainer.fit` runs in fresh processes of one thread each, the strategies taking turns. `ddp` is Lightning's, with
`static_graph` and `gradient_as_bucket_view` on; `none` trains the same processes without any gradient sync, which is
the floor. `+keep` gives a strategy the malloc setting that `ring_ddp` has by default. Memory is the peak proportional
set size of a rank without program files; a page that two ranks map counts half.""",
    (_train_step("mlp", 32), _train_step("resnet18", 16), _train_step("mobilenet_v3_small", 16)),
)
PIPELINE = Section(
    "Pipeline",
    """\
A step is forward, loss and backward of one batch. `torch_gpipe` and `torch_1f1b` are `torch.distributed.pipelining` on
the same cut and micro-batches, and `naive` is the usual model parallelism: one micro-batch, one stage at a time. Group
norms stand for batch norms, and nothing is computed twice. The critical path is the schedule played with the stages'
own median times, without messages ([pipeline](pipeline.md)).""",
    (
        Benchmark(
            "pipeline",
            "ringstrategy bench pipeline --steps 3",
            PipelineRow,
            lambda rows: [report.pipeline_table(rows)],
        ),
    ),
)
HOSTS = Section(
    "Two hosts",
    """\
Two network namespaces of one machine, joined by a link that `tc` holds to 1 Gbit/s: half of the ranks on each. The flat
ring of gloo sends 2(n-1)/n of the buffer through the link in each direction. `hierarchical`, which `ring_ddp` uses
there, sends as much as two ranks would ([several hosts](hosts.md)). The last table is a training step of the MLP with
one rank per host, uncompressed and with 16-bit messages ([compression](compression.md)).""",
    (
        Benchmark(
            "hosts",
            "python -m tests.helpers.bench_hosts --ranks-per-host 2,4 --rate 1gbit --sizes 25MiB",
            AllReduceRow,
            _by_ranks,
            as_root=True,
        ),
        Benchmark(
            "steps-on-hosts",
            "python -m tests.helpers.bench_steps_on_hosts --rate 1gbit --steps 8 --warmup 2",
            TrainStepRow,
            lambda rows: [report.train_step_table(rows)],
            as_root=True,
        ),
    ),
)
SECTIONS = (ALL_REDUCE, TRAIN_STEP, PIPELINE, HOSTS)
BENCHMARKS = {each.name: each for section in SECTIONS for each in section.benchmarks}


def measure(names: Iterable[str]) -> None:
    """Run the commands, each of which writes its JSON."""
    RESULTS.mkdir(exist_ok=True)
    bin_folder = Path(sys.executable).parent
    for name in names:
        benchmark = BENCHMARKS[name]
        if benchmark.as_root and os.geteuid() != 0:
            print(f"{name}: left as it is: it needs root", file=sys.stderr)
            continue
        program, *arguments = shlex.split(benchmark.command)
        print(f"{name}: {benchmark.command}", file=sys.stderr, flush=True)
        command = [str(bin_folder / program), *arguments, "--json", str(benchmark.file)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _lines(head: Sequence[str], rules: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rules, *rows))


def markdown(table: Table) -> str:
    """A table of the command line as one of a page, its title above and its caption below."""
    columns = [[str(column.header).replace("\n", " "), *map(str, column.cells)] for column in table.columns]
    rules = ["---:" if column.justify == "right" else "---" for column in table.columns]
    head, *body = zip(*columns, strict=True)
    caption = [f"{str(table.caption)[0].upper()}{str(table.caption)[1:]}."] if table.caption else []
    return "\n\n".join([f"{table.title}:", _lines(head, rules, body), *caption])


def _folded(command: str) -> str:
    """A command in lines that fit on a page."""
    lines = textwrap.wrap(command, 76, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines)


def page() -> str:
    """The benchmarks page."""
    parts = [
        "# Benchmarks",
        "Each table names the command that makes it, what it ran on, and when; its JSON lies in `docs/benchmarks/`.\n"
        "What is compared in one table took turns in one run. Ratios hold; times of different tables may not compare.",
        "```console\nmake benchmarks    # measures all of it anew and writes this page; half an hour\n```",
    ]
    for section in SECTIONS:
        parts += [f"## {section.title}", section.text]
        for benchmark in section.benchmarks:
            environment, rows = benchmark.read()
            parts.append(f"```console\n{_folded(f'{benchmark.command} --json {benchmark.name}.json')}\n```")
            parts += map(markdown, benchmark.tables(rows))
            if (IMAGES / f"{benchmark.name}.png").exists():
                parts.append(f"![{section.title}: {benchmark.name}](images/{benchmark.name}.png)")
            parts.append(f"{in_a_line(environment)}. [JSON](benchmarks/{benchmark.name}.json)")
    return "\n\n".join(parts) + "\n"


def readme_tables() -> dict[str, str]:
    """What stands between the marks of the README, by their names."""
    return {"all-reduce": _readme_all_reduce(), "train-step": _readme_train_step(), "pipeline": _readme_pipeline()}


def _readme_table(head: Sequence[str], rows: Iterable[Sequence[str]], below: str) -> str:
    return f"{_lines(head, ['---'] * len(head), rows)}\n\n{below}"


def _readme_all_reduce() -> str:
    cells = []
    for benchmark in ALL_REDUCE.benchmarks:
        environment, rows = benchmark.read()
        by_size = groupby(rows, key=lambda row: row.bytes)
        for size, group in by_size:
            row = {each.collective: each for each in group}
            ours, gloo = row["shared_memory"], row["backend"]
            cells.append(
                [
                    str(ours.ranks),
                    format_size(size),
                    format_time(ours.median_s),
                    format_time(gloo.median_s),
                    f"{gloo.median_s / ours.median_s:.1f}x",
                    f"{ours.busbw_GBps:.2f} GB/s",
                    f"{gloo.busbw_GBps:.2f} GB/s",
                ]
            )
    head = ("ranks", "size", "ours", "gloo", "ratio", "busbw, ours", "busbw, gloo")
    return _readme_table(head, cells, f"{in_a_line(environment)}.")


def _readme_train_step() -> str:
    cells = []
    for benchmark in TRAIN_STEP.benchmarks:
        environment, rows = benchmark.read()
        ours = rows[0]
        for row in rows:
            cells.append(
                [
                    row.model if row is ours else "",
                    f"`{row.strategy}`",
                    format_time(row.median_s),
                    "" if row is ours else f"{row.median_s / ours.median_s:.2f}x",
                    f"{row.peak_pss_MiB:.0f} MiB",
                ]
            )
    head = ("model", "strategy", "step", "ring_ddp is faster by", "peak memory per rank")
    return _readme_table(head, cells, f"{in_a_line(environment)}.")


def _readme_pipeline() -> str:
    environment, rows = PIPELINE.benchmarks[0].read()
    seconds = {(row.variant, row.chunks): row.median_s for row in rows}
    naive = next(row for row in rows if row.variant == "naive")
    cells = [
        [
            str(row.chunks),
            f"`{row.variant}`",
            format_time(row.median_s),
            f"{seconds[f'torch_{row.variant}', row.chunks] / row.median_s:.2f}x",
            f"{naive.median_s / row.median_s:.2f}x",
            f"{row.bubble:.0%}",
            ", ".join(f"{peak:.0f}" for peak in row.peak_pss_MiB) + " MiB",
        ]
        for row in rows
        if row.variant in ("gpipe", "1f1b")
    ]
    head = ("micro-batches", "schedule", "step", "against torch", "against naive", "bubble", "peak memory by rank")
    alone = f"Naive model parallelism: {format_time(naive.median_s)}."
    return _readme_table(head, cells, f"{alone} {in_a_line(environment)}.")


def with_tables(text: str) -> str:
    """The README's text, with what is between its marks replaced."""
    for name, table in readme_tables().items():
        mark = f"<!-- measured:{name} -->\n"
        before, found, rest = text.partition(mark)
        if not found:
            raise SystemExit(f"README.md has no line {mark}")
        text = before + mark + table + rest[rest.index("\n<!-- /measured -->") :]
    return text


def write() -> None:
    """Write the page, its pictures and the README's tables."""
    for benchmark in ALL_REDUCE.benchmarks:
        plot_all_reduce(benchmark.read()[1], IMAGES / f"{benchmark.name}.png")
    PAGE.write_text(page())
    README.write_text(with_tables(README.read_text()))


def main() -> None:
    """Read the command line, and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("measure").add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    commands.add_parser("write")
    options = parser.parse_args()
    if options.what == "write":
        write()
        return
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    measure(options.names or BENCHMARKS)


if __name__ == "__main__":
    main()
