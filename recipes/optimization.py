"""Optimizer, parameter groups and learning rate of the image classifiers, as functions of plain values."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["Schedule", "build_optimizer", "learning_rate_factor", "parameter_groups"]

Schedule = Literal["cosine", "step", "constant"]


def learning_rate_factor(
    step: int,
    warmup_steps: int,
    total_steps: int,
    schedule: Schedule = "cosine",
    milestones: Sequence[float] = (),
    gamma: float = 0.1,
) -> float:
    """Factor of the learning rate at an optimizer step: a straight line up to 1, then what the schedule says.

    Args:
        step: optimizer step, from 0.
        warmup_steps: steps before the factor is 1; the first has the factor ``1 / (warmup_steps + 1)``.
        total_steps: the step at which training ends.
        schedule: half a cosine down to 0, a factor ``gamma`` at every milestone, or 1 for ever.
        milestones: shares of all steps, in [0, 1].
        gamma: what each milestone multiplies the factor by.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "cosine":
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    if schedule == "step":
        return float(gamma ** sum(step >= milestone * total_steps for milestone in milestones))
    return 1.0


def parameter_groups(
    network: nn.Module, head: str, learning_rate: float, backbone_factor: float, weight_decay: float
) -> list[dict[str, Any]]:
    """The parameters in groups by what an optimizer does with them. Frozen ones are in them, too: they may thaw.

    Args:
        network: the network.
        head: name of the layer that makes the logits; the rest is the backbone.
        learning_rate: of the head.
        backbone_factor: share of it that the backbone has.
        weight_decay: of weight matrices and filters; biases and normalisation layers have none.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in network.named_parameters():
        factor = 1.0 if name.startswith(f"{head}.") else backbone_factor
        decay = weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((factor, decay), []).append(parameter)
    return [
        {"params": parameters, "lr": factor * learning_rate, "weight_decay": decay}
        for (factor, decay), parameters in groups.items()
    ]


def build_optimizer(name: str, groups: Iterable[dict[str, Any]], arguments: Mapping[str, Any]) -> Optimizer:
    """An optimizer over groups that have learning rate and weight decay already.

    Args:
        name: a class of torch.optim, in any case (``"adamw"``), or the import path of another (``"package.Lion"``).
        groups: its parameters.
        arguments: what else its class takes, e.g. ``{"momentum": 0.9}``.

    Raises:
        ValueError: there is no such class, or it does not take the arguments.
    """
    kind = find_optimizer(name)
    try:
        return kind(list(groups), **arguments)
    except TypeError as error:
        raise ValueError(f"{kind.__name__} does not take optimizer_args {dict(arguments)}: {error}") from error


def find_optimizer(name: str) -> type[Optimizer]:
    """The optimizer class of that name.

    Raises:
        ValueError: there is none.
    """
    module, _, attribute = name.rpartition(".")
    if module:
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except ImportError as error:
            raise ValueError(f"optimizer {name!r} cannot be imported: {error}") from error
        if not (isinstance(found, type) and issubclass(found, Optimizer)):
            raise ValueError(f"{name!r} is no class of optimizers")
        return found
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name.lower() not in known:
        raise ValueError(
            f"unknown optimizer {name!r}: use the import path of a class, or one of torch.optim: "
            f"{', '.join(sorted(known))}"
        )
    return known[name.lower()]
