"""Time of a training step and peak memory per strategy, from real ``Trainer.fit`` runs.

Every run has fresh processes. The strategies take turns, round by round, so that a slow spell of the machine meets
all of them. A run's time is the median over its timed steps, on rank 0, from one batch's start to the next one's; a
row's time is the median over the rounds. Memory is the largest proportional set size (each page divided by the number
of processes that map it) of any rank at any time, sampled every 5 ms from before ``fit`` to the end of the warm-up
and again in a few steps after the timed ones, so that sampling does not slow those.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ringstrategy.bench import BenchError
from ringstrategy.bench.environment import command_line
from ringstrategy.bench.models import check_model
from ringstrategy.bench.train_worker import RankResult, TrainRun

__all__ = ["Contender", "Place", "TrainStepConfig", "TrainStepRow", "measure"]

_BASES = ("ring_ddp", "ddp", "none")
_SUFFIXES = {
    "keep": "memory", "release": "memory", "backend": "transport", "bf16": "compression", "fp16": "compression",
}  # fmt: skip
_OUTPUT_LINES = 30  # of a failed run


@dataclass(frozen=True)
class Place:
    """Where a part of the ranks runs.

    Attributes:
        prefix: words before a command, which have it run there.
        environment: variables that it needs there.
    """

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """A strategy, what it does with freed memory, and how gradients travel.

    Attributes:
        base: ``"ring_ddp"``, ``"ddp"`` or ``"none"``.
        memory: ``"keep"``: glibc keeps freed memory for the next step, as ``RingDDPStrategy`` has it do;
            ``"release"``: glibc is as it comes; ``""``: whatever is the strategy's default, which is to keep it for
            ``ring_ddp`` and to release it for the others.
        transport: ``"backend"`` for ``ring_ddp`` without shared memory; ``""``: its default.
        compression: of ``ring_ddp``, ``"bf16"`` or ``"fp16"``; ``""``: none.
    """

    base: str
    memory: str = ""
    transport: str = ""
    compression: str = ""

    @classmethod
    def parse(cls, text: str) -> Contender:
        """Read ``"ddp"``, ``"ddp+keep"``, ``"ring_ddp+release"`` or ``"ring_ddp+backend+bf16"``.

        Raises:
            ValueError: no such strategy or suffix.
        """
        base, *suffixes = text.split("+")
        found: dict[str, str] = {}
        for suffix in suffixes:
            kind = _SUFFIXES.get(suffix, "")
            if not kind or kind in found or (kind != "memory" and base != "ring_ddp"):
                base = ""
                break
            found[kind] = suffix
        if base not in _BASES:
            raise ValueError(
                f"unknown strategy {text!r}: choose from {', '.join(_BASES)}, each also with +keep or +release, and"
                " ring_ddp with +backend, +bf16 or +fp16"
            )
        return cls(base, **found)

    @property
    def name(self) -> str:
        """What :meth:`parse` reads."""
        return "+".join(part for part in (self.base, self.memory, self.transport, self.compression) if part)

    @property
    def keeps(self) -> bool:
        """Whether freed memory stays with the process."""
        return self.memory == "keep" or (self.memory == "" and self.base == "ring_ddp")


@dataclass(frozen=True)
class TrainStepConfig:
    """What to measure.

    Attributes:
        model: ``"mlp"`` or a classifier of torchvision.
        batch_size: samples per rank and step.
        ranks: number of processes, with one thread each.
        strategies: the contenders, in the order in which they take turns.
        steps: timed steps per run.
        warmup: steps before them.
        rounds: runs per strategy.
        image_size: height and width of the images in pixels.
        timeout_s: how long a rank waits for another before it gives up.
    """

    model: str = "mlp"
    batch_size: int = 32
    ranks: int = 2
    strategies: tuple[Contender, ...] = (Contender("ring_ddp"), Contender("ddp"), Contender("none"))
    steps: int = 40
    warmup: int = 10
    rounds: int = 3
    image_size: int = 32
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if len(set(self.strategies)) < len(self.strategies):
            raise ValueError("a strategy is named twice")
        check_model(self.model)

    @property
    def command(self) -> str:
        """The command line that measures this."""
        names = ("model", "batch_size", "ranks", "steps", "warmup", "rounds", "image_size")
        options = {name: getattr(self, name) for name in names}
        return command_line("train-step", {**options, "strategies": [each.name for each in self.strategies]})


@dataclass(frozen=True)
class TrainStepRow:
    """One line of the result.

    Attributes:
        strategy: its name, with the suffix.
        model: the network's name.
        ranks: number of processes.
        median_s: median over the rounds of the run's median time of a step.
        peak_pss_MiB: largest proportional set size of a rank.
        rounds_s: the medians of the rounds.
        all_reduce_s: time per step that the collective was busy (median over the rounds), where the strategy counts it.
        exposed_s: the part of it that training waited for, likewise.
        copy_s: time per step that copying gradients into buckets added to backward, likewise.
    """

    strategy: str
    model: str
    ranks: int
    median_s: float
    peak_pss_MiB: float
    rounds_s: tuple[float, ...]
    all_reduce_s: float | None
    exposed_s: float | None
    copy_s: float | None = None


def measure(
    config: TrainStepConfig,
    progress: Callable[[str], None] = lambda _: None,
    places: Sequence[Place] = (Place(),),
) -> list[TrainStepRow]:
    """Run every strategy in every round.

    Args:
        config: what to measure.
        progress: told what runs next.
        places: the hosts, which divide the ranks evenly; this one by default. Of several, the environment of each has
            ``MASTER_ADDR``, the address of the first.

    Returns:
        One row per strategy, in the order of the configuration.

    Raises:
        BenchError: a run failed, or a strategy that synchronises left the ranks with different parameters. No process
            of it is left.
    """
    if config.ranks % len(places):
        raise BenchError(f"{config.ranks} ranks cannot be divided evenly among {len(places)} hosts")
    results: dict[Contender, list[list[RankResult]]] = {contender: [] for contender in config.strategies}
    for number in range(config.rounds):
        for contender, runs in results.items():
            progress(f"round {number + 1} of {config.rounds}: {contender.name}")
            runs.append(_fit(config, contender, places))
    return [_row(config, contender, runs) for contender, runs in results.items()]


def _row(config: TrainStepConfig, contender: Contender, runs: list[list[RankResult]]) -> TrainStepRow:
    rounds_s = tuple(ranks[0].median_s for ranks in runs)
    return TrainStepRow(
        strategy=contender.name,
        model=config.model,
        ranks=config.ranks,
        median_s=statistics.median(rounds_s),
        peak_pss_MiB=max(rank.peak_pss_MiB for ranks in runs for rank in ranks),
        rounds_s=rounds_s,
        all_reduce_s=_median(ranks[0].all_reduce_s for ranks in runs),
        exposed_s=_median(ranks[0].exposed_s for ranks in runs),
        copy_s=_median(ranks[0].copy_s for ranks in runs),
    )


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _fit(config: TrainStepConfig, contender: Contender, places: Sequence[Place]) -> list[RankResult]:
    """One run in fresh processes; what each rank saw, by rank."""
    run = TrainRun(
        strategy=contender.base,
        keep_freed_memory=contender.keeps,
        transport=contender.transport or "auto",
        compression=contender.compression or None,
        hosts=len(places),
        model=config.model,
        batch_size=config.batch_size,
        image_size=config.image_size,
        ranks=config.ranks,
        steps=config.steps,
        warmup=config.warmup,
        timeout_s=config.timeout_s,
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCH_VARIABLES)}
    environment["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="ringstrategy-bench-") as name:
        folder = Path(name)
        (folder / "run.json").write_text(json.dumps(asdict(run)))
        output = folder / "output.txt"
        command = [sys.executable, "-m", "ringstrategy.bench.train_worker", name]
        with output.open("wb") as stream, ExitStack() as stack:
            processes = [
                stack.enter_context(
                    _process_group(
                        [*place.prefix, *command],
                        environment | {"NODE_RANK": str(number)} | dict(place.environment),
                        stream.fileno(),
                    )
                )
                for number, place in enumerate(places)
            ]
            code = max(abs(process.wait()) for process in processes)
        files = [folder / f"rank-{rank}.json" for rank in range(config.ranks)]
        if code or not all(file.exists() for file in files):
            tail = "\n".join(output.read_text(errors="replace").splitlines()[-_OUTPUT_LINES:])
            raise BenchError(f"the run with {contender.name} failed (exit code {code}):\n{tail}")
        ranks = [RankResult(**json.loads(file.read_text())) for file in files]
    if contender.base != "none" and len({rank.parameters for rank in ranks}) > 1:
        raise BenchError(f"{contender.name} left the ranks with different parameters; its times mean nothing")
    return ranks


# What a launcher around this process would tell Lightning: the runs launch their ranks themselves.
_LAUNCH_VARIABLES = (
    "LOCAL_RANK", "RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_", "SLURM_", "PL_GLOBAL_SEED", "MALLOC_",
)  # fmt: skip


@contextmanager
def _process_group(command: list[str], environment: dict[str, str], output: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a group of its own and end whatever is left of the group, the ranks it started included."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # every process of the group has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
