"""What to know of a module's parameters before their gradients are reduced."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from ringstrategy.gradients.buckets import Spec, plan_buckets

__all__ = ["expected_buckets", "refuse_uninitialized", "sparse_parameters"]


def refuse_uninitialized(named_parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Raise for parameters of lazy modules, which have no shape yet.

    Raises:
        RuntimeError: with the first of them.
    """
    lazy = [name for name, parameter in named_parameters if isinstance(parameter, nn.parameter.UninitializedParameter)]
    if lazy:
        raise RuntimeError(
            f"Parameter '{lazy[0]}' has no shape yet: a lazy module must see an input before ranks can compare it. Run "
            "one forward pass in `configure_model` or `setup`."
        )


def sparse_parameters(module: nn.Module) -> frozenset[str]:
    """Names of the parameters whose gradients will be sparse, as far as their modules tell."""
    return frozenset(
        f"{name}.weight" if name else "weight"
        for name, child in module.named_modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    )


def expected_buckets(
    named_parameters: Iterable[tuple[str, nn.Parameter]], sparse: Collection[str], cap_bytes: int
) -> list[tuple[int, torch.dtype]]:
    """The buckets of a step, as far as they are known before the first backward has shown the order of gradients.

    Args:
        named_parameters: of the module; those that other stages hold, on the meta device, are left aside.
        sparse: names of those whose gradients do not travel in buckets.
        cap_bytes: most bytes of gradients in a bucket.

    Returns:
        Elements and dtype of each bucket, in the order in which they leave.
    """
    specs = [
        Spec(index, parameter.numel(), parameter.dtype)
        for index, (name, parameter) in enumerate(named_parameters)
        if parameter.requires_grad and not parameter.is_meta and name not in sparse
    ]
    return [(bucket.numel, bucket.dtype) for bucket in plan_buckets([specs[::-1]], cap_bytes).buckets]
