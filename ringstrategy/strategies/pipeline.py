"""``Trainer(strategy="gpipe")``: one model over several ranks, and replicas of the pipeline beside each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn import SyncBatchNorm
from torch.optim import LBFGS, Optimizer
from torchmetrics import Metric
from typing_extensions import override

from ringstrategy import _lightning
from ringstrategy.buffers import BufferSync
from ringstrategy.communication import Communication
from ringstrategy.pipeline.balance import check_balance
from ringstrategy.pipeline.batches import same_batch
from ringstrategy.pipeline.clipping import clip_grad_norm_
from ringstrategy.pipeline.connect import connect
from ringstrategy.pipeline.copies import CopyOfModule, copies_in
from ringstrategy.pipeline.engine import Engine
from ringstrategy.pipeline.example import find_example
from ringstrategy.pipeline.function import PipelinedForward
from ringstrategy.pipeline.gathering import with_gradient
from ringstrategy.pipeline.generator import same_generators
from ringstrategy.pipeline.loss_scaling import SharedOverflow
from ringstrategy.pipeline.micro_step import MicroBatchWeight, MicroSteps
from ringstrategy.pipeline.pipeline import Pipeline
from ringstrategy.pipeline.placement import Placement
from ringstrategy.pipeline.plan import Balance, Cut, PipelinePlan, choose_cut
from ringstrategy.pipeline.stage import CheckpointMode
from ringstrategy.pipeline.state import (
    drop_absent_state,
    find_absent,
    gather_optimizer_state,
    gather_state_dict,
    keep_own_optimizer_state,
    make_optimizer_whole,
    make_whole,
    take_from_first,
)
from ringstrategy.pipeline.table import as_text, stage_rows, stage_table
from ringstrategy.pipeline.tracing import find_module
from ringstrategy.process_group import RankGroup
from ringstrategy.recorder import Recorder
from ringstrategy.strategies.ring_ddp import RingDDPStrategy

__all__ = ["PipelineStrategy"]

T = TypeVar("T")
_CHUNKS = 8  # micro-batches, unless told otherwise
_Path = str | Path


class PipelineStrategy(RingDDPStrategy):
    """Trains one model over several ranks, each of which holds some of its layers (a stage).

    All ranks run the same, unmodified ``training_step`` on the same batch. The call of the pipelined module in it
    splits its input into micro-batches and takes them through the stages; every rank gets the output.

    Ranks count stage by stage: with ``num_stages=2``, ranks 0 and 1 are the stages of the first pipeline, ranks 2 and 3
    those of the second, which trains on other samples, as a rank of ``ring_ddp`` does.

    Args:
        num_stages: ranks per pipeline; all of them by default.
        chunks: micro-batches per call, where the batch has enough rows. ``"auto"`` tries a few on the first batch of
            training, before any weight moves, and keeps the fastest.
        balance: layers per stage, or what to cut by: measured ``"time"``, ``"size"`` of the parameters, or
            ``"memory"`` of parameters and activations. None is ``"time"`` where an input is known (from
            ``example_input_array``, or the train dataloader of a map-style dataset), else ``"size"``.
        checkpoint: which micro-batches are computed again in backward rather than kept: ``"always"`` all of them,
            ``"never"`` none, ``"except_last"`` all but the last one.
        schedule: ``"gpipe"`` computes the loss on the whole batch. ``"1f1b"`` runs ``training_step`` on every
            micro-batch, and keeps the activations of at most as many micro-batches as there are stages.
        module: the attribute of the LightningModule that is pipelined. None takes its only child with parameters, or
            its own ``forward``.
        deferred_batch_norm: running statistics of batch norms move once per batch, by those of the whole batch.
        micro_batch_weight: what the loss of a micro-batch counts for under 1F1B. ``"samples"``: it is a mean over
            samples. ``"sum"``: it is a sum. Else a function of a micro-batch, whose share of the batch's total is the
            weight: the number of labels that are not ignored, for instance.
        whole_after_fit: ``"everywhere"`` gives every rank all weights when training ends; ``"rank_zero"`` only rank 0,
            for models that do not fit the others.
        **kwargs: as in :class:`RingDDPStrategy`.

    Raises:
        ValueError: an argument has no meaning here.
    """

    def __init__(
        self,
        *,
        num_stages: int | None = None,
        chunks: int | Literal["auto"] = _CHUNKS,
        balance: Balance = None,
        checkpoint: CheckpointMode = "except_last",
        schedule: Literal["gpipe", "1f1b"] = "gpipe",
        module: str | None = None,
        deferred_batch_norm: bool = True,
        micro_batch_weight: MicroBatchWeight = "samples",
        whole_after_fit: Literal["everywhere", "rank_zero"] = "everywhere",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _check_count("num_stages", num_stages)
        if chunks != "auto":
            _check_count("chunks", chunks)
        for name, value, choices in (
            ("checkpoint", checkpoint, get_args(CheckpointMode)),
            ("schedule", schedule, ("gpipe", "1f1b")),
            ("whole_after_fit", whole_after_fit, ("everywhere", "rank_zero")),
        ):
            if value not in choices:
                raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}.")
        if not callable(micro_batch_weight) and micro_batch_weight not in ("samples", "sum"):
            raise ValueError(
                f"micro_batch_weight={micro_batch_weight!r} is unknown; choose 'samples', 'sum' or a function of a "
                "micro-batch."
            )
        if isinstance(balance, str) and balance not in ("size", "time", "memory"):
            raise ValueError(f"balance={balance!r} is unknown; choose 'size', 'time', 'memory' or layers per stage.")
        self._num_stages = num_stages
        self._chunks: int | Literal["auto"] = chunks
        self._balance = balance
        self._checkpoint: CheckpointMode = checkpoint
        self._module_name = module
        self._deferred_batch_norm = deferred_batch_norm
        self._schedule = schedule
        self._micro_batch_weight = micro_batch_weight
        self._whole_after_fit = whole_after_fit
        self._stages: RankGroup | None = None  # of this rank's pipeline
        self._plan: PipelinePlan | None = None
        self._placement: Placement | None = None
        self._copies: list[CopyOfModule] = []  # that callbacks keep
        self._engine: Engine | None = None
        self._forward: PipelinedForward | None = None
        self._micro_steps: MicroSteps | None = None
        self._metrics: list[tuple[Metric, Any]] = []  # and the groups they had
        self._overflow: SharedOverflow | None = None

    # -- who is who --------------------------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """Ranks per pipeline."""
        return self._num_stages or self.world_size

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.global_rank % self.num_stages

    @property
    def num_replicas(self) -> int:
        """Pipelines beside each other."""
        return self.world_size // self.num_stages

    @property
    def replica(self) -> int:
        """The pipeline that this rank belongs to."""
        return self.global_rank // self.num_stages

    @property
    @override
    def _ranks_per_replica(self) -> int:
        return self.num_stages

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_replicas, "rank": self.replica}

    @property
    @override
    def communication(self) -> Communication:
        """What averaging over the replicas has cost so far, and the other stages.

        ``bytes_sent`` counts what this stage has sent to others too, ``exposed_seconds`` the time in which it waited
        for them: the bubble.
        """
        return self._and_stages(super().communication)

    @communication.setter
    def communication(self, past: Communication) -> None:
        self._past = past

    def _and_stages(self, averaging: Communication) -> Communication:
        if self._engine is None:
            return averaging
        return averaging._replace(
            bytes_sent=averaging.bytes_sent + self._engine.bytes_sent,
            exposed_seconds=averaging.exposed_seconds + self._engine.waited_seconds,
        )

    # -- set-up ------------------------------------------------------------------------------------------------------

    @override
    def _settings(self) -> dict[str, object]:
        return super()._settings() | {
            "num_stages": self._num_stages,
            "chunks": self._chunks,
            "balance": self._balance,
            "checkpoint": self._checkpoint,
            "schedule": self._schedule,
            "module": self._module_name,
        }

    @override
    def setup_environment(self) -> None:
        stages, ranks = self.num_stages, self.num_processes * self.num_nodes
        if self._num_stages is not None and ranks % stages:
            raise ValueError(
                f"num_stages={stages} does not divide the {ranks} ranks of this run ({self.num_processes} devices x "
                f"{self.num_nodes} nodes). Choose a number of devices that is a multiple of num_stages."
            )
        if self._balance is not None and not isinstance(self._balance, str):
            # How many layers there are shows later; all else that is wrong shows before any rank waits for another.
            check_balance(self._balance, sum(n for n in self._balance if type(n) is int), self._num_stages or ranks)
        super().setup_environment()

    @override
    def setup_distributed(self) -> None:
        super().setup_distributed()
        assert self._group is not None
        assert self._monitor is not None
        stages, replicas = self.num_stages, self.num_replicas
        grid = [[replica * stages + stage for stage in range(stages)] for replica in range(replicas)]
        monitor = self._monitor
        with monitor.waiting("the other stages"):
            self._stages = stage_ranks = self._group.split(grid)
            self._replicas = self._group.split([list(column) for column in zip(*grid, strict=True)])
            channels = connect(stage_ranks, self._transport)

        def waiting(label: str, stage: int) -> contextlib.AbstractContextManager[None]:
            return monitor.waiting(label, on=stage_ranks.ranks[stage].rank)

        self._engine = Engine(self.stage, channels, waiting, monitor.announce)
        monitor.on_failure(self._engine.abort)
        assert self.lightning_module is not None
        with monitor.waiting("rank 0's weights"):
            take_from_first(self.lightning_module, self._group)  # before callbacks make copies of it

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and _lightning.draws_graph(trainer):
            raise ValueError(
                "A logger with log_graph=True traces the module in one process, but every stage holds a part of it. "
                "Leave log_graph=False; `ringstrategy plan` and the table of stages show how a module is cut."
            )
        if fitting and any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                "ModelPruning replaces parameters while the module trains, but a stage holds those that it has from "
                "the start. Prune after `fit`, when the module is whole, with torch.nn.utils.prune."
            )
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        if self.num_replicas == 1:
            # All ranks see all samples. Lightning's sampler would shuffle what the user does not, and drop their own.
            _lightning.keep_samplers(trainer)
        self._attach_evaluation(trainer)
        copies = copies_in(trainer.callbacks, self.model)  # type: ignore[attr-defined]
        self.precision_plugin.convert_module(self.model)
        self._start_alike()
        self._cut(trainer, copies)
        self.model_to_device()
        self._bind_to_replicas()
        if fitting:
            if self.num_replicas > 1:
                self._connect_replicas()
            self._batches.train(self._reducer)
            self.setup_optimizers(trainer)
            _refuse_optimizers(self.optimizers, self.lightning_module)
            assert self._placement is not None
            for optimizer in self.optimizers:
                drop_absent_state(optimizer, self._placement)
        self.setup_precision_plugin()
        if fitting:
            _lightning.optimizers_to_device(self.optimizers, self.root_device)
            self._share_precision()
        assert self._engine is not None
        same_generators(self._engine.channels, self.stage)

    def _cut(self, trainer: pl.Trainer, copies: list[nn.Module]) -> None:
        """Decide on rank 0 where to cut, and let go of the layers of other stages. Collective."""
        module = self.lightning_module
        assert module is not None
        assert self._engine is not None
        name, pipelined = find_module(module, self._module_name)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            trainer.fit_loop.setup_data()  # collective; a little earlier than otherwise, for an example of a batch
        decision: Cut | ValueError | None = None
        if self._plan is not None and self._plan.module is pipelined and not fitting:
            decision = self._plan.cut  # is evaluated as it was trained
        elif self.global_rank == 0:
            try:
                example = find_example(module, pipelined, trainer if fitting else None)
                recompute = self._checkpoint != "never"
                chunks = _CHUNKS if self._chunks == "auto" else self._chunks
                decision = choose_cut(pipelined, self.num_stages, self._balance, example, chunks, recompute)
            except ValueError as error:
                decision = error  # of the user's, which every rank is to show
        decision = self.broadcast(decision)
        if isinstance(decision, ValueError):
            raise decision
        assert decision is not None
        self._plan = PipelinePlan(name, pipelined, decision, module)
        rows = stage_rows(decision, pipelined, range(self.num_stages))
        rank_zero_info(as_text(stage_table(rows, f"Stages of '{name}'" if name else "Stages")))
        self._placement = Placement(module, self._plan.owners, self.stage)
        self._placement.leave()
        self._copies = [
            CopyOfModule(copy, self._plan.owners, self.stage, self._engine.channels, lambda: not self._past_failure())
            for copy in copies
        ]
        pipeline = Pipeline(
            self._plan,
            self._engine,
            self.root_device,
            chunks=self._chunks,
            slowest=self._combine_all,
            checkpoint=self._checkpoint,
            deferred_batch_norm=self._deferred_batch_norm,
        )
        self._forward = PipelinedForward(pipelined, pipeline)
        if self._schedule == "1f1b":
            if not module.automatic_optimization:
                raise ValueError(
                    "1F1B decides when backward runs, which manual optimization does as well. Use schedule='gpipe' "
                    "(strategy='gpipe')."
                )
            self._micro_steps = MicroSteps(pipeline, module, self._micro_batch_weight, self.root_device)

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        _lightning.move_own(self.lightning_module, self.root_device)

    def _bind_to_replicas(self) -> None:
        """What is synchronised "over all ranks" means the replicas: stages hold the same values anyway."""
        assert self.lightning_module is not None
        assert self._replicas is not None
        self._buffers = BufferSync(self._replicas) if self._broadcast_buffers and self.num_replicas > 1 else None
        if self._buffers is not None:
            self._buffers.watch(self.lightning_module)
        for child in self.lightning_module.modules():
            if isinstance(child, Metric):
                self._metrics.append((child, child.process_group))
                child.process_group = child.process_group or self._replicas.process_group
            elif isinstance(child, SyncBatchNorm):
                child.process_group = self._replicas.process_group

    def _share_precision(self) -> None:
        """Clip by the norm over all stages, and scale the loss alike on all of them."""
        plugin = self.precision_plugin

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            self.clip_grad_norm_(plugin.main_params(optimizer), clip_val)

        plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None:
            self._overflow = SharedOverflow(scaler, self._combine)

    # -- steps -------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._engine is not None
        if self._micro_steps is None:
            output = super().training_step(*args, **kwargs)
            self._engine.check()
            if output is None:
                # No backward follows. A stage that decided so alone, having caught an error perhaps, would wait for
                # others that wait for its gradients.
                self._engine.meet("the end of a training step without a loss")
            return output
        self._before_training_step()
        batch, *others = args
        scaler = getattr(self.precision_plugin, "scaler", None)

        def step(micro_batch: Any) -> Any:
            assert self.lightning_module is not None
            with self.precision_plugin.train_step_context():
                return self.lightning_module.training_step(micro_batch, *others, **kwargs)

        with self._batches.step(batch):
            return self._micro_steps.run(step, batch, scaler.get_scale() if scaler is not None else 1.0)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._engine is None:
            return batch
        # Augmentation may have drawn other numbers on each stage; the first stage's batch is the one that counts.
        return same_batch(batch, self._engine.channels, self.stage)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self,
        parameters: Iterable[nn.Parameter],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_``, by the norm over all stages; that one sees one stage. Collective.

        ``gradient_clip_val`` and ``self.clip_gradients`` come here. Call it as
        ``self.trainer.strategy.clip_grad_norm_(...)`` for other norms, or in manual optimisation.

        Args:
            parameters: of the LightningModule, those of other stages too.
            max_norm: largest norm of all gradients together.
            norm_type: p of the p-norm; ``inf`` for the largest element.
            error_if_nonfinite: raise if the norm is infinite or NaN.
            foreach: as in torch.

        Returns:
            The norm before clipping, the same on all ranks.

        Raises:
            RuntimeError: the norm is not finite.
        """
        return clip_grad_norm_(
            parameters,
            max_norm,
            norm_type,
            counts=self._counts,
            combine=self._combine,
            error_if_nonfinite=error_if_nonfinite,
            foreach=foreach,
        )

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this stage counts a parameter, of those that hold it."""
        assert self._placement is not None
        part = self._placement.part_of(parameter)
        return self.stage == (0 if part is None else part.sender)

    def _combine_all(self, tensor: Tensor) -> Tensor:
        """The largest of each element over all ranks."""
        assert self._control is not None
        return self._control.reduce(tensor, None, "max")

    def _combine(self, tensor: Tensor, operation: Literal["sum", "max"]) -> Tensor:
        assert self._control is not None
        assert self._stages is not None
        return self._control.reduce(tensor, self._stages.process_group, operation)

    # -- collectives of the trainer ----------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if group is None and self._replicas is not None:
            group = self._replicas.process_group
        return super().reduce(tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        with self._batches.everyone():
            count = int(self.reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum"))
        return count == self.num_replicas if all else count > 0

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._replicas is not None and group in (None, dist.group.WORLD):
            group = self._replicas.process_group
        gathered = super().all_gather(tensor, group)
        if not (sync_grads and tensor.requires_grad and torch.is_grad_enabled()) or self._control is None:
            return gathered
        add_up = partial(self._control.reduce, group=group, operation="sum")
        return with_gradient(gathered, tensor, dist.get_rank(group), add_up)

    @override
    def watch(self, recorder: Recorder | None) -> None:
        super().watch(recorder)
        if self._engine is not None:
            self._engine.record = None if recorder is None else recorder.computed

    # -- weights -----------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._engine is None or self._placement is None or self._past_failure():
            return super().lightning_module_state_dict()
        return gather_state_dict(self._placement, self._engine.channels)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._engine is None or self._placement is None or self._past_failure():
            return super().optimizer_state(optimizer)
        return gather_optimizer_state(_lightning.bare(optimizer), self._placement, self._engine.channels)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._placement is not None
        own = [
            keep_own_optimizer_state(state, optimizer, self._placement)
            for state, optimizer in zip(checkpoint["optimizer_states"], self.optimizers, strict=True)
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": own})

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _Path, storage_options: Any | None = None) -> None:
        absent = find_absent(checkpoint) if self.is_global_zero else None
        if absent is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self._past_failure():
            rank_zero_warn(
                f"No checkpoint was written to {filepath}: after a failure the layers of other stages are out of reach."
            )
        else:
            raise RuntimeError(
                f"{absent} belongs to another stage and has no values here, so that {filepath} would be incomplete. "
                "Copies of the module that callbacks make in `setup` and keep as attributes are put together for a "
                "checkpoint; later copies, copies of parts and what `state_dict()` returns in training are not."
            )

    # -- the end -----------------------------------------------------------------------------------------------------

    def _make_whole(self) -> None:
        """Give all ranks, or rank 0, all weights and all of the optimizers' state. Collective."""
        assert self._engine is not None
        if self._placement is None:
            return
        to = 0 if self._whole_after_fit == "rank_zero" else None
        make_whole(self._placement, self._engine.channels, to=to)
        for copy in self._copies:
            copy.make_whole(to)
        for optimizer in self.optimizers:
            make_optimizer_whole(_lightning.bare(optimizer), self._placement, self._engine.channels, to=to)

    @override
    def teardown(self) -> None:
        for metric, group in self._metrics:
            metric.process_group = group
        self._metrics.clear()
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        if self._overflow is not None:
            self._overflow.close()
            self._overflow = None
        if self._forward is not None:
            self._forward.remove()
        if self._monitor is not None and not self._monitor.leaving and self._engine is not None:
            self._monitor.check()  # an error that the program has caught must not pass for a success
            self._make_whole()
        for copy in self._copies:
            copy.release()
        self._copies.clear()
        self._past = self._and_stages(self._past)
        if self._engine is not None:
            self._engine.close()
        subgroups = [group for group in (self._stages, self._replicas) if group is not None]
        module = self.lightning_module
        whole = module is None or not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        self._engine = self._placement = self._forward = self._stages = self._micro_steps = None
        with contextlib.nullcontext() if whole else _lightning.torn_down_without_module(self):
            super().teardown()
        for group in subgroups:
            group.close()


def _check_count(name: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")


def _refuse_optimizers(optimizers: list[Optimizer], module: pl.LightningModule | None) -> None:
    assert module is not None
    known = set(module.parameters())
    for optimizer in optimizers:
        for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
            if tensor not in known:
                name = type(module).__name__
                raise ValueError(
                    f"{type(optimizer).__name__} optimises a tensor of shape {tuple(tensor.shape)} that is no "
                    f"parameter of {name}, so nothing says which stage holds it. Register it, e.g. by self.scale = "
                    f"nn.Parameter(...) in {name}.__init__."
                )
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "LBFGS decides on products over all parameters, of which a pipeline's stage holds some. Use another "
                "optimizer, or strategy='ring_ddp'."
            )
