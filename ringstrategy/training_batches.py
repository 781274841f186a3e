"""What this rank's batches count for, and what it does when it has none left and other ranks have.

    dataloader ──▶ in step with other ranks ──▶ training step ──▶ loss ──▶ weighted ──▶ backward
                   (`uneven`)                                              (`average`)

A rank without data is *idle*: it goes through its last batch again, so that it takes part in all that ranks do together
(gradients, buffers, synchronised values, whatever a step gathers), and nothing of that counts.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch.utils._pytree as pytree
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from torch import Tensor
from torch.nn import SyncBatchNorm

from ringstrategy.control import is_mean
from ringstrategy.failure import FailureMonitor
from ringstrategy.gradients.live import set_aside
from ringstrategy.gradients.reducer import GradientReducer
from ringstrategy.gradients.weights import Average, LossWeights, check_average, weighted
from ringstrategy.process_group import RankGroup
from ringstrategy.side_channel import SideChannel
from ringstrategy.uneven.idle import kept_buffers, kept_values, neutral
from ringstrategy.uneven.lengths import Length, Uneven, agree_on, check_uneven
from ringstrategy.uneven.loader import EvenLoader, Rounds, even_loader

__all__ = ["TrainingBatches"]


class TrainingBatches:
    """The batches of one rank, from the dataloader to the backward.

    Args:
        average: what the mean of gradients is taken over; see :mod:`ringstrategy.gradients.weights`.
        uneven: what happens where ranks have different numbers of batches; see :mod:`ringstrategy.uneven.loader`.

    Raises:
        ValueError: one of them is unknown.
    """

    def __init__(self, average: Average, uneven: Uneven) -> None:
        check_average(average)
        check_uneven(uneven)
        self._average = average
        self._uneven: Uneven = uneven
        self._forget()

    def _forget(self) -> None:
        self._group: RankGroup | None = None
        self._monitor: FailureMonitor | None = None
        self._where: Callable[[], str] = str  # nothing, and unlike a lambda it can be sent to a spawned worker
        self._stages = 1
        self._module: pl.LightningModule | None = None
        self._reducer: GradientReducer | None = None
        self._weights: LossWeights | None = None
        self._weighing: SideChannel | None = None
        self._asking: SideChannel | None = None
        self._present = [True]  # by replica, whether it has data for the present batch
        self._accumulating = False
        self._in_step = False
        self._last_factor = 1.0
        self._idle = contextlib.ExitStack()  # what ends with the present step, if it is idle

    # -- who trains --------------------------------------------------------------------------------------------------

    def meet(
        self,
        group: RankGroup,
        monitor: FailureMonitor,
        module: pl.LightningModule,
        stages: int,
        where: Callable[[], str],
    ) -> None:
        """The ranks have met.

        Args:
            group: all of them.
            monitor: knows of failures.
            module: that is trained.
            stages: ranks per pipeline, which train on the same batch.
            where: the place in the training, for errors.
        """
        self._group, self._monitor, self._module = group, monitor, module
        self._stages, self._where = stages, where
        self._present = [True] * (group.world_size // stages)

    @property
    def weighted(self) -> bool:
        """Whether losses may be weighted, so that every backward must come by here."""
        return self._average != "ranks" or self._uneven == "join"

    def train(self, reducer: GradientReducer | None) -> None:
        """Training is about to begin. Collective.

        Args:
            reducer: averages the gradients over the replicas; None where there is one.
        """
        assert self._group is not None
        assert self._monitor is not None
        assert self._module is not None
        self._reducer = reducer
        if self._average == "ranks":
            return
        if _iterates(self._module):
            raise ValueError(
                f"average={self._average!r} weighs the batch that training_step gets, but "
                f"{type(self._module).__name__}.training_step takes a dataloader_iter. Have it take the batch."
            )
        if len(self._present) == 1:
            self._weights = LossWeights(self._average, None, 1, reducer, self._module)
            return
        self._weighing = channel = SideChannel(self._group, self._monitor)
        # Stages of one pipeline add the same weight, so that the mean is that over replicas.
        self._weights = LossWeights(self._average, channel.add_up, self._group.world_size, reducer, self._module)

    # -- the dataloader ----------------------------------------------------------------------------------------------

    def of(self, loader: Any) -> Any:
        """A train dataloader that ends on all ranks at once. Collective.

        Args:
            loader: this rank's.

        Returns:
            The same, if all ranks' are known to have equally many batches.

        Raises:
            UnevenData: they are known to differ, which ``uneven="error"`` does not allow.
            ValueError: there is something in training that ``uneven="join"`` cannot do.
        """
        if isinstance(loader, EvenLoader):  # of an earlier fit, in a CombinedLoader of the user's
            loader = loader.__wrapped__
        group, monitor, module = self._group, self._monitor, self._module
        if group is None or monitor is None or module is None or group.world_size == 1:
            return loader
        with monitor.waiting("the lengths of train dataloaders"):
            lengths = group.exchange(Length(sized_len(loader), certain=not has_iterable_dataset(loader)))
        agreement = agree_on(lengths, self._uneven, module.trainer.limit_train_batches)
        if not agreement.watched:
            return loader
        if self._uneven == "join":
            _refuse_what_cannot_join(module)
        if self._asking is None:
            self._asking = SideChannel(group, monitor)
        rounds = Rounds(self._uneven, self._asking, group.rank, self._stages, self._where)
        return even_loader(loader, rounds, agreement.batches)

    def begin(self) -> None:
        """The next batch is about to be trained."""
        self._idle.close()
        if self._uneven != "join" or self._asking is None:
            return
        assert self._module is not None
        loaders = pytree.tree_leaves(self._module.trainer.train_dataloader)
        if len(loaders) > 1:
            raise ValueError(
                f"uneven='join' cannot tell which of the {len(loaders)} train dataloaders of a CombinedLoader have "
                "data in a batch. Give all ranks equally many batches of each, or choose uneven='stop'."
            )
        watched = isinstance(loaders[0], EvenLoader)
        self._present = loaders[0].rounds.present.popleft() if watched else [True] * len(self._present)

    @property
    def has_data(self) -> bool:
        """Whether this rank's batch counts; False while it only keeps the others company."""
        return self._group is None or self._present[self._group.rank // self._stages]

    @property
    def source(self) -> int:
        """The first replica that has data."""
        return self._present.index(True)

    # -- a step ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """Around the ``training_step`` on a batch."""
        module = self._module
        assert module is not None
        automatic = module.automatic_optimization
        if self._weights is not None:
            loop = module.trainer.fit_loop
            first = automatic and loop.batch_idx % module.trainer.accumulate_grad_batches == 0
            self._weights.begin(batch, counts=self.has_data, first=first, last=automatic and not self._accumulating)
        with contextlib.ExitStack() as in_step:
            if not self.has_data:
                self._idle.close()
                self._idle.enter_context(kept_buffers(module))
                in_step.enter_context(kept_values(module))
            self._in_step = True
            try:
                yield
            finally:
                self._in_step = False
        if not automatic:
            self._idle.close()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backwards in here are not the last ones before gradients are averaged. Nests."""
        before, self._accumulating = self._accumulating, True
        try:
            with contextlib.nullcontext() if self._reducer is None else self._reducer.no_sync():
                yield
        finally:
            self._accumulating = before

    @contextlib.contextmanager
    def backward(self, loss: Tensor) -> Iterator[Tensor]:
        """Around a backward; the loss to go backward from."""
        module, factor = self._module, self._factor()
        assert module is not None
        self._last_factor = factor
        with contextlib.nullcontext() if factor else self._without_gradients():
            yield weighted(loss, factor)
        if module.automatic_optimization:
            self._idle.close()

    def _factor(self) -> float:
        if self._weights is not None:
            assert self._module is not None
            divisor = self._module.trainer.accumulate_grad_batches if self._module.automatic_optimization else None
            return self._weights.factor(last=not self._accumulating, divisor=divisor)
        return len(self._present) / sum(self._present) if self.has_data else 0.0

    def _without_gradients(self) -> contextlib.AbstractContextManager[None]:
        assert self._module is not None
        return set_aside(self._module.parameters()) if self._reducer is None else self._reducer.dropping()

    def share_of(self, loss: Tensor) -> Tensor:
        """What the loss that has just gone backward adds to the mean over replicas."""
        return weighted(loss, self._last_factor)

    # -- what ranks combine ------------------------------------------------------------------------------------------

    def reduce(self, tensor: Tensor, operation: Any, reduce: Callable[..., Tensor]) -> Tensor:
        """Combine a tensor of all replicas; in a step, of those that have data.

        Args:
            tensor: this rank's.
            operation: how to combine.
            reduce: does it, given the tensor and ``operation``.
        """
        present = sum(self._present)
        if not self._in_step or present == len(self._present):
            return reduce(tensor, operation=operation)
        if not self.has_data:
            tensor = neutral(tensor, operation)
        return reduce(tensor, operation="sum") / present if is_mean(operation) else reduce(tensor, operation=operation)

    @contextlib.contextmanager
    def everyone(self) -> Iterator[None]:
        """In here all ranks have a say, be it in a step."""
        before, self._in_step = self._in_step, False
        try:
            yield
        finally:
            self._in_step = before

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Training is over."""
        for channel in (self._weighing, self._asking):
            if channel is not None:
                channel.close()
        self._forget()


def _iterates(module: pl.LightningModule) -> bool:
    """Whether training steps take batches from an iterator themselves."""
    return "dataloader_iter" in inspect.signature(module.training_step).parameters


def _refuse_what_cannot_join(module: pl.LightningModule) -> None:
    if _iterates(module):
        raise ValueError(
            f"uneven='join' must know which batch is trained, but {type(module).__name__}.training_step takes a "
            "dataloader_iter. Have it take the batch, or choose uneven='stop'."
        )
    norm = next((name for name, child in module.named_modules() if isinstance(child, SyncBatchNorm)), None)
    if norm is not None:
        raise ValueError(
            f"'{norm}' is a SyncBatchNorm, which would take the samples of a rank that has no new ones into its "
            "statistics. uneven='join' cannot prevent that; choose uneven='stop'."
        )
