"""What the pipelined module is called with, found before training starts."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ringstrategy.pipeline.calls import Example, flatten_call
from ringstrategy.pipeline.function import PipelinedForward
from ringstrategy.pipeline.side_effects import SideEffects, unchanged_buffers

__all__ = ["captured_call", "find_example", "first_batch"]

log = logging.getLogger(__name__)


def find_example(module: pl.LightningModule, pipelined: nn.Module, trainer: pl.Trainer | None) -> Example | None:
    """Arguments of the pipelined module: from ``example_input_array``, else from the first batch of training.

    Args:
        module: the user's.
        pipelined: the part of it that is pipelined.
        trainer: whose train dataloader may be asked for a batch; None if it must not be.

    Returns:
        None if neither leads to a call of ``pipelined``; the log says why.
    """
    example = module.example_input_array
    if example is not None:
        args, kwargs = ((), example) if isinstance(example, dict) else (_as_tuple(example), {})
        found = _try("example_input_array", module, lambda: captured_call(pipelined, lambda: module(*args, **kwargs)))
        if found is not None:
            return found
    if trainer is None:
        return None

    def step() -> Any:
        batch = first_batch(trainer, module)
        vars(module).update(log=_no_log, log_dict=_no_log)
        with trainer.precision_plugin.train_step_context():
            return module.training_step(batch, 0)

    return _try("the first batch", module, lambda: captured_call(pipelined, step))


def captured_call(pipelined: nn.Module, run: Callable[[], Any]) -> Example | None:
    """What ``pipelined`` is called with first while ``run`` runs, which goes no further; None if it is not called."""

    def capture(*args: Any, **kwargs: Any) -> Any:
        raise _Captured(Example(*flatten_call(args, kwargs)))

    forward = PipelinedForward(pipelined, capture)
    try:
        run()
    except _Captured as captured:
        return captured.example
    finally:
        forward.remove()
    return None


def first_batch(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    """The first batch of the train dataloader, without starting its workers or using it up.

    Raises:
        ValueError: a dataset that can only be iterated: what is taken from it may be gone.
    """

    def take(loader: Any) -> Any:
        loader = inspect.unwrap(loader)  # the strategy's own, around the user's
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            raise ValueError(f"a {type(loader).__name__} without indices may not yield its first batch twice")
        sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        with _unchanged_generators(loader, loader.sampler):
            indices = next(iter(sampler))
        fetch = getattr(loader.dataset, "__getitems__", None)
        if loader.batch_sampler is None:
            return loader.collate_fn(loader.dataset[indices])
        return loader.collate_fn(fetch(indices) if fetch else [loader.dataset[index] for index in indices])

    batch = pytree.tree_map(take, trainer.train_dataloader)
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module.on_before_batch_transfer(batch, 0)
    return module.on_after_batch_transfer(batch, 0)


class _Captured(BaseException):
    """Ends a step where the pipelined module is called. No handler of the user's for exceptions should see it."""

    def __init__(self, example: Example) -> None:
        super().__init__()
        self.example = example


def _try(where: str, module: pl.LightningModule, run: Callable[[], Example | None]) -> Example | None:
    effects = SideEffects(module)
    try:
        with unchanged_buffers(module):
            example = run()
    except Exception as error:  # whatever the user's code raises: there is a way without
        log.info("No example input of the pipelined module from %s: %s: %s", where, type(error).__name__, error)
        return None
    finally:
        effects.undo()
    if example is None:
        log.info("No example input of the pipelined module from %s: it is not called there", where)
    return example


@contextlib.contextmanager
def _unchanged_generators(*owners: Any) -> Iterator[None]:
    """Leave the generators that a loader and its sampler draw from as they are."""
    found = [getattr(owner, "generator", None) for owner in owners]
    states = [(generator, generator.get_state()) for generator in found if isinstance(generator, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _no_log(*args: Any, **kwargs: Any) -> None:
    """Nothing is logged yet."""


def _as_tuple(example: Any) -> tuple[Any, ...]:
    return tuple(example) if isinstance(example, (tuple, list)) else (example,)
