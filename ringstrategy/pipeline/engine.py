"""Runs a stage's part of a schedule: receives, computes, sends on.

     stage s-1  ──▶ activations ──▶  stage s  ──▶ activations ──▶  stage s+1
                ◀── gradients ◀──             ◀── gradients ◀──

Sends never wait for the receiver, so whoever waits does so for a computation, and the order of the schedule alone
decides that all come to an end (see :func:`~ringstrategy.pipeline.schedules.validate`).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ringstrategy.pipeline.channels import Channel
from ringstrategy.pipeline.micro_batches import merge
from ringstrategy.pipeline.schedules import Action
from ringstrategy.pipeline.stage import Pass
from ringstrategy.pipeline.watched_channel import Waiting, WatchedChannel

__all__ = ["Engine", "Run"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Run:
    """One call of the pipelined module.

    Args:
        number: how many calls came before; all stages count alike, and say it with every message.
        part: what this stage computes.
        sizes: rows per micro-batch.
    """

    number: int
    part: Pass
    sizes: tuple[int, ...]


def _all_or_none(method: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[Engine, P], T]:
    """A stage that fails in here leaves the others waiting, also where the program catches the error."""

    @functools.wraps(method)
    def checked(engine: Engine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        engine.check()
        try:
            return method(engine, *args, **kwargs)
        except BaseException as error:
            engine.fail(error)
            raise

    return checked


class Engine:
    """The messages between the stages of one pipeline.

    Args:
        stage: this rank's.
        channels: to every other stage.
        waiting: context around every wait, given what is waited for and of which stage.
        on_error: is told of an error on this stage, after which the others cannot go on.

    Attributes:
        channels: to every other stage; failures interrupt their waits.
        record: called with each action of this stage and when it began and ended computing (``time.perf_counter``
            seconds); None while nobody asks.
        waited_seconds: time in which this stage had nothing to do but wait for another one.
    """

    def __init__(
        self,
        stage: int,
        channels: Mapping[int, Channel],
        waiting: Waiting = lambda _, __: contextlib.nullcontext(),
        on_error: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self.stage = stage
        self.stages = len(channels) + 1
        self.record: Callable[[Action, float, float], None] | None = None
        self.waited_seconds = 0.0
        self.channels = {other: WatchedChannel(channel, other, waiting) for other, channel in channels.items()}
        self._before = self.channels.get(stage - 1)
        self._after = self.channels.get(stage + 1)
        self._on_error = on_error
        self._error: BaseException | None = None

    @property
    def last(self) -> bool:
        """Whether this stage computes the module's output."""
        return self._after is None

    @property
    def bytes_sent(self) -> int:
        """Bytes of the tensors that this stage has sent to others."""
        return sum(channel.bytes_sent for channel in self.channels.values())

    # -- one micro-batch ---------------------------------------------------------------------------------------------

    @_all_or_none
    def forward(self, run: Run, micro_batch: int) -> Any:
        """Take a micro-batch through this stage.

        Returns:
            The module's output for it on the last stage, None on the others.
        """
        tag = f"call {run.number}, F{micro_batch}"
        received: list[Any] = []
        if self._before is not None:
            received = self._receive(self._before, tag)
        begun = time.perf_counter()
        values = run.part.forward(micro_batch, received)
        self._note(Action("F", micro_batch), begun)
        if self._after is None:
            return values[0]
        _send(self._after, values, tag)
        return None

    @_all_or_none
    def backward(self, run: Run, micro_batch: int, gradients: Sequence[Tensor | None] = (), keep: bool = False) -> None:
        """Take a micro-batch's gradients back through this stage.

        Args:
            run: the call.
            micro_batch: which one.
            gradients: on the last stage, of the flattened output.
            keep: a second backward may follow.
        """
        tag = f"call {run.number}, B{micro_batch}"
        if self._after is not None:
            gradients = ()
            if run.part.expects_gradients(micro_batch):
                gradients = self._receive(self._after, tag)
        owes = self._before is not None and run.part.owes_gradients(micro_batch)
        begun = time.perf_counter()
        back = run.part.backward(micro_batch, gradients, keep)
        self._note(Action("B", micro_batch), begun)
        if self._before is not None and owes:
            self._before.send(back, tag)

    # -- all stages together -----------------------------------------------------------------------------------------

    @_all_or_none
    def share_output(self, run: Run, outputs: Sequence[Any]) -> tuple[Any, list[Tensor]]:
        """Put the last stage's outputs together and give them to all.

        Args:
            run: the call.
            outputs: of every micro-batch; only the last stage has them.

        Returns:
            The structure of the output with a :class:`Place` for every tensor, and the tensors, detached. Those that
            take a gradient say so by ``requires_grad``.
        """
        tag = f"call {run.number}, output"
        if not self.last:
            structure, *received = self._receive(self.channels[self.stages - 1], tag)
            return structure, received
        needs = [False] * len(pytree.tree_leaves(outputs[0]))
        for output in outputs:
            for place, leaf in enumerate(pytree.tree_leaves(output)):
                needs[place] |= isinstance(leaf, Tensor) and leaf.requires_grad
        with torch.no_grad():
            leaves, spec = pytree.tree_flatten(merge(outputs, run.sizes))
        tensors: list[Tensor] = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[place] = Place(len(tensors))
                tensors.append(leaf.detach().requires_grad_(needs[place]))
        structure = pytree.tree_unflatten(leaves, spec)
        for channel in self.channels.values():
            channel.send([structure, *tensors], tag)
        return structure, tensors

    @_all_or_none
    def from_last(self, values: list[Any], tag: str) -> list[Any]:
        """The last stage's values, on all stages."""
        if not self.last:
            return self._receive(self.channels[self.stages - 1], tag)
        for channel in self.channels.values():
            _send(channel, values, tag)
        return values

    @_all_or_none
    def sum_over(self, stages: Iterable[int], values: list[Tensor | None], what: str) -> list[Tensor | None]:
        """Add tensors of several stages up, in the order of the stages, so that all end with the same bits.

        Args:
            stages: those that take part; this one among them.
            values: this stage's. None counts as zero.
            what: for errors.
        """
        first, *others = sorted(stages)
        if self.stage != first:
            self.channels[first].send(values, what)
            return self._receive(self.channels[first], what)
        totals = list(values)
        for other in others:
            for place, value in enumerate(self._receive(self.channels[other], what)):
                if value is not None:
                    total = totals[place]
                    totals[place] = value if total is None else total + value
        for other in others:
            self.channels[other].send(totals, what)
        return totals

    def meet(self, where: str) -> None:
        """Make sure that all stages are at the same point, where a message of the schedule need not tell.

        Args:
            where: they are.

        Raises:
            WrongMessage: one of them is elsewhere.
        """
        for channel in self.channels.values():
            channel.send([], where)
        for channel in self.channels.values():
            channel.receive(where)

    # -- failures ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error of an earlier call, should the program have caught it."""
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """Note that this stage cannot go on, and let it be known."""
        self._error = self._error or error
        self._on_error(error)

    def abort(self, error: BaseException) -> None:
        """Make every wait, now and later, raise ``error``. Safe from any thread."""
        for channel in self.channels.values():
            channel.abort(error)

    def close(self) -> None:
        """Let go of the channels. Touches no other rank."""
        for channel in self.channels.values():
            channel.close()

    def _receive(self, channel: Channel, tag: str) -> list[Any]:
        begun = time.perf_counter()
        values = channel.receive(tag)
        self.waited_seconds += time.perf_counter() - begun
        return _restore(values)

    def _note(self, action: Action, begun: float) -> None:
        if self.record is not None:
            self.record(action, begun, time.perf_counter())


@dataclass(frozen=True)
class Place:
    """Stands for tensor ``number`` in a structure that travels without its tensors."""

    number: int


@dataclass(frozen=True)
class _Nested:
    """Leads a message whose values are more than tensors and plain Python values; they follow flattened."""

    spec: Any


def _send(channel: Channel, values: Sequence[Any], tag: str) -> None:
    leaves, spec = pytree.tree_flatten(list(values))
    if len(leaves) == len(values) and all(leaf is value for leaf, value in zip(leaves, values, strict=True)):
        channel.send(values, tag)
    else:
        channel.send([_Nested(spec), *leaves], tag)


def _restore(values: list[Any]) -> list[Any]:
    if values and isinstance(values[0], _Nested):
        restored: list[Any] = pytree.tree_unflatten(values[1:], values[0].spec)
        return restored
    return values
