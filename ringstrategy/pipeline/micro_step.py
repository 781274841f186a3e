"""1F1B: ``training_step`` runs once per micro-batch, so that a backward can begin before all forwards are done.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021 (PipeDream-Flush). The last stage runs the
whole ``training_step`` on each micro-batch and differentiates its loss at once; the other stages run it as far as the
call of the pipelined module, for its inputs:

    last stage      training_step(0): F0 ──▶ loss, log ─▶ B0     training_step(1): F1 ──▶ loss, log ─▶ B1
    other stages    training_step(0) up to net(x): F0            training_step(1) up to net(x): F1          B0   B1

The gradients lie ready when the schedule is through. What is returned to Lightning is a loss whose backward hands them
out, times the gradient of the loss: division by the accumulated batches, loss scales and hooks find all as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _NormBase

from ringstrategy.pipeline.batch_norm import DeferredStatistics
from ringstrategy.pipeline.calls import Call, flatten_call
from ringstrategy.pipeline.example import captured_call
from ringstrategy.pipeline.function import PipelinedForward
from ringstrategy.pipeline.generator import seed_of, seeded_everywhere
from ringstrategy.pipeline.micro_batches import split
from ringstrategy.pipeline.pipeline import Pipeline, Prepared
from ringstrategy.pipeline.replay import Journal, SharedBuffers, SharedMetrics, Weights
from ringstrategy.pipeline.schedules import one_f_one_b

__all__ = ["MicroBatchWeight", "MicroSteps"]

MicroBatchWeight: TypeAlias = Literal["samples", "sum"] | Callable[[Any], float]


class MicroSteps:
    """Runs the training steps of one stage.

    Args:
        pipeline: this stage.
        module: the user's.
        weigh: what a micro-batch's loss counts for. ``"samples"``: the loss is a mean over samples; ``"sum"``: it is a
            sum; else a function of a micro-batch, e.g. how many of its positions are not ignored.
        device: of this stage.
    """

    def __init__(
        self, pipeline: Pipeline, module: pl.LightningModule, weigh: MicroBatchWeight, device: torch.device
    ) -> None:
        self._pipeline = pipeline
        self._module = module
        self._weigh = weigh
        self._device = device
        self._steps = 0
        inside = set(pipeline.plan.module.modules())
        self._norms = [child for child in module.modules() if isinstance(child, _NormBase) and child not in inside]

    def run(self, step: Callable[[Any], Any], batch: Any, scale: float = 1.0) -> Any:
        """Train on a batch.

        Args:
            step: the user's ``training_step``, given a micro-batch.
            batch: the whole batch.
            scale: what losses are multiplied with while gradients are computed, against underflow.

        Returns:
            What ``training_step`` would return for the whole batch; the same on all stages.

        Raises:
            ValueError: the step does not call the pipelined module just once, or has a loss for some micro-batches and
                none for others.
        """
        leaves, spec = pytree.tree_flatten(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self._pipeline.chunks == "auto":
            self._choose_chunks(step, batch)
        sizes = self._pipeline.sizes(tensors, self._norms)
        parts = [split(leaf, sizes) if isinstance(leaf, Tensor) else [leaf] * len(sizes) for leaf in leaves]
        micro_batches = [pytree.tree_unflatten([part[m] for part in parts], spec) for m in range(len(sizes))]
        weights = self._weights(micro_batches, sizes)
        running = _Running(self, step, micro_batches, sizes, weights, scale, seed_of(torch.initial_seed(), self._steps))
        self._steps += 1
        return running.complete()

    def _choose_chunks(self, step: Callable[[Any], Any], batch: Any) -> None:
        """Try them on what the pipelined module gets of the whole batch."""
        with seeded_everywhere(0, self._device), Journal().of(self._module, 0):
            example = captured_call(self._pipeline.plan.module, lambda: step(batch))
        if example is None:
            raise ValueError(_NOT_CALLED.format(type(self._module).__name__, self._pipeline.plan.name))
        self._pipeline.choose_chunks(example.tensors, example.call)

    def _weights(self, micro_batches: Sequence[Any], sizes: tuple[int, ...]) -> Weights:
        samples = [size / max(1, sum(sizes)) for size in sizes] if len(sizes) > 1 else [1.0]
        if self._weigh == "samples":
            return Weights(samples, samples)
        if self._weigh == "sum":
            return Weights(samples, [1.0] * len(sizes))
        counts = [float(self._weigh(micro_batch)) for micro_batch in micro_batches]
        total = sum(counts)
        return Weights(samples, [count / total if total else 0.0 for count in counts])


@dataclass
class _Running:
    """One training step under way; see :class:`MicroSteps` for the arguments."""

    owner: MicroSteps
    step: Callable[[Any], Any]
    micro_batches: Sequence[Any]
    sizes: tuple[int, ...]
    weights: Weights
    scale: float
    seed: int
    prepared: Prepared | None = None
    journal: Journal = field(default_factory=Journal)
    results: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pipeline = self.owner._pipeline
        self._engine = self._pipeline.engine
        module, plan = self.owner._module, self._pipeline.plan
        self._outside = [
            parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in plan.owners
        ]
        self._outside_gradients: list[Tensor | None] = [None] * len(self._outside)
        norms = self.owner._norms if self._pipeline.deferred_batch_norm else ()
        self._statistics = DeferredStatistics(norms, len(self.sizes))
        self._inputs: dict[int, list[Tensor]] = {}  # as the step made them, with their graph
        self._roots: dict[int, tuple[list[Tensor], list[Tensor | None]]] = {}

    def complete(self) -> Any:
        """Run this stage's part of the schedule."""
        engine = self._engine
        metrics = SharedMetrics(self.owner._module)
        buffers = SharedBuffers(self.owner._module, self._pipeline.plan.owners)
        for action in one_f_one_b(engine.stages, len(self.sizes))[engine.stage]:
            if action.kind == "F":
                self._forward(action.micro_batch)
            else:
                self._backward(action.micro_batch)
        assert self.prepared is not None
        self.prepared.statistics.commit()
        gradients = self._gradients(self.prepared)
        outcome: list[Any] = []
        if engine.last:
            self._statistics.commit()
            outcome = [self._outcome(), self.journal.entries(self.weights), metrics.changes(), buffers.changes()]
        result, entries, *changes = engine.from_last(outcome, f"call {self.prepared.run.number}, result")
        if not engine.last:
            metrics.apply(changes[0])
            buffers.apply(changes[1])
        for entry in entries:
            self.owner._module.log(entry.name, metrics.find(entry.value), **entry.options)
        return self._with_gradients(result, gradients)

    # -- forward -----------------------------------------------------------------------------------------------------

    def _forward(self, number: int) -> None:
        module, micro_batch = self.owner._module, self.micro_batches[number]
        seed = seed_of(self.seed, number)
        with seeded_everywhere(seed, self.owner._device), self.journal.of(module, number):
            if self._engine.last:
                self._whole_step(number, micro_batch)
                return
            if number == 0 or self._reads_inputs:
                example = captured_call(self._pipeline.plan.module, lambda: self.step(micro_batch))
                if example is None:
                    raise ValueError(_NOT_CALLED.format(type(module).__name__, self._pipeline.plan.name))
                self._start(number, example.tensors, example.call)
        assert self.prepared is not None
        self._engine.forward(self.prepared.run, number)

    @property
    def _reads_inputs(self) -> bool:
        return self.prepared is None or bool(self.prepared.run.part.code.program.inputs)

    def _start(self, number: int, tensors: list[Tensor], call: Call) -> None:
        """Hand the inputs of a micro-batch to the stage."""
        if self.prepared is None:
            self.prepared = self._pipeline.prepare([[None] * call.tensors for _ in self.sizes], call, self.sizes)
        elif call != self.prepared.call:
            raise ValueError("The pipelined module is called in another way for one micro-batch than for another.")
        self._inputs[number] = tensors
        for place in self.prepared.run.part.code.program.inputs:
            self.prepared.run.part.inputs[number][place] = tensors[place]

    def _whole_step(self, number: int, micro_batch: Any) -> None:
        module, plan = self.owner._module, self._pipeline.plan
        calls: list[list[Tensor]] = []

        def receive(*args: Any, **kwargs: Any) -> Any:
            if calls:
                raise ValueError(
                    f"{type(module).__name__}.training_step calls the pipelined module more than once, which 1F1B "
                    "cannot interleave. Use schedule='gpipe'."
                )
            self._start(number, *flatten_call(args, kwargs))
            assert self.prepared is not None
            output = self._engine.forward(self.prepared.run, number)
            fresh = pytree.tree_map_only(
                Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), output
            )
            calls.append(pytree.tree_leaves(fresh))
            return fresh

        forward = PipelinedForward(plan.module, receive)
        try:
            with self._statistics.micro_batch():
                result = self.step(micro_batch)
        finally:
            forward.remove()
        self._engine.check()
        if not calls:
            raise ValueError(_NOT_CALLED.format(type(module).__name__, plan.name))
        self.results.append(result)
        loss = _loss_of(result)
        if loss is not None:
            self.journal.note_loss(number, loss)
        self._roots[number] = calls[0], self._differentiate(number, loss, calls[0])

    def _differentiate(self, number: int, loss: Tensor | None, outputs: list[Tensor]) -> list[Tensor | None]:
        """The gradients of the module's output, for the backward; those of what is outside of it are added up."""
        gradients: list[Tensor | None] = [None] * len(outputs)
        wanted = [place for place, leaf in enumerate(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        leaves = [*(outputs[place] for place in wanted), *self._outside]
        if loss is None or not loss.requires_grad or not leaves or not self.weights.loss[number]:
            return gradients
        # The step's inputs may come from the same graph, through which the pipeline's own gradients go later.
        keep = any(tensor.requires_grad for tensor in self._inputs[number])
        with torch.autocast(self.owner._device.type, enabled=False):
            root = loss * (self.weights.loss[number] * self.scale)
            found = torch.autograd.grad(root, leaves, allow_unused=True, retain_graph=keep)
        for place, gradient in zip(wanted, found, strict=False):
            gradients[place] = gradient
        self._add_outside(found[len(wanted) :])
        return gradients

    # -- backward ----------------------------------------------------------------------------------------------------

    def _backward(self, number: int) -> None:
        assert self.prepared is not None
        _, gradients = self._roots.pop(number, ((), []))
        with torch.autocast(self.owner._device.type, enabled=False):
            self._engine.backward(self.prepared.run, number, gradients)
            into_inputs = self.prepared.run.part.input_gradients[number]
            pairs = [
                (tensor, gradient)
                for tensor, gradient in zip(self._inputs.pop(number, []), into_inputs, strict=False)
                if gradient is not None
            ]
            if pairs and self._outside:
                roots, seeds = zip(*pairs, strict=True)
                self._add_outside(torch.autograd.grad(roots, self._outside, seeds, allow_unused=True))

    def _add_outside(self, gradients: Sequence[Tensor | None]) -> None:
        for place, gradient in enumerate(gradients):
            total = self._outside_gradients[place]
            if gradient is not None:
                self._outside_gradients[place] = gradient if total is None else total + gradient

    # -- the end -----------------------------------------------------------------------------------------------------

    def _gradients(self, prepared: Prepared) -> list[tuple[nn.Parameter, Tensor]]:
        """All gradients of this stage's parameters."""
        named = list(zip(prepared.run.part.code.parameters, self._pipeline.parameter_gradients(prepared), strict=True))
        if self._outside:
            everyone = range(self._engine.stages)
            tag = f"call {prepared.run.number}, parameters outside of the pipelined module"
            named += zip(self._outside, self._engine.sum_over(everyone, self._outside_gradients, tag), strict=True)
        totals: dict[nn.Parameter, Tensor] = {}
        for parameter, gradient in named:
            if gradient is not None:
                totals[parameter] = totals[parameter] + gradient if parameter in totals else gradient
        return list(totals.items())

    def _outcome(self) -> Any:
        """What ``training_step`` returned, for the whole batch."""
        losses = [_loss_of(result) for result in self.results]
        if all(loss is None for loss in losses):
            return None
        if any(loss is None for loss in losses):
            raise ValueError(
                f"{type(self.owner._module).__name__}.training_step returned a loss for some micro-batches of a batch "
                "and None for others. Return one for all or none, or use schedule='gpipe'."
            )
        loss = self.weights.whole_loss({n: loss.detach() for n, loss in enumerate(losses) if loss is not None})
        if isinstance(self.results[0], Tensor):
            return loss
        extras = [{key: value for key, value in result.items() if key != "loss"} for result in self.results]
        return {"loss": loss, **self.weights.merge(extras, self.sizes)}

    def _with_gradients(self, result: Any, gradients: list[tuple[nn.Parameter, Tensor]]) -> Any:
        if result is None:
            return None
        loss = result if isinstance(result, Tensor) else result["loss"]
        anchor = torch.empty(0, requires_grad=True)
        parameters = [parameter for parameter, _ in gradients]
        loss = _Stash.apply(loss, [gradient for _, gradient in gradients], self.scale, anchor, *parameters)
        return loss if isinstance(result, Tensor) else {**result, "loss": loss}


_NOT_CALLED = (
    "{0}.training_step does not call the pipelined module '{1}'. Call it, or say with `module=` which one it calls."
)


class _Stash(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], scale: float, *_: Tensor) -> Tensor:
        ctx.gradients, ctx.scale = gradients, scale
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        stashed = ctx.gradients
        if stashed is None:
            raise RuntimeError("backward() a second time, after one that did not ask for retain_graph=True")
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.gradients = None  # nobody else has them now: they become `.grad` without a copy
        factor = gradient / ctx.scale
        if factor.is_cpu and factor == 1:  # a device would have to be waited for
            return None, None, None, None, *stashed
        return None, None, None, None, *(each * factor.to(each.dtype) for each in stashed)


def _loss_of(result: Any) -> Tensor | None:
    loss = result.get("loss") if isinstance(result, dict) else result
    return loss if isinstance(loss, Tensor) else None
