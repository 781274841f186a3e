"""Time, bubble and memory of a pipeline's step: ours, ``torch.distributed.pipelining``'s, and no pipeline at all.

A step is the forward, loss and backward of one batch, without an optimizer and without a Trainer. All variants cut the
same model at the same layers, and find the gradients of the whole model before anything is timed. They take turns in
the same processes, so that a slow spell of the machine meets all of them:

    round 1                                             round 2
    naive, naive │ gpipe 2, gpipe 2 │ torch_gpipe 2 …   naive, naive │ gpipe 2, gpipe 2 │ torch_gpipe 2 …

A step is as long as it is on the slowest rank, from a barrier on. What a stage computes in it is recorded by itself;
the critical path is the schedule played with these times and nothing else. Memory is the largest proportional set size
of each rank, in processes that run one variant alone.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ringstrategy.bench.environment import command_line
from ringstrategy.bench.models import check_model
from ringstrategy.bench.pipeline_worker import (
    PipelineRun,
    RankResult,
    StepRecord,
    Variant,
    measure_memory,
    measure_times,
    read_memory,
)
from ringstrategy.bench.ranks import run_ranks
from ringstrategy.pipeline.schedules import gpipe, one_f_one_b
from ringstrategy.pipeline.timeline import ideal_bubble, simulate

__all__ = ["VARIANTS", "PipelineConfig", "PipelineRow", "Timing", "measure", "summarise"]

# By name: the schedule.
VARIANTS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "torch_gpipe": gpipe,
    "torch_1f1b": one_f_one_b,
    "naive": gpipe,
}
_MEMORY_STEPS = 1


@dataclass(frozen=True)
class PipelineConfig:
    """What to measure.

    Attributes:
        model: see :func:`~ringstrategy.bench.models.build_network`; batch norms become group norms.
        image_size: height and width of the images in pixels.
        batch: samples per step.
        stages: ranks of one thread each, every one with a stage of its own.
        chunks: numbers of micro-batches.
        variants: names from :data:`VARIANTS`; ``"naive"`` always has one micro-batch.
        rounds: turns of each variant.
        steps: timed steps per turn.
        warmup: steps before them.
        timeout_s: how long a rank waits for another before it gives up.
    """

    model: str = "cifar_resnet18"
    image_size: int = 32
    batch: int = 64
    stages: int = 2
    chunks: tuple[int, ...] = (2, 4, 8)
    variants: tuple[str, ...] = tuple(VARIANTS)
    rounds: int = 5
    steps: int = 1
    warmup: int = 1
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ValueError(f"a pipeline needs at least 2 stages, not {self.stages}")
        for name in self.variants:
            if name not in VARIANTS:
                raise ValueError(f"unknown variant {name!r}: choose from {', '.join(VARIANTS)}")
        for what, values in (("a variant", self.variants), ("a number of chunks", self.chunks)):
            if len(set(values)) < len(values):
                raise ValueError(f"{what} is named twice: {', '.join(map(str, values))}")
        for chunks in self.chunks:
            if chunks < 1 or self.batch % chunks:
                raise ValueError(
                    f"{chunks} chunks do not divide a batch of {self.batch}, and torch.distributed.pipelining weighs"
                    " micro-batches of all sizes alike"
                )
            if chunks < self.stages and "torch_1f1b" in self.variants:
                raise ValueError(
                    f"torch_1f1b needs at least as many chunks as stages, not {chunks} for {self.stages} stages"
                )
        check_model(self.model)

    @property
    def command(self) -> str:
        """The command line that measures this."""
        names = ("model", "image_size", "batch", "stages", "chunks", "variants", "rounds", "steps", "warmup")
        return command_line("pipeline", {name: getattr(self, name) for name in names})

    @property
    def contenders(self) -> tuple[Variant, ...]:
        """Who takes turns."""
        piped = [name for name in self.variants if name != "naive"]
        alone = [Variant("naive", 1)] if "naive" in self.variants else []
        return (*alone, *(Variant(name, chunks) for chunks in self.chunks for name in piped))


@dataclass(frozen=True)
class Timing:
    """What the steps of one variant took.

    Attributes:
        median_s: median over the rounds of their medians.
        rounds_s: median time of a step, by round.
        forward_s: median time of a micro-batch's forward, by stage.
        backward_s: median time of a micro-batch's backward, by stage.
        critical_s: what the schedule takes with these, if messages and all else take no time.
        bubble: share of all stages' time in which they compute neither; median over the steps.
    """

    median_s: float
    rounds_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    critical_s: float
    bubble: float


@dataclass(frozen=True, kw_only=True)
class PipelineRow(Timing):
    """One line of the result: the times, and what they were measured on.

    Attributes:
        variant: its name.
        chunks: micro-batches.
        model: the network's name.
        batch: samples per step.
        stages: number of stages.
        balance: layers per stage.
        ideal_bubble: ``(K-1)/(M+K-1)`` for ``K`` stages and ``M`` micro-batches.
        sent_bytes: bytes of tensors that all ranks together send in a step.
        peak_pss_MiB: largest proportional set size, by rank.
    """

    variant: str
    chunks: int
    model: str
    batch: int
    stages: int
    balance: tuple[int, ...]
    ideal_bubble: float
    sent_bytes: int
    peak_pss_MiB: tuple[float, ...]


def measure(config: PipelineConfig, progress: Callable[[str], None] = lambda _: None) -> list[PipelineRow]:
    """Time all variants in turn, then measure the memory of each.

    Args:
        config: what to measure.
        progress: told what runs next.

    Returns:
        One row per variant and number of chunks; the naive one first.

    Raises:
        BenchError: a rank died or failed, or a variant's gradients are not those of the whole model. No rank is left.
    """
    run = PipelineRun(
        model=config.model,
        image_size=config.image_size,
        batch=config.batch,
        stages=config.stages,
        variants=config.contenders,
        balance=None,
        rounds=config.rounds,
        steps=config.steps,
        warmup=config.warmup,
        timeout_s=config.timeout_s,
    )
    progress(f"time: {len(run.variants)} variants in turn, {run.rounds} rounds of {run.steps} steps")
    with tempfile.TemporaryDirectory(prefix="ringstrategy-bench-") as folder:
        run_ranks(measure_times, run.stages, run, folder)
        ranks = [RankResult.read(folder, rank) for rank in range(run.stages)]
    balance = ranks[0].balance
    rows = []
    for number, variant in enumerate(run.variants):
        progress(f"memory: {variant.name}, chunks={variant.chunks}")
        alone = replace(run, variants=(variant,), balance=balance, steps=_MEMORY_STEPS)
        with tempfile.TemporaryDirectory(prefix="ringstrategy-bench-") as folder:
            run_ranks(measure_memory, run.stages, alone, folder)
            memory = tuple(read_memory(folder, rank) for rank in range(run.stages))
        rows.append(
            PipelineRow(
                **vars(summarise(variant, [rank.steps[number] for rank in ranks])),
                variant=variant.name,
                chunks=variant.chunks,
                model=config.model,
                batch=config.batch,
                stages=config.stages,
                balance=balance,
                ideal_bubble=ideal_bubble(config.stages, variant.chunks),
                sent_bytes=sum(rank.sent_bytes[number] for rank in ranks),
                peak_pss_MiB=memory,
            )
        )
    return rows


def summarise(variant: Variant, ranks: Sequence[Sequence[Sequence[StepRecord]]]) -> Timing:
    """Put what the ranks saw together.

    Args:
        variant: what they ran.
        ranks: by rank, round and step.
    """
    # By round and step, what each rank saw.
    rounds = [list(zip(*steps, strict=True)) for steps in zip(*ranks, strict=True)]
    rounds_s = tuple(statistics.median(_slowest(step) for step in steps) for steps in rounds)
    of_stage = [[step for steps in rank for step in steps] for rank in ranks]
    forward_s = tuple(statistics.median(s for step in steps for s in step.forward) for steps in of_stage)
    backward_s = tuple(statistics.median(s for step in steps for s in step.backward) for steps in of_stage)
    schedule = VARIANTS[variant.name](len(ranks), variant.chunks)
    return Timing(
        median_s=statistics.median(rounds_s),
        rounds_s=rounds_s,
        forward_s=forward_s,
        backward_s=backward_s,
        critical_s=simulate(schedule, forward_s, backward_s).makespan,
        bubble=statistics.median(_bubble(step) for steps in rounds for step in steps),
    )


def _slowest(step: Sequence[StepRecord]) -> float:
    return max(rank.seconds for rank in step)


def _bubble(step: Sequence[StepRecord]) -> float:
    busy = sum(sum(rank.forward) + sum(rank.backward) for rank in step)
    return 1.0 - busy / (len(step) * _slowest(step))
