"""Lightning's loops over validation, test and prediction batches, for ranks that run different numbers of batches."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from ringstrategy import _lightning
from ringstrategy.evaluation.dealt_sampler import DealtSampler, interleave
from ringstrategy.evaluation.ranks import EvaluatingRanks

__all__ = ["UnevenEvaluationLoop", "UnevenPredictionLoop"]


class UnevenEvaluationLoop(_lightning.EvaluationLoop):
    """Every rank takes part in all that is put together at the end of every dataloader.

    A rank without batches runs no step, but all that comes before the first and after the last one. Where there are
    several dataloaders, each ends once, in order, before a batch of a later one:

    .. code-block:: text

        batches of     rank 0   rank 1      rank 0                  rank 1
        loader 0         2        1         step step end(0)        step end(0)
        loader 1         1        0         step end(1)             end(1)
        loader 2         1        1         step end(2)             step end(2)

    Attributes:
        ranks: the ranks that evaluate together.
    """

    ranks: EvaluatingRanks
    _ended: int

    @override
    def setup_data(self) -> None:
        before = self._max_batches
        with self.ranks.empty_loaders_allowed():
            super().setup_data()
        if self._max_batches is not before:
            self._max_batches = self.ranks.agree_on_batches(self._max_batches)

    @override
    def reset(self) -> None:
        super().reset()
        self._ended = 0
        self._results.dataloader_idx = None

    @override
    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        if self._in_turn:
            self._end(dataloader_idx)
        with self.ranks.batch(f"{'test' if self.trainer.testing else 'validation'}_step"):
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)

    @override
    def _store_dataloader_outputs(self) -> None:
        """Nothing: where Lightning calls it, it does not say which dataloaders have ended."""

    @override
    def on_run_end(self) -> list[Any]:
        self._end(self.num_dataloaders if self._in_turn else 1)
        return super().on_run_end()

    @property
    def _in_turn(self) -> bool:
        return self._is_sequential and self.num_dataloaders > 1

    def _end(self, count: int) -> None:
        """End the first ``count`` dataloaders, unless they have ended; also those that have no batch here."""
        for number in range(self._ended, count):
            if self._in_turn and not self._max_batches[number]:
                continue  # on no rank
            self._results.dataloader_idx = number if self._in_turn else None
            self.ranks.complete(self._results)
            super()._store_dataloader_outputs()
        self._ended = max(self._ended, count)


class UnevenPredictionLoop(_lightning.PredictionLoop):
    """Predictions of all ranks come back on every rank, in the order of one process.

    Attributes:
        ranks: the ranks that predict together.
    """

    ranks: EvaluatingRanks

    @override
    def setup_data(self) -> None:
        before = self.max_batches
        with self.ranks.empty_loaders_allowed():
            super().setup_data()
        if self.max_batches is not before:
            self.max_batches = self.ranks.agree_on_batches(self.max_batches)

    @override
    def _predict_step(self, *args: Any, **kwargs: Any) -> None:
        with self.ranks.batch("predict_step"):
            super()._predict_step(*args, **kwargs)

    @override
    def on_run_end(self) -> Any:
        self.ranks.begin()
        predictions = super().on_run_end()
        if not self.return_predictions:
            return predictions
        assert self._combined_loader is not None
        for number, loader in enumerate(self._combined_loader.flattened):
            if isinstance(_sampler_of(loader), DealtSampler):
                self._predictions[number] = interleave(self.ranks.gather(self._predictions[number], "predictions"))
        return self.predictions


def _sampler_of(loader: Any) -> object:
    batch_sampler = getattr(loader, "batch_sampler", None)  # Lightning's, which notes indices, looks like the own one
    return getattr(loader if batch_sampler is None else batch_sampler, "sampler", None)
