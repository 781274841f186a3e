"""The pipelines that are compared: one rank's part of a step of each.

All of them train the same module, cut at the same layers, on the same batch in the same micro-batches. Those of
``torch.distributed.pipelining`` run the same program per stage as ours. What differs is who moves the activations and
the gradients, and when.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ringstrategy.bench import BenchError
from ringstrategy.bench.models import SyntheticClassifier
from ringstrategy.pipeline.calls import flatten_call
from ringstrategy.pipeline.engine import Engine
from ringstrategy.pipeline.function import PipelinedForward
from ringstrategy.pipeline.micro_step import MicroSteps
from ringstrategy.pipeline.pipeline import Pipeline
from ringstrategy.pipeline.plan import PipelinePlan
from ringstrategy.pipeline.programs import StageProgram
from ringstrategy.pipeline.schedules import Action

__all__ = ["Bench", "Contender", "build_contender"]

_CPU = torch.device("cpu")
_TORCH_SCHEDULES: dict[str, type[ScheduleGPipe | Schedule1F1B]] = {
    "torch_gpipe": ScheduleGPipe,
    "torch_1f1b": Schedule1F1B,
}
Record = Callable[[Action, float, float], None]


class Contender(Protocol):
    """One rank of a pipeline."""

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensors that this rank has sent so far."""

    def step(self, record: Record) -> None:
        """Forward, loss and backward of the batch; leaves gradients at this rank's parameters.

        Args:
            record: is told of every micro-batch that this rank computes: the action, and its beginning and end in
                ``time.perf_counter`` seconds, without waiting for other ranks and sending.
        """


@dataclass(frozen=True)
class Bench:
    """What the contenders share.

    Attributes:
        module: the classifier; layers of other stages are on the meta device.
        plan: how its network is cut.
        engine: this rank's, for ours.
        batch: the whole of it.
    """

    module: SyntheticClassifier
    plan: PipelinePlan
    engine: Engine
    batch: tuple[Tensor, Tensor]


def build_contender(name: str, chunks: int, bench: Bench) -> Contender:
    """Make one by name.

    Args:
        name: ``"gpipe"``, ``"1f1b"``, ``"torch_gpipe"``, ``"torch_1f1b"`` or ``"naive"``.
        chunks: micro-batches; the naive one has one.
        bench: what it works on.

    Raises:
        BenchError: torch's cannot run this cut.
    """
    if name in _TORCH_SCHEDULES:
        return _Torch(bench, _TORCH_SCHEDULES[name], chunks)
    return _Ours(bench, chunks, one_f_one_b=name == "1f1b")


class _Ours:
    def __init__(self, bench: Bench, chunks: int, *, one_f_one_b: bool) -> None:
        self._bench = bench
        # torch's recompute nothing either.
        self._pipeline = Pipeline(bench.plan, bench.engine, _CPU, chunks=chunks, checkpoint="never")
        self._micro_steps = MicroSteps(self._pipeline, bench.module, "samples", _CPU) if one_f_one_b else None

    @property
    def bytes_sent(self) -> int:
        return sum(channel.bytes_sent for channel in self._bench.engine.channels.values())

    def step(self, record: Record) -> None:
        module, engine = self._bench.module, self._bench.engine
        engine.record = record
        if self._micro_steps is None:
            forward = PipelinedForward(module.network, self._pipeline)
            try:
                loss = module.training_step(self._bench.batch, 0)
            finally:
                forward.remove()
        else:
            loss = self._micro_steps.run(lambda micro_batch: module.training_step(micro_batch, 0), self._bench.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        engine.record = None


class _Torch:
    def __init__(self, bench: Bench, schedule: type[ScheduleGPipe | Schedule1F1B], chunks: int) -> None:
        engine = bench.engine
        program = bench.plan.programs(flatten_call((bench.batch[0],), {})[1])[engine.stage]
        if engine.stage and program.inputs:
            raise BenchError(
                f"stage {engine.stage} reads the input of the module, which torch.distributed.pipelining gives to the"
                " first stage only; leave its variants out"
            )
        self._inputs = () if engine.stage else (bench.batch[0],)
        self._target: dict[str, Any] = {"target": bench.batch[1]} if engine.last else {}
        self._module = _StageModule(bench.module.network, program, first=not engine.stage, last=engine.last)
        self._stage = _RecordedStage(self._module, engine.stage, engine.stages, _CPU)
        self._schedule = schedule(self._stage, chunks, loss_fn=F.cross_entropy)

    @property
    def bytes_sent(self) -> int:
        return self._module.bytes_sent

    def step(self, record: Record) -> None:
        self._stage.record = record
        self._schedule.step(*self._inputs, **self._target)


class _StageModule(nn.Module):
    """A stage of ours as torch wants it; it counts what its stage has to send."""

    def __init__(self, network: nn.Module, program: StageProgram, *, first: bool, last: bool) -> None:
        super().__init__()
        self.network = network
        self.bytes_sent = 0
        self._program = program
        self._first = first
        self._last = last

    def forward(self, *values: Tensor) -> Any:
        if self._first:
            return self._sent(self._program((), values))
        # The gradients that go back are as large as what they are the gradients of.
        self.bytes_sent += _bytes(value for value in values if value.requires_grad)
        return self._sent(self._program(values, [None] * len(self._program.inputs)))

    def _sent(self, values: tuple[Any, ...]) -> Any:
        if self._last:
            return values[0]
        self.bytes_sent += _bytes(values)
        return values


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


class _RecordedStage(PipelineStage):
    """Tells when it computes. Both methods are called between the messages, which the schedule waits for."""

    record: Record

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.record(Action("F", fwd_chunk_id), begun, time.perf_counter())
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        begun = time.perf_counter()
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.record(Action("B", bwd_chunk_id), begun, time.perf_counter())
