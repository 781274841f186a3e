"""The pipelined module, as seen from one of its stages: what happens when somebody calls it.

GPipe (Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019): the forward
of the call runs the forwards of all micro-batches and gives the last stage's output to all stages. Whoever called
computes the loss on the whole output, on every stage alike. The backward of the call runs those of all micro-batches:

    every stage   net(x) ───────────────────▶ output ──▶ loss ──▶ loss.backward() ──────────────────────▶ gradients
                    │                            ▲                       │                                    ▲
    stage 0         F0 F1 F2 F3                  │                       │            B3 B2 B1 B0             │
    stage 1            F0 F1 F2 F3 ──────────────┘                       └─▶ B3 B2 B1 B0 ─────────────────────┘
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ringstrategy.pipeline.batch_norm import DeferredStatistics, untracked_statistics
from ringstrategy.pipeline.calls import Call, flatten_call
from ringstrategy.pipeline.engine import Engine, Place, Run
from ringstrategy.pipeline.function import PipelinedCall, put_together
from ringstrategy.pipeline.generator import own_generators, seed_of
from ringstrategy.pipeline.micro_batches import micro_batch_sizes, rows_of, split
from ringstrategy.pipeline.plan import PipelinePlan
from ringstrategy.pipeline.replayed_buffers import ReplayedBuffers, Snapshot
from ringstrategy.pipeline.schedules import gpipe
from ringstrategy.pipeline.side_effects import unchanged_buffers
from ringstrategy.pipeline.stage import CheckpointMode, Pass, StageCode, recomputed
from ringstrategy.pipeline.tuning import candidates, fastest

__all__ = ["Pipeline"]


@dataclass
class Prepared:
    """A call of the pipelined module, ready to run.

    Attributes:
        run: what the engine runs.
        call: how the module is called, but for the tensors.
        statistics: of normalisation layers; they move when all forwards are done.
        structure: of the output, once it is known.
    """

    run: Run
    call: Call
    statistics: DeferredStatistics
    structure: Any = None


class Pipeline:
    """One stage of a pipelined module.

    Args:
        plan: how the module is cut.
        engine: the messages to the other stages.
        device: of this stage.
        chunks: micro-batches per call, where the batch has enough rows. ``"auto"`` tries a few on the first call that
            is differentiated.
        checkpoint: which micro-batches are computed again in backward.
        deferred_batch_norm: running statistics move once per call, by those of the whole batch, and not once per
            micro-batch.
        slowest: the largest of each element of a tensor over all ranks.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        engine: Engine,
        device: torch.device,
        *,
        chunks: int | Literal["auto"],
        checkpoint: CheckpointMode,
        deferred_batch_norm: bool = True,
        slowest: Callable[[Tensor], Tensor] = lambda times: times,
    ) -> None:
        self.plan = plan
        self.engine = engine
        self.chunks = chunks
        self._device = device
        self._checkpoint = checkpoint
        self.deferred_batch_norm = deferred_batch_norm
        self._slowest = slowest
        self._calls = 0
        self._codes: dict[int, StageCode] = {}
        self._buffers: dict[int, ReplayedBuffers] = {}  # by the id of their code
        self._norms = [child for child in plan.module.modules() if isinstance(child, _BatchNorm)]

    # -- GPipe -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's ``forward`` does."""
        tensors, call = flatten_call(args, kwargs)
        differentiable = torch.is_grad_enabled() and (
            any(tensor.requires_grad for tensor in tensors)
            or any(parameter.requires_grad for parameter in self.plan.module.parameters())
        )
        if differentiable:
            self.choose_chunks(tensors, call)
        sizes = self.sizes(tensors)
        prepared = self.prepare(_rows(tensors, sizes), call, sizes, differentiable)
        if not differentiable:
            return put_together(*self._all_forwards(prepared))
        return PipelinedCall(
            lambda: self._all_forwards(prepared),
            lambda gradients, keep: self._all_backwards(prepared, tensors, gradients, keep),
            [tensor for tensor in tensors if tensor.requires_grad],
            prepared.run.part.code.parameters,
        ).run()

    def _all_forwards(self, prepared: Prepared) -> tuple[Any, list[Tensor]]:
        run = prepared.run
        outputs = [self.engine.forward(run, number) for number in range(len(run.sizes))]
        prepared.statistics.commit()
        prepared.structure, tensors = self.engine.share_output(run, outputs)
        return prepared.structure, tensors

    def _all_backwards(
        self, prepared: Prepared, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], keep: bool
    ) -> Sequence[Tensor | None]:
        run = prepared.run
        leaves = pytree.tree_leaves(prepared.structure)
        by_leaf = [gradients[leaf.number] if isinstance(leaf, Place) else None for leaf in leaves]
        pieces = [[None] * len(run.sizes) if gradient is None else split(gradient, run.sizes) for gradient in by_leaf]
        count = len(run.sizes)
        for action in gpipe(self.engine.stages, count)[self.engine.stage][count:]:
            number = action.micro_batch
            self.engine.backward(run, number, [piece[number] for piece in pieces], keep)
        return [*self._input_gradients(prepared, tensors), *self.parameter_gradients(prepared)]

    def choose_chunks(self, tensors: list[Tensor], call: Call) -> None:
        """Where ``chunks="auto"``, decide by trials on the inputs of a call. Collective."""
        if self.chunks != "auto":
            return

        def trial(count: int) -> None:
            sizes = micro_batch_sizes(rows_of(tensors), count)
            prepared = self.prepare(_rows(tensors, sizes), call, sizes, trial=True)
            _, outputs = self._all_forwards(prepared)
            gradients = [torch.ones_like(output) if output.requires_grad else None for output in outputs]
            self._all_backwards(prepared, tensors, gradients, keep=False)

        with unchanged_buffers(self.plan.module):
            self.chunks = fastest(candidates(rows_of(tensors), self._least()), trial, self._slowest)

    # -- for any schedule --------------------------------------------------------------------------------------------

    def prepare(
        self,
        inputs: Sequence[list[Tensor | None]],
        call: Call,
        sizes: tuple[int, ...],
        differentiable: bool = True,
        trial: bool = False,
    ) -> Prepared:
        """Make a call ready to run; all stages make the same ones in the same order.

        Args:
            inputs: by micro-batch, the flattened tensors of the call; those that this stage does not read are dropped.
            call: all the rest.
            sizes: rows by micro-batch.
            differentiable: whether gradients can be asked for.
            trial: no statistics move.
        """
        code = self._code(call)
        for row in inputs:
            row[:] = [tensor if place in code.program.inputs else None for place, tensor in enumerate(row)]
        norms = [self.plan.module.get_submodule(name) for name in code.program.modules]
        statistics = DeferredStatistics(norms if self.deferred_batch_norm and not trial else (), len(sizes))
        number, self._calls = self._calls, self._calls + 1
        seed = seed_of(torch.initial_seed(), number, self.engine.stage)
        again = [n for n in range(len(sizes)) if differentiable and recomputed(self._checkpoint, n, len(sizes))]
        around = _Around(self._device, norms, statistics, self._buffers[id(code)], again, seed, trial)
        part = Pass(code, inputs, self._checkpoint, around, differentiable)
        return Prepared(Run(number, part, sizes), call, statistics)

    def parameter_gradients(self, prepared: Prepared) -> list[Tensor | None]:
        """The gradients of this stage's parameters; of one that several stages use, the sum."""
        part = prepared.run.part
        gradients = part.take_gradients()
        place_of = {id(parameter): place for place, parameter in enumerate(part.code.parameters)}
        for stages, parameters in self.plan.shared(self.engine.stage).items():
            places = [place_of.get(id(parameter)) for parameter in parameters if parameter.requires_grad]
            mine = [None if place is None else gradients[place] for place in places]
            total = self.engine.sum_over(stages, mine, f"call {prepared.run.number}, shared parameters")
            for place, gradient in zip(places, total, strict=True):
                if place is not None:
                    gradients[place] = gradient
        return gradients

    def _input_gradients(self, prepared: Prepared, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the module's inputs that require one, summed over all stages that read them."""
        wanted = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
        if not wanted:
            return []
        sizes, per_micro_batch = prepared.run.sizes, prepared.run.part.input_gradients
        mine = [_join([row[place] for row in per_micro_batch], tensors[place], sizes) for place in wanted]
        return self.engine.sum_over(range(self.engine.stages), mine, f"call {prepared.run.number}, inputs")

    def sizes(self, tensors: Sequence[Tensor], others: Sequence[nn.Module] = ()) -> tuple[int, ...]:
        """Rows of each micro-batch that a batch is split into.

        Args:
            tensors: of the batch.
            others: normalisation layers outside of the module that micro-batches pass through.
        """
        chunks = 2 * self.engine.stages if self.chunks == "auto" else self.chunks  # nothing was trained yet
        return micro_batch_sizes(rows_of(tensors), chunks, self._least(others))

    def _least(self, others: Sequence[nn.Module] = ()) -> int:
        """Rows that a micro-batch needs: a batch norm normalises one by another."""
        return 2 if any(norm.training for norm in (*self._norms, *others)) else 1

    def _code(self, call: Call) -> StageCode:
        programs = self.plan.programs(call)
        program = programs[self.engine.stage]
        code = self._codes.get(id(program))
        if code is None:
            code = self._codes[id(program)] = StageCode(program, [])
            self._buffers[id(code)] = ReplayedBuffers(self.plan.module, program.modules, program.buffers)
        parameters: Mapping[str, nn.Parameter] = self.plan.parameters
        used = [parameters[name] for name in program.parameters]
        # What other stages use as well has the same gradient here, even where this call does not use it here.
        shared = [parameter for held in self.plan.shared(self.engine.stage).values() for parameter in held]
        unique = {id(parameter): parameter for parameter in (*used, *shared)}
        code.parameters = [parameter for parameter in unique.values() if parameter.requires_grad]
        return code


class _Around:
    """The context of every computation of one call."""

    def __init__(
        self,
        device: torch.device,
        modules: Sequence[nn.Module],
        statistics: DeferredStatistics,
        buffers: ReplayedBuffers,
        recomputed: Sequence[int],
        seed: int,
        trial: bool,
    ) -> None:
        self._device = device
        self._modules = modules
        self._statistics = statistics
        self._buffers = buffers
        self._recomputed = recomputed
        self._snapshots: dict[int, Snapshot] = {}
        self._seed = seed
        self._trial = trial
        # Backward runs outside of the autocast in which forward ran.
        self._autocast = torch.is_autocast_enabled(device.type)
        self._dtype = torch.get_autocast_dtype(device.type)

    @contextlib.contextmanager
    def __call__(self, micro_batch: int, again: bool) -> Iterator[None]:
        with (
            own_generators(self._device) as seed,
            self._replayed(micro_batch, again),
            # Casts of weights that are kept from a forward without graph would cut the graph of a later one.
            torch.autocast(self._device.type, self._dtype, self._autocast, cache_enabled=False),
            untracked_statistics(self._modules) if again or self._trial else self._statistics.micro_batch(),
        ):
            seed(seed_of(self._seed, micro_batch))
            yield

    @contextlib.contextmanager
    def _replayed(self, micro_batch: int, again: bool) -> Iterator[None]:
        if again:
            with self._buffers.again(self._snapshots[micro_batch]):
                yield
        elif micro_batch in self._recomputed:
            with self._buffers.first() as self._snapshots[micro_batch]:
                yield
        else:
            yield


def _rows(tensors: Sequence[Tensor], sizes: tuple[int, ...]) -> list[list[Tensor | None]]:
    """The part of each tensor that each micro-batch gets."""
    parts = [split(tensor, sizes) for tensor in tensors]
    return [[part[number] for part in parts] for number in range(len(sizes))]


def _join(gradients: Sequence[Tensor | None], tensor: Tensor, sizes: Sequence[int]) -> Tensor | None:
    """The gradient of an input from those of its parts."""
    known = [gradient for gradient in gradients if gradient is not None]
    if not known:
        return None
    whole = len(sizes) == 1 or not tensor.dim() or tensor.shape[0] != sum(sizes)
    if whole:  # all micro-batches saw all of it
        return known[0] if len(known) == 1 else torch.stack(known).sum(0)
    parts = torch.split(tensor, list(sizes))
    return torch.cat(
        [
            torch.zeros_like(part) if gradient is None else gradient
            for gradient, part in zip(gradients, parts, strict=True)
        ]
    )
