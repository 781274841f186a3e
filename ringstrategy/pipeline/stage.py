"""What one stage computes for one call of the pipelined module: forwards and backwards of micro-batches.

Nothing here talks to another stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from ringstrategy.pipeline.programs import StageProgram

__all__ = ["CheckpointMode", "Pass", "StageCode", "recomputed", "without_hooks"]

CheckpointMode = Literal["always", "except_last", "never"]


def recomputed(mode: CheckpointMode, number: int, count: int) -> bool:
    """Whether micro-batch ``number`` of ``count`` keeps its input alone and is computed again for its backward.

    The last one's backward comes next in GPipe: computing it again would save nothing (Huang et al., 2019; the modes
    are those of torchgpipe).
    """
    return mode == "always" or (mode == "except_last" and number < count - 1)


@dataclass
class StageCode:
    """A stage's part of one trace, with what is learnt about it.

    Attributes:
        program: computes the stage.
        parameters: those it uses that train.
        overwrites: places of arguments (received ones, then inputs) that it changes in place; None while unknown.
    """

    program: StageProgram
    parameters: list[nn.Parameter]
    overwrites: frozenset[int] | None = None


@dataclass
class _MicroBatch:
    """What is kept of a micro-batch until its backward.

    Attributes:
        received: what the stage before sent, flat.
        spec: its structure.
        inputs: the micro-batch's part of the module's inputs.
        outputs: flat, with their graph; None where they are to be computed again.
        differentiable: whether the next stage sends gradients of them.
    """

    received: list[Any]
    spec: pytree.TreeSpec
    inputs: list[Tensor | None]
    outputs: list[Any] | None = None
    differentiable: bool = False


@dataclass
class Pass:
    """One call of the pipelined module on one stage.

    Args:
        code: what to compute.
        inputs: parts of the module's flattened inputs, per micro-batch; None for one that the stage does not read.
        checkpoint: which micro-batches are computed again.
        around: context around each computation, given the micro-batch and whether it is done for the second time.
        differentiable: whether gradients can be asked for.

    Attributes:
        gradients: of ``code.parameters``, summed over micro-batches.
        input_gradients: per micro-batch and input.
        alive: micro-batches of which something is kept.
    """

    code: StageCode
    inputs: Sequence[list[Tensor | None]]
    checkpoint: CheckpointMode
    around: Callable[[int, bool], contextlib.AbstractContextManager[None]]
    differentiable: bool
    gradients: list[Tensor | None] = field(init=False)
    input_gradients: list[list[Tensor | None]] = field(init=False)

    def __post_init__(self) -> None:
        self._kept: dict[int, _MicroBatch] = {}
        self._sums: set[int] = set()  # which of the gradients are tensors of our own
        self.gradients = [None] * len(self.code.parameters)
        self.input_gradients = [[None] * len(inputs) for inputs in self.inputs]

    @property
    def alive(self) -> int:
        """Micro-batches that wait for their backward."""
        return len(self._kept)

    def forward(self, number: int, received: Sequence[Any]) -> list[Any]:
        """Compute micro-batch ``number``.

        Args:
            number: which one.
            received: the values of ``program.receives``, whose tensors are fresh leaves.

        Returns:
            The values of ``program.sends``, or the module's output in a list of one. Tensors that can take a gradient
            require one.
        """
        leaves, spec = pytree.tree_flatten(list(received))
        inputs = [
            None if value is None else value.detach().requires_grad_(value.requires_grad and self.differentiable)
            for value in self.inputs[number]
        ]
        micro_batch = _MicroBatch(leaves, spec, inputs)
        again = self.differentiable and recomputed(self.checkpoint, number, len(self.inputs))
        outputs = self._compute(number, micro_batch, with_graph=self.differentiable and not again)
        if not self.differentiable:
            return outputs
        self._kept[number] = micro_batch
        if again:
            # Nothing says yet which outputs depend on what trains; those that do not will get a gradient for nothing.
            needs = bool(self.code.parameters) or any(_wants_gradient(value) for value in (*leaves, *inputs))
            outputs = pytree.tree_map(lambda value: _announce(value, needs), outputs)
        else:
            micro_batch.outputs = pytree.tree_leaves(outputs)
        micro_batch.differentiable = any(_wants_gradient(value) for value in pytree.tree_leaves(outputs))
        return outputs

    def expects_gradients(self, number: int) -> bool:
        """Whether the next stage sends gradients of this micro-batch's outputs."""
        return self._kept[number].differentiable

    def owes_gradients(self, number: int) -> bool:
        """Whether the stage before expects gradients of what it sent."""
        return any(_wants_gradient(value) for value in self._kept[number].received)

    def backward(self, number: int, gradients: Sequence[Tensor | None], keep: bool = False) -> list[Tensor | None]:
        """Differentiate micro-batch ``number``, and add to ``self.gradients``.

        Args:
            number: which one.
            gradients: of the flattened outputs; none at all where the outputs take no gradient.
            keep: the backward may be asked for once more (``retain_graph``).

        Returns:
            The gradients of what was received.
        """
        micro_batch = self._kept[number] if keep else self._kept.pop(number)
        nothing: list[Tensor | None] = [None] * len(micro_batch.received)
        leaves = [
            *(value for value in micro_batch.received if _wants_gradient(value)),
            *(value for value in micro_batch.inputs if _wants_gradient(value)),
            *self.code.parameters,
        ]
        if not leaves or all(gradient is None for gradient in gradients):
            return nothing
        outputs = micro_batch.outputs
        if outputs is None:
            outputs = pytree.tree_leaves(self._compute(number, micro_batch, with_graph=True, again=True))
        roots = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and _wants_gradient(output)
        ]
        if not roots:
            return nothing
        with _each_told(self.code.parameters, self._add):
            found = iter(
                torch.autograd.grad(
                    [output for output, _ in roots],
                    leaves,
                    [gradient for _, gradient in roots],
                    allow_unused=True,
                    retain_graph=keep,
                )
            )
        back = [next(found) if _wants_gradient(value) else None for value in micro_batch.received]
        self.input_gradients[number] = [next(found) if _wants_gradient(value) else None for value in micro_batch.inputs]
        return back

    def take_gradients(self) -> list[Tensor | None]:
        """The gradients of ``code.parameters``, summed over the micro-batches so far; counts from zero afterwards."""
        gradients, self.gradients = self.gradients, [None] * len(self.code.parameters)
        self._sums.clear()
        return gradients

    def _add(self, place: int, gradient: Tensor) -> Tensor | None:
        """Add a gradient to its sum.

        Returns:
            The sum, for autograd to keep instead of the gradient, whose memory is then free; None where they differ in
            kind.
        """
        total = self.gradients[place]
        dense = gradient.layout == torch.strided
        if total is None:
            self.gradients[place] = gradient
            return None
        if dense and place in self._sums:
            total.add_(gradient)
            return total
        # What autograd found may be shared with other gradients: a sum is a tensor of our own.
        dense = dense and total.layout == torch.strided
        self.gradients[place] = total = total + gradient
        if dense:
            self._sums.add(place)
        return total if dense else None

    def _compute(self, number: int, micro_batch: _MicroBatch, *, with_graph: bool, again: bool = False) -> list[Any]:
        arguments = [*micro_batch.received, *micro_batch.inputs]
        written = self.code.overwrites
        with self.around(number, again), torch.set_grad_enabled(with_graph):
            # What the stage writes to in place is not what is kept for later, nor a leaf, nor the user's batch.
            fed = [
                value.clone() if isinstance(value, Tensor) and (written is None or place in written) else value
                for place, value in enumerate(arguments)
            ]
            trackable = written is None and not torch.is_inference_mode_enabled()
            before = [value._version if isinstance(value, Tensor) else 0 for value in fed] if trackable else []
            received = len(micro_batch.received)
            values = pytree.tree_unflatten(fed[:received], micro_batch.spec)
            outputs = list(self.code.program(values, fed[received:]))
            if trackable:
                self.code.overwrites = frozenset(
                    place
                    for place, (value, version) in enumerate(zip(fed, before, strict=True))
                    if isinstance(value, Tensor) and value._version != version
                )
        return outputs


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _announce(value: Any, needs: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(needs and (value.is_floating_point() or value.is_complex()))


@contextlib.contextmanager
def without_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Keep tensor hooks on parameters from seeing the gradients of single micro-batches: they see the sum, once."""
    hooked = [(hooks, dict(hooks)) for p in parameters if (hooks := p._backward_hooks)]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in hooked:
            hooks.update(before)


@contextlib.contextmanager
def _each_told(parameters: Sequence[nn.Parameter], tell: Callable[[int, Tensor], Tensor | None]) -> Iterator[None]:
    """Tell each parameter's gradient as soon as a backward has found it: in the cache still, and not all at the end."""
    with without_hooks(parameters):
        handles = [
            parameter.register_hook(partial(tell, place))  # type: ignore[no-untyped-call]
            for place, parameter in enumerate(parameters)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
