"""``Trainer(strategy="ring_ddp")``: data-parallel training as with ``"ddp"``, without its wrapper."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from ringstrategy import _lightning
from ringstrategy.allocator import keep_freed_memory
from ringstrategy.buffers import BufferSync
from ringstrategy.checkpoint import AtomicCheckpointIO
from ringstrategy.collectives import nccl
from ringstrategy.collectives.base import Collective
from ringstrategy.collectives.choose import Algorithm, Transport, check_choice, choose_collective
from ringstrategy.collectives.compression import check_compressible, check_compression, with_compression
from ringstrategy.collectives.half_precision import Compression
from ringstrategy.comm_hooks import compression_of_hook
from ringstrategy.communication import Communication
from ringstrategy.control import Control
from ringstrategy.environments import as_numbered
from ringstrategy.evaluation.exact import Evaluation
from ringstrategy.evaluation.ranks import EvaluatingRanks
from ringstrategy.failure import FailureMonitor
from ringstrategy.gradients.buckets import MIB
from ringstrategy.gradients.parameters import expected_buckets, refuse_uninitialized, sparse_parameters
from ringstrategy.gradients.reducer import GradientReducer
from ringstrategy.gradients.weights import Average
from ringstrategy.process_group import RankGroup, check_same_parameters
from ringstrategy.recorder import Recorder
from ringstrategy.requeue import DeferredSignal
from ringstrategy.settings import check_same_settings
from ringstrategy.training_batches import TrainingBatches
from ringstrategy.uneven.lengths import Uneven

__all__ = ["RingDDPStrategy"]

T = TypeVar("T")

# A bucket that stays in cache is summed faster than one that does not; a GPU's link wants long messages.
_SHARED_MEMORY_CAP_MB = 4.0
_BACKEND_CAP_MB = 25.0
_MEETING_TIMEOUT = timedelta(minutes=2)


class RingDDPStrategy(DDPStrategy):
    """Data-parallel training with a bucketed ring all-reduce, as a drop-in for ``DDPStrategy``.

    The LightningModule is not wrapped: hooks on its parameters average the gradients. A parameter that no rank uses
    keeps ``grad=None``, one that only some ranks use counts as zero on the others; neither is an error or needs a flag.

    Args:
        accelerator: as in ``DDPStrategy``.
        parallel_devices: as in ``DDPStrategy``.
        cluster_environment: as in ``DDPStrategy``.
        checkpoint_io: as in ``DDPStrategy``; :class:`~ringstrategy.AtomicCheckpointIO` by default.
        precision_plugin: as in ``DDPStrategy``.
        ddp_comm_state: only None: torch's communication hooks need its wrapper.
        ddp_comm_hook: torch's ``fp16_compress_hook`` and ``bf16_compress_hook`` mean ``compression``; no others.
        ddp_comm_wrapper: only None.
        model_averaging_period: only None: it belongs to a communication hook.
        process_group_backend: as in ``DDPStrategy``.
        timeout: how long a rank may keep the others waiting before the run is given up.
        start_method: as in ``DDPStrategy``.
        bucket_cap_mb: most MiB of gradients that travel together. None is 4 over shared memory, 25 otherwise.
        find_unused_parameters: accepted and without effect: there is nothing to find.
        static_graph: accepted and without effect.
        gradient_as_bucket_view: accepted and without effect: gradients always are views of their bucket.
        broadcast_buffers: give rank 0's buffers to all ranks before they are read.
        algorithm: ``"auto"`` is a fixed rule: shared memory between CPU ranks of one host, and inside each of several
            hosts, else the process group's all-reduce, which ``"backend"`` insists on. ``"measure"`` tries all that are
            possible when training starts, and keeps the fastest. ``"ring"``, ``"tree"`` and ``"naive"`` insist on
            these; on CUDA the first two set ``NCCL_ALGO``, for good.
        transport: ``"shared_memory"`` insists on it, ``"backend"`` does without.
        compression: ``"bf16"`` or ``"fp16"`` sends gradients between hosts in 16 bits and adds them in 32. Between
            ranks that share memory nothing is sent, and nothing changes.
        average: what the mean of gradients is taken over. ``"ranks"``: each rank counts alike, as with ``ddp``.
            ``"samples"``: each sample does, over ranks and accumulated batches, as in one process. Else a function of a
            batch, which says what it counts for.
        uneven: what happens when one rank runs out of training batches before another. ``"error"``: all ranks end.
            ``"stop"``: the epoch ends on all ranks. ``"join"``: it goes on, and averages are those of the ranks that
            still have data.
        exact_evaluation: validate, test and predict evaluate each sample once: the batches of one process are dealt to
            the ranks in turn. ``trainer.predict`` returns all predictions, in the order of the dataset, on every rank.
            If not, Lightning's sampler repeats samples until they divide evenly.
        keep_freed_memory: on CPU, have glibc's malloc keep freed memory for the next step rather than return it to the
            kernel. Holds for the process.

    Raises:
        ValueError: an argument has no meaning here.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        algorithm: Algorithm = "auto",
        transport: Transport = "auto",
        compression: Compression | None = None,
        average: Average = "ranks",
        uneven: Uneven = "error",
        exact_evaluation: bool = False,
        keep_freed_memory: bool = True,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout or default_pg_timeout,
            start_method=start_method,
        )
        compression = compression_of_hook(
            ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper, model_averaging_period, compression
        )
        if bucket_cap_mb is not None and bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb} must be positive; None chooses a size that suits.")
        check_choice(algorithm, transport)
        check_compression(compression, algorithm)
        self._bucket_cap_mb = bucket_cap_mb
        self._broadcast_buffers = broadcast_buffers
        self._algorithm: Algorithm = algorithm
        self._transport: Transport = transport
        self._compression = compression
        self._average: Average = average
        self._uneven: Uneven = uneven
        self._batches = TrainingBatches(average, uneven)
        self._exact_evaluation = exact_evaluation
        self._evaluation = Evaluation(exact_evaluation)
        self._keep_freed_memory = keep_freed_memory
        self._group: RankGroup | None = None
        self._replicas: RankGroup | None = None  # the ranks that hold the same parameters
        self._monitor: FailureMonitor | None = None
        self._control: Control | None = None
        self._collective: Collective | None = None
        self._reducer: GradientReducer | None = None
        self._buffers: BufferSync | None = None
        self._requeue: DeferredSignal | None = None
        self._evaluation_begins = False
        self._past = Communication()

    # -- what the user can ask ---------------------------------------------------------------------------------------

    @property
    def timeout(self) -> timedelta:
        """How long a rank may keep the others waiting."""
        assert self._timeout is not None
        return self._timeout

    @property
    def has_data(self) -> bool:
        """Whether the present batch of this rank counts; False where ``uneven="join"`` repeats it for others' sake."""
        return self._batches.has_data

    @property
    def communication(self) -> Communication:
        """What averaging has cost so far, over all fits of this strategy."""
        if self._reducer is None or self._collective is None:
            return self._past
        return Communication(
            all_reduces=self._past.all_reduces + self._reducer.all_reduces,
            bytes_sent=self._past.bytes_sent + self._collective.bytes_sent,
            seconds=self._past.seconds + self._collective.busy_seconds,
            exposed_seconds=self._past.exposed_seconds + self._reducer.exposed_seconds,
            copy_seconds=self._past.copy_seconds + self._reducer.copy_seconds,
        )

    @communication.setter
    def communication(self, past: Communication) -> None:
        self._past = past

    # -- set-up ------------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        self.cluster_environment = as_numbered(self.cluster_environment)
        if self._start_method == "popen":
            self._launcher = _lightning.ScriptLauncher(self)
        else:
            self._launcher = _lightning.MultiProcessingLauncher(self, self._start_method)

    @override
    def setup_distributed(self) -> None:
        nccl.prepare(self._algorithm, self.root_device, self.process_group_backend)
        # Start-up may take longer than any wait in training: processes start, import and meet at their own pace.
        timeout, self._timeout = self.timeout, max(self.timeout, _MEETING_TIMEOUT)
        super().setup_distributed()
        self._timeout = timeout
        self._group = self._replicas = RankGroup.connect(self.root_device, self.timeout)
        self._monitor = FailureMonitor(self._group, self._where)
        self._control = Control(self._group, self._monitor)
        with self._monitor.waiting("the comparison of settings"):
            check_same_settings(self._group, self._settings())
        assert self.lightning_module is not None
        self._batches.meet(self._group, self._monitor, self.lightning_module, self._ranks_per_replica, self._where)
        if isinstance(self._launcher, _lightning.ScriptLauncher):
            self._launcher.ranks_have_met()

    @property
    def _ranks_per_replica(self) -> int:
        """Ranks that train on the same batch."""
        return 1

    def _settings(self) -> dict[str, object]:
        """What all ranks must have alike, by the names of the arguments."""
        return {
            "bucket_cap_mb": self._bucket_cap_mb,
            "broadcast_buffers": self._broadcast_buffers,
            "algorithm": self._algorithm,
            "transport": self._transport,
            "compression": self._compression,
            "average": "a function" if callable(self._average) else self._average,
            "uneven": self._uneven,
            "exact_evaluation": self._exact_evaluation,
        }

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._attach_evaluation(trainer)
        super().setup(trainer)

    def _attach_evaluation(self, trainer: pl.Trainer) -> None:
        assert self._replicas is not None
        assert self._control is not None
        assert self._monitor is not None
        ranks = EvaluatingRanks(trainer, self._replicas, self._control, self._monitor, self._before_evaluation_step)
        self._evaluation.attach(trainer, ranks)

    @override
    def configure_ddp(self) -> None:
        """Connect the hooks; the module stays what it is."""
        self._start_alike()
        self._connect_replicas()
        self._batches.train(self._reducer)

    def _start_alike(self) -> None:
        """Give all ranks rank 0's parameters and buffers. Collective."""
        module, group, monitor = self.lightning_module, self._group, self._monitor
        assert module is not None
        assert group is not None
        assert monitor is not None
        if self.root_device.type == "cpu" and self._keep_freed_memory and keep_freed_memory():
            rank_zero_info(
                "ringstrategy: freed memory stays in the process for the next step; keep_freed_memory=False ends that."
            )
        named_parameters = list(module.named_parameters())
        refuse_uninitialized(named_parameters)
        with monitor.waiting("the comparison of models"):
            check_same_parameters(group, named_parameters)
            group.broadcast_tensors(parameter for _, parameter in named_parameters)
        if self._broadcast_buffers:
            self._buffers = BufferSync(group)
            with monitor.waiting("rank 0's buffers"):
                self._buffers.send_all(module)

    def _connect_replicas(self) -> None:
        """From here on gradients are averaged over the ranks that hold the same parameters. Collective."""
        module, group, monitor = self.lightning_module, self._replicas, self._monitor
        assert module is not None
        assert group is not None
        assert monitor is not None
        if self._compression is not None:
            check_compressible(module.named_parameters(), self._compression)
        with monitor.waiting("the choice of a collective"):
            self._collective = choose_collective(group, self._algorithm, self._transport, self._expected_buckets)
            self._collective = with_compression(self._collective, group, self._compression)
        monitor.on_failure(self._collective.abort)
        self._reducer = GradientReducer(
            [(name, parameter) for name, parameter in module.named_parameters() if not parameter.is_meta],
            self._collective,
            group,
            sparse=sparse_parameters(module),
            bucket_cap_bytes=self._bucket_cap_bytes(self._collective.name),
            waiting=monitor.waiting,
            weighted=self._batches.weighted,
        )

    def _bucket_cap_bytes(self, collective: str) -> int:
        default = _SHARED_MEMORY_CAP_MB if collective == "shared_memory" else _BACKEND_CAP_MB
        return max(1, int((self._bucket_cap_mb or default) * MIB))

    def _expected_buckets(self, collective: str) -> list[tuple[int, torch.dtype]]:
        module = self.lightning_module
        assert module is not None
        cap_bytes = self._bucket_cap_bytes(collective)
        return expected_buckets(module.named_parameters(), sparse_parameters(module), cap_bytes)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, _lightning.WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # taken only where there is none yet
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    # -- steps -------------------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        module = self.lightning_module
        training = module is not None and module.trainer.training
        return self._batches.of(dataloader) if training else dataloader

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._before_training_step()
        with self._batches.step(args[0]):
            return super().training_step(*args, **kwargs)

    def _before_training_step(self) -> None:
        if self._reducer is not None:
            self._reducer.refresh()
        if self._buffers is not None and self._monitor is not None:
            with self._monitor.waiting("rank 0's buffers"):
                self._buffers.before_training_step(self._batches.source)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._before_evaluation_step()
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._before_evaluation_step()
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._before_evaluation_step()
        return super().predict_step(*args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        self._evaluation_begins = True

    @override
    def on_test_start(self) -> None:
        self._evaluation_begins = True

    @override
    def on_predict_start(self) -> None:
        self._evaluation_begins = True

    @override
    def on_train_start(self) -> None:
        environment = self.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and self._control is not None:
            assert environment.requeue_signal is not None
            handler = signal.getsignal(environment.requeue_signal)
            if isinstance(handler, _lightning.SignalHandlers):  # and not one of the user's own
                self._requeue = DeferredSignal(environment.requeue_signal, handler, self._control)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._batches.begin()
        if self._requeue is not None:
            self._requeue.handle()

    @override
    def on_train_end(self) -> None:
        self._send_buffers()
        if self._requeue is not None:
            self._requeue.handle()

    def _before_evaluation_step(self) -> None:
        # In the first step and not at the start: callbacks that average weights put theirs in between.
        if self._evaluation_begins:
            self._evaluation_begins = False
            self._send_buffers()

    def _send_buffers(self) -> None:
        if self._buffers is not None and self._monitor is not None and self.lightning_module is not None:
            with self._monitor.waiting("rank 0's buffers"):
                self._buffers.send_all(self.lightning_module, self._batches.source)

    # -- gradients ---------------------------------------------------------------------------------------------------

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        reducing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._reducer is not None:  # else no other rank holds the same parameters
            self._reducer.refresh()
            reducing = self._reducer.backward()
        plugin, module = self.precision_plugin, self.lightning_module
        closure_loss = plugin.pre_backward(closure_loss, module)
        # The means are in place before `on_after_backward`, which the plugin calls next.
        with reducing, self._batches.backward(closure_loss) as loss:
            plugin.backward(loss, module, optimizer, *args, **kwargs)
        return plugin.post_backward(closure_loss, module)

    @override
    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self._batches.accumulating():
            yield

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if self._reducer is not None:
            self._reducer.flush()
        if isinstance(optimizer, LBFGS):
            # It decides by the loss how often to call again; ranks must decide alike.
            local = closure

            def closure() -> Any:
                loss = local()
                return self.reduce(self._batches.share_of(loss)) if isinstance(loss, Tensor) else loss

        return super().optimizer_step(optimizer, closure, model, **kwargs)

    # -- collectives of the trainer ----------------------------------------------------------------------------------

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if self._control is None or self._past_failure():
            return
        self._control.barrier(name)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._control is None or (self._past_failure() and src == self.global_rank):
            return obj
        return self._control.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or self._control is None:
            return tensor
        reduce = partial(self._control.reduce, group=group)
        if self._replicas is None or group not in (None, dist.group.WORLD, self._replicas.process_group):
            return reduce(tensor, operation=reduce_op)
        return self._batches.reduce(tensor, reduce_op, reduce)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        with self._batches.everyone():
            return super().reduce_boolean_decision(decision, all)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._monitor is None or self._control is None:
            return tensor
        self._control.check_allowed()
        if group in (None, dist.group.WORLD):
            self._control.check_alike(tensor)
        with self._monitor.waiting("gathered tensors"):
            return _lightning.all_gather(tensor, group=group, sync_grads=sync_grads)

    # -- for those who watch -----------------------------------------------------------------------------------------

    def watch(self, recorder: Recorder | None) -> None:
        """Tell ``recorder`` of all-reduces and waits for them while this training lasts; None ends that."""
        if self._collective is not None and self._reducer is not None:
            self._collective.watch(recorder)
            self._reducer.watch = None if recorder is None else recorder.finished

    def exchange(self, value: T, what: str, alike: bool = False) -> list[T]:
        """Give an object to other ranks, and get theirs. Collective.

        Args:
            value: this rank's; picklable.
            what: it is, for errors.
            alike: only among the ranks that hold the same parameters.

        Returns:
            The objects by rank.
        """
        group = self._replicas if alike else self._group
        assert group is not None
        assert self._monitor is not None
        with self._monitor.waiting(what):
            return group.exchange(value)

    # -- the end -----------------------------------------------------------------------------------------------------

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one fails with ``error``."""
        if self._monitor is not None:
            self._monitor.report(error)

    def _past_failure(self) -> bool:
        """Whether this rank is on its way out: callbacks may still save, but nobody meets any more."""
        return self._monitor is not None and self._monitor.failed and self._monitor.leaving

    def _where(self) -> str:
        module = self.lightning_module
        trainer = None if module is None else _lightning.trainer_of(module)
        if trainer is None:
            return ""
        stage = trainer.state.stage or trainer.state.fn
        return f"{stage.value if stage else 'set-up'}, epoch {trainer.current_epoch}, step {trainer.global_step}"

    @override
    def teardown(self) -> None:
        monitor = self._monitor
        if monitor is not None and not monitor.failed and self._control is not None and dist.is_initialized():
            # From here on ranks end; whoever watches must not take that for a failure.
            monitor.leave()
            self._control.barrier("teardown")
        self._evaluation.detach()
        self._past = self.communication
        self._batches.close()
        if self._reducer is not None:
            self._reducer.close()
        if self._collective is not None:
            self._collective.close()
        if monitor is not None:
            monitor.close()
        if self._group is not None:
            self._group.close()
        self._reducer = self._collective = self._monitor = self._control = self._group = self._buffers = None
        self._replicas = self._requeue = None
        super().teardown()
