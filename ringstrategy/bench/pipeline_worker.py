"""One rank of the pipelines that are compared: cuts the model, checks the gradients, and takes steps in turn."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringstrategy.allocator import keep_freed_memory
from ringstrategy.bench import BenchError
from ringstrategy.bench.contenders import Bench, Contender, build_contender
from ringstrategy.bench.memory import PeakPss
from ringstrategy.bench.models import SyntheticBatches, SyntheticClassifier, build_network
from ringstrategy.pipeline.calls import Example, flatten_call
from ringstrategy.pipeline.connect import connect
from ringstrategy.pipeline.engine import Engine
from ringstrategy.pipeline.placement import Placement
from ringstrategy.pipeline.plan import Cut, PipelinePlan, choose_cut
from ringstrategy.pipeline.schedules import Action
from ringstrategy.process_group import RankGroup

__all__ = [
    "PipelineRun",
    "RankResult",
    "StepRecord",
    "Variant",
    "difference",
    "measure_memory",
    "measure_times",
    "read_memory",
]

_CPU = torch.device("cpu")
_TOLERANCE = 1e-4  # of a parameter's gradient, in float32
_NOISE = 1e-6  # of all gradients together: some are zero but for rounding


@dataclass(frozen=True)
class Variant:
    """A way to run the pipeline.

    Attributes:
        name: see :func:`~ringstrategy.bench.contenders.build_contender`.
        chunks: micro-batches.
    """

    name: str
    chunks: int


@dataclass(frozen=True)
class PipelineRun:
    """What the ranks do.

    Attributes:
        model: see :func:`~ringstrategy.bench.models.build_network`.
        image_size: height and width of the images in pixels.
        batch: samples per step.
        stages: one per rank.
        variants: in the order in which they take turns.
        balance: layers per stage; None cuts by measured time.
        rounds: turns of each variant.
        steps: counted steps per turn.
        warmup: steps before them.
        timeout_s: how long a rank waits for another before it gives up.
    """

    model: str
    image_size: int
    batch: int
    stages: int
    variants: tuple[Variant, ...]
    balance: tuple[int, ...] | None
    rounds: int
    steps: int
    warmup: int
    timeout_s: float


@dataclass(frozen=True)
class StepRecord:
    """One step as a rank saw it, in seconds.

    Attributes:
        seconds: from the barrier to the last gradient.
        forward: of each micro-batch's forward.
        backward: of each micro-batch's backward.
    """

    seconds: float
    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclass(frozen=True)
class RankResult:
    """What one rank saw.

    Attributes:
        balance: layers per stage.
        steps: by variant and round, the counted steps.
        sent_bytes: by variant, bytes of tensors that this rank sent per step.
    """

    balance: tuple[int, ...]
    steps: tuple[tuple[tuple[StepRecord, ...], ...], ...]
    sent_bytes: tuple[int, ...]

    @classmethod
    def read(cls, folder: str, rank: int) -> RankResult:
        """Read what a rank wrote."""
        found = json.loads(_result_file(folder, rank).read_text())
        steps = (tuple(tuple(map(_as_record, steps)) for steps in rounds) for rounds in found["steps"])
        return cls(tuple(found["balance"]), tuple(steps), tuple(found["sent_bytes"]))

    def write(self, folder: str, rank: int) -> None:
        """Write it down for :meth:`read`."""
        _result_file(folder, rank).write_text(json.dumps(asdict(self)))


def _as_record(found: dict[str, Any]) -> StepRecord:
    return StepRecord(found["seconds"], tuple(found["forward"]), tuple(found["backward"]))


def measure_times(rank: int, run: PipelineRun, folder: str) -> None:
    """Check the gradients of every variant, then time their steps in turn; the result is a :class:`RankResult`.

    Raises:
        BenchError: on all ranks, if a variant's gradients are not those of the whole model in one process.
    """
    with _bench(rank, run, folder, check=True) as (bench, expected):
        contenders = [build_contender(variant.name, variant.chunks, bench) for variant in run.variants]
        for variant, contender in zip(run.variants, contenders, strict=True):
            _step(bench, contender)
            problem = difference(_gradients(bench.module), expected)
            _raise_alike(problem and f"{variant.name} with chunks={variant.chunks}, rank {rank}: {problem}")
        steps: list[list[tuple[StepRecord, ...]]] = [[] for _ in contenders]
        sent = [0] * len(contenders)
        for _ in range(run.rounds):
            for number, contender in enumerate(contenders):
                for _ in range(run.warmup):
                    _step(bench, contender)
                before = contender.bytes_sent
                steps[number].append(tuple(_step(bench, contender) for _ in range(run.steps)))
                sent[number] = (contender.bytes_sent - before) // run.steps
        balance = tuple(len(layers) for layers in bench.plan.cut.layers)
        RankResult(balance, tuple(map(tuple, steps)), tuple(sent)).write(folder, rank)
        dist.barrier()


def measure_memory(rank: int, run: PipelineRun, folder: str) -> None:
    """Take steps of one variant, and write this rank's largest proportional set size down, in MiB."""
    pss = PeakPss()
    with _bench(rank, run, folder, check=False) as (bench, _):
        contender = build_contender(run.variants[0].name, run.variants[0].chunks, bench)
        pss.start()
        for _ in range(run.warmup + run.steps):
            _step(bench, contender)
        pss.stop()
        _result_file(folder, rank).write_text(json.dumps(pss.mebibytes))
        dist.barrier()


def read_memory(folder: str, rank: int) -> float:
    """What :func:`measure_memory` wrote."""
    return float(json.loads(_result_file(folder, rank).read_text()))


@contextmanager
def _bench(
    rank: int, run: PipelineRun, folder: str, *, check: bool
) -> Iterator[tuple[Bench, dict[str, Tensor | None]]]:
    """Meet the other ranks and let go of their layers; with the gradients that this rank's should have."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    timeout = timedelta(seconds=run.timeout_s)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=run.stages, timeout=timeout
    )
    group = RankGroup.connect(_CPU, timeout)
    # Group norm, and no dropout: what a sample does to the gradients depends on no other sample and on no chance.
    network, shape = build_network(run.model, run.image_size, norm="group")
    _forbid_in_place(network)
    module = SyntheticClassifier(network).eval()
    batch = SyntheticBatches(shape, run.batch, length=1, seed=0)[0]
    cut = _choose_cut(group, network, batch[0], run)
    expected = {}
    if check:
        module.training_step(batch, 0).backward()  # type: ignore[no-untyped-call]
        expected = _gradients(module)
        module.zero_grad()
    plan = PipelinePlan("network", network, cut, module)
    placement = Placement(module, plan.owners, rank)
    placement.leave()
    expected = {name: gradient for name, gradient in expected.items() if placement.holds(name)}
    keep_freed_memory()  # as the strategy does, for all variants alike
    engine = Engine(rank, connect(group))
    try:
        yield Bench(module, plan, engine, batch), expected
    finally:
        engine.close()
    dist.destroy_process_group()


def _forbid_in_place(network: nn.Module) -> None:
    """A stage may begin with an activation, and torch's cannot have it overwrite what they receive."""
    for child in network.modules():
        if getattr(child, "inplace", False):
            setattr(child, "inplace", False)  # noqa: B010  (mypy takes any attribute of a module for a tensor)


def _choose_cut(group: RankGroup, network: nn.Module, inputs: Tensor, run: PipelineRun) -> Cut:
    """Where all ranks cut."""
    chosen: Cut | None = None
    problem: str | None = None
    if group.rank == 0:
        chunks = sorted(variant.chunks for variant in run.variants)
        example = Example(*flatten_call((inputs,), {}))
        try:
            chosen = choose_cut(network, run.stages, run.balance or "time", example, chunks[len(chunks) // 2])
        except (ValueError, RuntimeError, AssertionError) as error:
            problem = f"{run.model} cannot be cut into {run.stages} stages and run: {error}"
    chosen, problem = group.exchange((chosen, problem))[0]
    if chosen is None:
        raise BenchError(problem)
    return chosen


def _step(bench: Bench, contender: Contender) -> StepRecord:
    """One step that all ranks begin together."""
    bench.module.zero_grad()
    seconds: dict[str, list[float]] = {"F": [], "B": []}

    def record(action: Action, begun: float, ended: float) -> None:
        seconds[action.kind].append(ended - begun)

    dist.barrier()
    begun = time.perf_counter()
    contender.step(record)
    ended = time.perf_counter()
    return StepRecord(ended - begun, tuple(seconds["F"]), tuple(seconds["B"]))


def _gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """By name, of the parameters that are in memory."""
    return {name: parameter.grad for name, parameter in module.named_parameters() if not parameter.is_meta}


def difference(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> str | None:
    """Say which gradient is not what it should be, or nothing.

    Args:
        found: by name of the parameter.
        expected: the same names.
    """
    largest = max((float(gradient.norm()) for gradient in expected.values() if gradient is not None), default=0.0)
    for name, right in expected.items():
        gradient = found[name]
        if gradient is None or right is None:
            if gradient is not right:
                return f"{name} has {'no' if gradient is None else 'a'} gradient, other than in one process"
            continue
        off, size = float((gradient - right).norm()), float(right.norm())
        if not off <= _TOLERANCE * size + _NOISE * largest:
            return f"the gradient of {name} is off by {off:.2g}, and should have a norm of {size:.2g}"
    return None


def _raise_alike(problem: str | None) -> None:
    """Raise the same error on every rank, so that no rank's broken connection hides it."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for found in problems:
        if found:
            raise BenchError(f"{found}; its times would mean nothing")


def _result_file(folder: str, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.json")
