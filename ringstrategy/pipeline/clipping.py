"""The norm of gradients that live on several stages, and clipping by it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

__all__ = ["Combine", "clip_grad_norm_"]

Combine = Callable[[Tensor, Literal["sum", "max"]], Tensor]
"""Reduces a tensor over the stages, element by element. Every stage brings the same shape and dtype and gets the same
values, on the device where its own were: that of its gradients, or the CPU if it has none."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    counts: Callable[[nn.Parameter], bool],
    combine: Combine,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, by the norm over all stages. Collective; one call of ``combine``.

    Args:
        parameters: this stage's; those without a gradient are passed over, and there may be none.
        max_norm: largest norm of all gradients together.
        norm_type: p of the p-norm; also 0, ``inf`` and ``-inf``, with torch's meaning.
        counts: whether this stage's copy of a parameter counts: true on exactly one of the stages that hold it. All
            copies are scaled.
        combine: reduces a tensor of three float64 values over the stages, by sum or by maximum.
        error_if_nonfinite: raise, on every stage, if the norm is infinite or NaN.
        foreach: as in torch.

    Returns:
        The norm before clipping, the same on every stage, in the dtype of the gradients (that of the parameters, where
        this stage has none).

    Raises:
        RuntimeError: the norm is not finite; no gradient has been touched.
    """
    given = list(parameters)
    holders = [parameter for parameter in given if parameter.grad is not None]
    gradients = [parameter.grad for parameter in holders if parameter.grad is not None and counts(parameter)]
    total = _combined_norm(gradients, float(norm_type), combine, foreach)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The norm of order {norm_type} of all stages' gradients is {total.item()}, so they cannot be clipped. "
            "Set error_if_nonfinite=False to scale them by it anyway."
        )
    dtypes = [parameter.dtype.to_real() for parameter in holders or given]
    total = total.to(functools.reduce(torch.promote_types, dtypes) if dtypes else torch.get_default_dtype())
    torch.nn.utils.clip_grads_with_norm_(holders, max_norm, total, foreach)
    return total


def _combined_norm(gradients: Sequence[Tensor], p: float, combine: Combine, foreach: bool | None) -> Tensor:
    """The p-norm of the gradients of all stages, as float64.

    What a stage sends is its part, whether that is NaN, and whether it has any gradient: a maximum may drop a NaN, and
    without any gradient the norm is 0, also where the smallest is sought (p = -inf).
    """
    part = torch.nn.utils.get_total_norm(gradients, p, foreach=foreach).double()
    missing = part.isnan()
    if math.isinf(p):
        part = math.copysign(1.0, p) * part if gradients else torch.full_like(part, -math.inf)
    elif p != 0 and gradients:
        part = part**p
    message = torch.stack([part.masked_fill(missing, 0.0), missing.double(), torch.full_like(part, bool(gradients))])
    part, missing, present = combine(message, "max" if math.isinf(p) else "sum").unbind()
    if math.isinf(p):
        part = math.copysign(1.0, p) * part
    elif p != 0:
        part = part ** (1 / p)
    return torch.where(present > 0, part.masked_fill(missing > 0, math.nan), 0.0)
