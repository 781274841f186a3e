"""Every non-public name of Lightning that this package needs, and nothing else.

A release of Lightning that moves one of them is mended here.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available as all_gather
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from typing_extensions import override

from ringstrategy.children import Children, end_with_parent

if TYPE_CHECKING:
    from ringstrategy.strategies.ring_ddp import RingDDPStrategy

__all__ = ["MultiProcessingLauncher", "ScriptLauncher", "WrappingCheckpointIO", "all_gather"]

# Seconds that worker processes have to end by themselves after one of them, or their parent, has failed.
_GRACE_SECONDS = 10.0


@contextlib.contextmanager
def _reported(strategy: RingDDPStrategy) -> Iterator[None]:
    """Tell the other ranks of an exception on its way out, and let no termination look like success."""
    try:
        yield
    except _TunerExitException:
        raise  # how the Tuner ends a trial, on all ranks
    except BaseException as error:
        if isinstance(error, SIGTERMException):
            error.code = 128 + signal.SIGTERM
        strategy.report(error)
        raise


@dataclass
class _Reported:
    """A function that reports its failure; unlike a closure it can be pickled."""

    function: Callable[..., Any]
    strategy: RingDDPStrategy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _reported(self.strategy):
            return self.function(*args, **kwargs)


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script once per local rank, and looks after the processes; under torchrun it only reports failures."""

    def __init__(self, strategy: RingDDPStrategy) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy
        self._tied_to_parent = False

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        running: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not environment.creates_processes_externally:
            self._call_children_scripts()
            if self.procs:
                running = Children(self.procs, self._strategy.timeout.total_seconds()).running()
        elif isinstance(environment, LightningEnvironment) and environment.local_rank() != 0:
            end_with_parent(True)
            self._tied_to_parent = True
        _set_num_threads_if_needed(num_processes=self.num_processes)
        with running, _reported(self._strategy):
            return function(*args, **kwargs)

    def ranks_have_met(self) -> None:
        """From here on the ranks watch each other, and need not end together."""
        if self._tied_to_parent:
            end_with_parent(False)
            self._tied_to_parent = False


class MultiProcessingLauncher(_MultiProcessingLauncher):
    """Spawns or forks workers that report failures; none survives an error of the launching process."""

    def __init__(self, strategy: RingDDPStrategy, start_method: Literal["spawn", "fork", "forkserver"]) -> None:
        super().__init__(strategy, start_method=start_method)
        self._ring = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        reported = _Reported(function, self._ring)
        try:
            return super().launch(reported, *args, trainer=trainer, **kwargs)
        except BaseException:
            for process in self.procs:
                process.join(_GRACE_SECONDS)
                if process.is_alive():
                    process.kill()
                    process.join()
            raise

    @override
    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        return {**super().get_extra_results(trainer), "communication": self._ring.communication}

    @override
    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        self._ring.communication = extra["communication"]
