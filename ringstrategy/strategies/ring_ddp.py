"""``Trainer(strategy="ring_ddp")``: data-parallel training as with ``"ddp"``, without its wrapper."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
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
from ringstrategy.collectives.base import Collective
from ringstrategy.collectives.choose import Algorithm, Transport, check_choice, choose_collective
from ringstrategy.communication import Communication
from ringstrategy.control import Control
from ringstrategy.failure import FailureMonitor
from ringstrategy.gradients.buckets import MIB
from ringstrategy.gradients.parameters import refuse_uninitialized, sparse_parameters
from ringstrategy.gradients.reducer import GradientReducer
from ringstrategy.process_group import RankGroup, check_same_parameters
from ringstrategy.requeue import DeferredSignal

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
        ddp_comm_hook: only None.
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
        algorithm: ``"ring"`` insists on our own ring, ``"backend"`` on the process group's all-reduce, ``"auto"``
            takes the ring wherever it can run.
        transport: ``"shared_memory"`` insists on it, ``"backend"`` does without.
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
        hooks = {
            "ddp_comm_state": ddp_comm_state,
            "ddp_comm_hook": ddp_comm_hook,
            "ddp_comm_wrapper": ddp_comm_wrapper,
            "model_averaging_period": model_averaging_period,
        }
        given = [name for name, value in hooks.items() if value is not None]
        if given:
            raise ValueError(
                f"{type(self).__name__} does not use torch's DistributedDataParallel, to which {', '.join(given)} "
                "belongs. Remove it, or use strategy='ddp'."
            )
        if bucket_cap_mb is not None and bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb} must be positive; None chooses a size that suits.")
        check_choice(algorithm, transport)
        self._bucket_cap_mb = bucket_cap_mb
        self._broadcast_buffers = broadcast_buffers
        self._algorithm: Algorithm = algorithm
        self._transport: Transport = transport
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
        if self._start_method == "popen":
            self._launcher = _lightning.ScriptLauncher(self)
        else:
            self._launcher = _lightning.MultiProcessingLauncher(self, self._start_method)

    @override
    def setup_distributed(self) -> None:
        # Start-up may take longer than any wait in training: processes start, import and meet at their own pace.
        timeout, self._timeout = self.timeout, max(self.timeout, _MEETING_TIMEOUT)
        super().setup_distributed()
        self._timeout = timeout
        self._group = self._replicas = RankGroup.connect(self.root_device, self.timeout)
        self._monitor = FailureMonitor(self._group, self._where)
        self._control = Control(self._group, self._monitor)
        if isinstance(self._launcher, _lightning.ScriptLauncher):
            self._launcher.ranks_have_met()

    @override
    def configure_ddp(self) -> None:
        """Connect the hooks; the module stays what it is."""
        self._start_alike()
        self._connect_replicas()

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
        with monitor.waiting("the choice of a collective"):
            self._collective = choose_collective(group, self._algorithm, self._transport)
        monitor.on_failure(self._collective.abort)
        default = _SHARED_MEMORY_CAP_MB if self._collective.name == "shared_memory" else _BACKEND_CAP_MB
        self._reducer = GradientReducer(
            [(name, parameter) for name, parameter in module.named_parameters() if not parameter.is_meta],
            self._collective,
            group,
            sparse=sparse_parameters(module),
            bucket_cap_bytes=max(1, int((self._bucket_cap_mb or default) * MIB)),
            waiting=monitor.waiting,
        )

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
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._before_training_step()
        return super().training_step(*args, **kwargs)

    def _before_training_step(self) -> None:
        if self._reducer is not None:
            self._reducer.refresh()
        if self._buffers is not None and self._monitor is not None:
            with self._monitor.waiting("rank 0's buffers"):
                self._buffers.before_training_step()

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
                self._buffers.send_all(self.lightning_module)

    # -- gradients ---------------------------------------------------------------------------------------------------

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self._reducer is None:  # outside of fit, or no other rank holds the same parameters
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        self._reducer.refresh()
        plugin, module = self.precision_plugin, self.lightning_module
        closure_loss = plugin.pre_backward(closure_loss, module)
        # The means are in place before `on_after_backward`, which the plugin calls next.
        with self._reducer.backward():
            plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        return plugin.post_backward(closure_loss, module)

    @override
    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with contextlib.nullcontext() if self._reducer is None else self._reducer.no_sync():
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
                return self.reduce(loss) if isinstance(loss, Tensor) else loss

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
        return self._control.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._monitor is None or self._control is None:
            return tensor
        if group in (None, dist.group.WORLD):
            self._control.check_alike(tensor)
        with self._monitor.waiting("gathered tensors"):
            return _lightning.all_gather(tensor, group=group, sync_grads=sync_grads)

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
        self._past = self.communication
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
