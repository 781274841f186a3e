"""One verdict of all stages on whether the scaled gradients have overflowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringstrategy.pipeline.clipping import Combine

__all__ = ["SharedOverflow"]


class SharedOverflow:
    """Makes a ``GradScaler`` skip a step, and lower its scale, on all stages if any of them has an infinity or NaN.

    Every look at an optimizer's gradients becomes a collective: whether in ``unscale_``, in ``step``, or for an
    optimizer that unscales by itself (fused). A stage on which the optimizer has no gradient looks as well, where torch
    would refuse to step. The scales stay alike, as long as they start alike.

    The scaler keeps its class and its state; :meth:`close` gives it its own method back.

    Args:
        scaler: the instance that steps the optimizers.
        combine: reduces a tensor of one float32 value over the stages, by maximum.
    """

    def __init__(self, scaler: torch.amp.GradScaler, combine: Combine) -> None:
        self._scaler = scaler
        own = scaler._unscale_grads_

        def unscale_and_agree(
            optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, *args: Any, **kwargs: Any
        ) -> dict[torch.device, Tensor]:
            local = own(optimizer, inv_scale, found_inf, *args, **kwargs)
            # One verdict where the scale lives; that there may be none on this stage is the point.
            found = torch.stack([found_inf, *(verdict.to(found_inf.device) for verdict in local.values())])
            return {found_inf.device: combine(found.amax(), "max")}

        self._instead: Callable[..., dict[torch.device, Tensor]] = unscale_and_agree
        scaler._unscale_grads_ = unscale_and_agree  # type: ignore[method-assign]

    def close(self) -> None:
        """Leave the scaler to itself again. Idempotent; touches no other stage."""
        if self._scaler.__dict__.get("_unscale_grads_") is self._instead:
            del self._scaler.__dict__["_unscale_grads_"]
