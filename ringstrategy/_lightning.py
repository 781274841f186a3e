"""Every non-public name of Lightning that this package needs, and nothing else.

A release of Lightning that moves one of them is mended here.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.strategies.launchers import subprocess_script as fabric_subprocess_script
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available as all_gather
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop as PredictionLoop
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata as LoggedMeta
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as LoggedValues
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as LoggedValue
from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync as LoggedSync
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose as SignalHandlers
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from ringstrategy.children import Children, ending_stopped, introduced_to_children, tied_to_parent
from ringstrategy.failure import RankFailure

if TYPE_CHECKING:
    from ringstrategy.strategies.ring_ddp import RingDDPStrategy

__all__ = [
    "EvaluationLoop",
    "LoggedMeta",
    "LoggedSync",
    "LoggedValue",
    "LoggedValues",
    "MultiProcessingLauncher",
    "PredictionLoop",
    "ScriptLauncher",
    "SignalHandlers",
    "WrappingCheckpointIO",
    "all_gather",
    "bare",
    "batch_value",
    "before_sync",
    "draws_graph",
    "evaluation_loops",
    "keep_samplers",
    "kept_logs",
    "logs_now",
    "mark_logged",
    "metric_state",
    "move_own",
    "optimizers_to_device",
    "relaunch_with",
    "set_batch_value",
    "set_metric_state",
    "torn_down_without_module",
    "trainer_of",
    "with_evaluation_samplers",
    "with_loop_class",
]

# What a shell would report of a process that SIGTERM has ended.
_TERMINATED = 128 + signal.SIGTERM
# Seconds that worker processes have to end by themselves after one of them, or their parent, has failed.
_GRACE_SECONDS = 10.0


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """The trainer that a module is attached to, if any; the public property raises without one."""
    return module._trainer


def keep_samplers(trainer: pl.Trainer) -> None:
    """Leave the loaders' own samplers alone, whether or not the user has said so."""
    trainer._accelerator_connector.use_distributed_sampler = False


def with_evaluation_samplers(
    trainer: pl.Trainer, make: Callable[[DataLoader[Any], bool, RunningStage], Sampler[int] | None]
) -> Callable[[], None]:
    """Have somebody else make the samplers that Lightning puts into dataloaders of evaluations.

    Args:
        trainer: whose dataloaders.
        make: given a dataloader, whether to shuffle, and the stage; None leaves it to Lightning.

    Returns:
        What undoes it.
    """
    connector = trainer._data_connector
    resolve = connector._resolve_sampler

    def resolve_or_make(loader: DataLoader[Any], shuffle: bool, mode: RunningStage) -> Any:
        sampler = None
        if mode != RunningStage.TRAINING and connector._requires_distributed_sampler(loader):
            sampler = make(loader, shuffle and not trainer.overfit_batches, mode)  # type: ignore[attr-defined]
        return resolve(loader, shuffle=shuffle, mode=mode) if sampler is None else sampler

    connector._resolve_sampler = resolve_or_make  # type: ignore[method-assign, assignment]
    return lambda: vars(connector).pop("_resolve_sampler", None)


def evaluation_loops(trainer: pl.Trainer) -> list[EvaluationLoop]:
    """The loops of validation, in training and by itself, and of test."""
    return [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]


def with_loop_class(loop: _Loop, cls: type[_Loop], **attributes: Any) -> Callable[[], None]:
    """Have a loop be of another class, which adds to its own, and give it attributes; what undoes it."""
    before = type(loop)
    if not issubclass(cls, before):
        raise TypeError(f"The trainer's {before.__name__} is not Lightning's own, which {cls.__name__} extends.")
    loop.__class__ = cls
    vars(loop).update(attributes)

    def undo() -> None:
        loop.__class__ = before
        for name in attributes:
            vars(loop).pop(name, None)

    return undo


def logs_now(trainer: pl.Trainer) -> bool:
    """Whether loggers get the values of the present step."""
    return bool(trainer._logger_connector.should_update_logs)


def mark_logged(value: LoggedValue) -> None:
    """Let a value that nobody has logged pass for one that somebody has."""
    value._update_count = 1
    value.has_reset = False


def draws_graph(trainer: pl.Trainer) -> bool:
    """Whether a logger wants to trace the module, to draw it (``TensorBoardLogger(log_graph=True)``)."""
    own = [logger for logger in trainer.loggers if not isinstance(logger, DummyLogger)]  # which has every attribute
    return any(getattr(logger, "_log_graph", False) for logger in own)


def move_own(module: pl.LightningModule, device: torch.device) -> None:
    """Move a module to a device as ``module.to(device)`` does, but for tensors on the meta device, which stay there."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
    for child in module.modules():
        if isinstance(child, _DeviceDtypeModuleMixin):
            child._device = device


def metric_state(metric: Metric) -> dict[str, Any]:
    """All that a metric has gathered."""
    return {"_update_count": metric._update_count, **metric.metric_state}


def set_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    """Undo :func:`metric_state`, in another process."""
    for name, value in state.items():
        setattr(metric, name, value)
    metric._computed = None


def before_sync(metric: Metric) -> dict[str, torch.Tensor]:
    """Prepare a metric for putting together what ranks with different numbers of batches have.

    It forgets a value that it has computed before: it must compute again where another rank does, also if it got
    nothing new. And states that are lists of tensors to be concatenated become lists of one.

    Returns:
        These tensors, by name of the state, where there are any.
    """
    metric._computed = None
    joined = {}
    for name, reduction in metric._reductions.items():
        state = getattr(metric, name)
        if reduction is dim_zero_cat and isinstance(state, list) and state:
            joined[name] = dim_zero_cat(state)
            setattr(metric, name, [joined[name]])
    return joined


def batch_value(metric: Metric) -> Any:
    """What a metric was for the last batch alone; Lightning logs it per step."""
    return metric._forward_cache


def set_batch_value(metric: Metric, value: Any) -> None:
    """Set what :func:`batch_value` returns."""
    metric._forward_cache = value


@contextlib.contextmanager
def kept_logs(module: pl.LightningModule) -> Iterator[None]:
    """What ``module`` logs in here moves no logged value, though it takes part in what is synchronised.

    A value that is synchronised in here keeps the result, and one that will be synchronised when the epoch ends is
    there for that, as it was before, or empty.
    """
    results = module.trainer._results or LoggedValues(training=True)
    names = ("value", "cumulated_batch_size", "has_reset", "_update_count", "_computed", "_forward_cache")
    before = {key: {name: vars(result).get(name) for name in names} for key, result in results.items()}
    yield
    for key, result in results.items():
        latest = result._forward_cache
        if not result.is_tensor:  # the metric itself is the module's, and is computed by all ranks together
            result._forward_cache = before[key]["_forward_cache"] if key in before else None
            continue
        if key in before:
            vars(result).update(before[key])
        else:
            result.reset()
        if result.meta.sync.should and not result.meta.sync.rank_zero_only:
            result._forward_cache, result.has_reset = latest, False


def bare(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """The optimizer itself, without what Lightning wraps around it."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


@contextlib.contextmanager
def torn_down_without_module(strategy: DDPStrategy) -> Iterator[None]:
    """Keep ``teardown`` from moving the module to the host, which meta tensors cannot do."""
    module, strategy._lightning_module = strategy._lightning_module, None
    try:
        yield
    finally:
        strategy._lightning_module = module


@contextlib.contextmanager
def _reported(strategy: RingDDPStrategy, trainer: pl.Trainer | None) -> Iterator[None]:
    """Tell the other ranks of an exception on its way out, and let no termination look like success."""
    try:
        yield
        if trainer is not None and trainer.received_sigterm:
            raise SIGTERMException  # it came after the last batch, where no loop looks any more
    except _TunerExitException:
        raise  # how the Tuner ends a trial, on all ranks
    except BaseException as error:
        strategy.report(error)
        if isinstance(error, RankFailure) and trainer is not None and trainer.received_sigterm:
            # All ranks are to end, and another one was quicker.
            raise SIGTERMException(_TERMINATED) from error
        if isinstance(error, SIGTERMException):
            error.code = _TERMINATED
        raise


@dataclass
class _Terminate:
    """Notes SIGTERM for the loops, which end after the present batch, and hands it on to the processes of a launcher.

    The loop of `predict` does not look, and has nothing to keep consistent: it ends at once.

    In place of Lightning's handler, which also broadcasts, in the middle of whatever this rank does: where another
    rank does something else, their collectives are paired wrongly and hang.
    """

    trainer: pl.Trainer

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        connector, launcher = self.trainer._signal_connector, self.trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        connector.received_sigterm = True
        if self.trainer.predicting:
            raise SIGTERMException(_TERMINATED)


def _defer_termination(trainer: pl.Trainer | None) -> None:
    if trainer is not None:
        trainer._signal_connector._sigterm_notifier_fn = _Terminate(trainer)  # type: ignore[assignment]


def _raise_termination(signum: int, frame: FrameType | None) -> NoReturn:
    raise SIGTERMException(_TERMINATED)


@contextlib.contextmanager
def _termination_raises() -> Iterator[None]:
    """In a process that only waits for others, SIGTERM is an exception like SIGINT, unless the program handles it."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, _raise_termination)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass
class _InWorker:
    """What a worker runs: a function whose failure is reported. Unlike a closure it can be pickled."""

    function: Callable[..., Any]
    strategy: RingDDPStrategy
    trainer: pl.Trainer | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if signal.getsignal(signal.SIGTERM) is _raise_termination:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has its parent's
        _defer_termination(self.trainer)
        with _reported(self.strategy, self.trainer):
            return self.function(*args, **kwargs)


@dataclass(frozen=True)
class _Relaunch:
    """Puts other words in place of the program's own in the command that starts a rank; its arguments stay.

    Args:
        command: a function of Lightning's that returns the command, or with Hydra the command and a folder.
        words: those after the interpreter.
    """

    command: Callable[..., Any]
    words: Sequence[str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.command(*args, **kwargs)
        if isinstance(found, tuple):
            command, folder = found
            return self._with_words(command), folder
        return self._with_words(found)

    def _with_words(self, command: Sequence[str]) -> list[str]:
        words = 1 if sys.modules["__main__"].__spec__ is None else 2  # a script's path, or -m and a module
        return [command[0], *self.words, *command[1 + words :]]


def relaunch_with(words: Sequence[str]) -> None:
    """From here on, have Lightning's launchers start the processes of this program so. Idempotent.

    Args:
        words: those between the interpreter and the program's own arguments.
    """
    for launchers in (subprocess_script, fabric_subprocess_script):
        for name in ("_basic_subprocess_cmd", "_hydra_subprocess_cmd"):
            found = getattr(launchers, name)
            command = found.command if isinstance(found, _Relaunch) else found
            setattr(launchers, name, _Relaunch(command, words))


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script once per local rank, and looks after the processes; under torchrun it only reports failures."""

    def __init__(self, strategy: RingDDPStrategy) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy
        self._until_met = contextlib.ExitStack()
        self._children: Children | None = None

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        timeout = self._strategy.timeout.total_seconds()
        running: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not environment.creates_processes_externally:
            with introduced_to_children():
                self._call_children_scripts()
            if self.procs:
                self._children = Children(self.procs, timeout)
                running = self._children.running()
        elif isinstance(environment, LightningEnvironment) and environment.local_rank() != 0:
            self._until_met.enter_context(tied_to_parent(timeout))
        _set_num_threads_if_needed(num_processes=self.num_processes)
        _defer_termination(trainer)
        with running, self._until_met, _reported(self._strategy, trainer):
            return function(*args, **kwargs)

    def ranks_have_met(self) -> None:
        """From here on the ranks watch each other, and need not end together."""
        self._until_met.close()
        if self._children is not None:
            self._children.ranks_have_met()


class MultiProcessingLauncher(_MultiProcessingLauncher):
    """Spawns or forks workers that report failures; none survives an error of the launching process."""

    def __init__(self, strategy: RingDDPStrategy, start_method: Literal["spawn", "fork", "forkserver"]) -> None:
        super().__init__(strategy, start_method=start_method)
        self._ring = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        in_worker = _InWorker(function, self._ring, trainer)
        try:
            with _termination_raises(), ending_stopped(self._running, self._ring.timeout.total_seconds()):
                return super().launch(in_worker, *args, trainer=trainer, **kwargs)
        except BaseException as error:
            self._end_workers(signal.SIGTERM if isinstance(error, SIGTERMException) else signal.SIGINT)
            raise

    def _running(self) -> list[int]:
        # Not by `is_alive`, which would take the exit status from under the thread that waits for it.
        return [process.pid for process in self.procs if process.pid is not None and not wait([process.sentinel], 0)]

    def _end_workers(self, signum: signal.Signals) -> None:
        """Ask those that still run, e.g. after an interrupt of this process alone, and do not wait for long."""
        self.kill(signum)
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self.procs:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()

    @override
    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        return {**super().get_extra_results(trainer), "communication": self._ring.communication}

    @override
    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        self._ring.communication = extra["communication"]
