"""What ranks log in an evaluation in which they run different numbers of batches, or none.

Lightning and torchmetrics put the values of all ranks together at the end of an epoch, one by one, in the order in
which a rank has logged them. A rank that had fewer batches may have logged less, and would take part in less. So the
ranks first tell each other what they have, and whoever lacks something gets it, with a value that counts for nothing:

.. code-block:: text

    rank 0   log("loss", of 3 samples)   log("accuracy", metric)        "loss" of 3 samples, "accuracy"
    rank 1   no batch at all                                      ──▶   "loss" of 0 samples, "accuracy" without any
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from ringstrategy import _lightning

__all__ = ["Logged", "complete", "describe"]

_ListStates = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Entry:
    """A value that a rank has logged for the epoch.

    Attributes:
        meta: how it was logged.
        synced: whether the values of all ranks are put together.
        grouped: whether over a process group of the user's.
        value: of a number: what has come together so far. None of a metric of torchmetrics.
        batch_size: of a mean: the samples in ``value``.
    """

    meta: _lightning.LoggedMeta
    synced: bool
    grouped: bool
    value: Tensor | None
    batch_size: Tensor | None


@dataclass(frozen=True)
class Logged:
    """What a rank has logged in one dataloader.

    Attributes:
        entries: by key, in the order of logging.
        states: of metrics, by name: which of their states are lists of tensors, with shape (but for the first
            dimension) and dtype.
    """

    entries: dict[str, Entry]
    states: dict[str, _ListStates]


def describe(results: _lightning.LoggedValues, module: pl.LightningModule) -> Logged:
    """What this rank has logged in the dataloader that has ended, and what its metrics hold."""
    entries = {}
    for key, logged in results.valid_items():
        meta, sync = logged.meta, logged.meta.sync
        if not meta.on_epoch or sync.rank_zero_only:
            continue
        entries[key] = Entry(
            replace(meta, _sync=None),
            sync.should,
            sync.group is not None,
            logged.value if logged.is_tensor else None,
            logged.cumulated_batch_size if logged.is_tensor and meta.is_mean_reduction else None,
        )
    states = {}
    for name, metric in _metrics_of(module).items():
        joined = _lightning.before_sync(metric)
        states[name] = {state: (tuple(tensor.shape[1:]), tensor.dtype) for state, tensor in joined.items()}
    return Logged(entries, states)


def complete(
    results: _lightning.LoggedValues,
    module: pl.LightningModule,
    everyone: Sequence[Logged],
    reduce: Callable[..., Any],
) -> None:
    """Give this rank what another rank has logged and it has not, and the same order on all ranks.

    Args:
        results: what this rank has logged, of which it has told the others.
        module: that has logged.
        everyone: what all ranks have told, by rank.
        reduce: the strategy's, which puts numbers of all ranks together.

    Raises:
        RuntimeError: a value over a process group of the user's is missing here.
    """
    entries: dict[str, Entry] = {}
    for theirs in everyone:
        for key, entry in theirs.entries.items():
            entries.setdefault(key, entry)
    here = {key for key, _ in results.valid_items()}
    for key, entry in entries.items():
        value = results.pop(key, None)
        results[key] = value if key in here and value is not None else _missing(entry, module, reduce)
    metrics = _metrics_of(module)
    for theirs in everyone:
        for name, states in theirs.states.items():
            for state, (shape, dtype) in states.items():
                if not getattr(metrics[name], state):
                    setattr(metrics[name], state, [torch.empty(0, *shape, dtype=dtype, device=module.device)])


def _metrics_of(module: pl.LightningModule) -> dict[str, Metric]:
    return {name: child for name, child in module.named_modules() if isinstance(child, Metric)}


def _missing(entry: Entry, module: pl.LightningModule, reduce: Callable[..., Any]) -> _lightning.LoggedValue:
    name = entry.meta.name
    if entry.synced and entry.grouped:
        raise RuntimeError(
            f"self.log({name!r}, sync_dist_group=...) was called on some ranks, but not on this one. Log it on all "
            "ranks, or leave sync_dist_group out."
        )
    meta = replace(entry.meta, _sync=None)
    meta.sync = _lightning.LoggedSync(fn=reduce, _should=entry.synced)
    value = _lightning.LoggedValue(meta, is_tensor=entry.value is not None)
    if entry.value is None:
        assert meta.metric_attribute is not None  # Lightning does not log a metric without
        value.value = module.get_submodule(meta.metric_attribute)
    elif entry.synced:
        value.value = value.value.to(entry.value.dtype)  # of no samples
    else:
        # Every rank keeps its own; one without samples has none, and a NaN would stop it early.
        value.value = entry.value
        if entry.batch_size is not None:
            value.cumulated_batch_size = entry.batch_size
    _lightning.mark_logged(value)
    return value.to(module.device)
