"""What torch's communication hooks become here: those that compress are translated, others cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)

from ringstrategy.collectives.half_precision import Compression

__all__ = ["compression_of_hook"]

_HOOKS: dict[Callable[..., Any], Compression | None] = {
    allreduce_hook: None,
    bf16_compress_hook: "bf16",
    fp16_compress_hook: "fp16",
}


def compression_of_hook(
    hook: Callable[..., Any] | None,
    state: object | None,
    wrapper: Callable[..., Any] | None,
    averaging_period: int | None,
    compression: Compression | None,
) -> Compression | None:
    """Translate the arguments that Lightning's ``DDPStrategy`` has for torch's hooks.

    Args:
        hook: ``ddp_comm_hook``.
        state: ``ddp_comm_state``.
        wrapper: ``ddp_comm_wrapper``.
        averaging_period: ``model_averaging_period``.
        compression: what the user asked for beside them.

    Returns:
        The compression that does what the hook would do.

    Raises:
        ValueError: nothing here does, or hook and compression contradict each other.
    """
    others = {"ddp_comm_state": state, "ddp_comm_wrapper": wrapper, "model_averaging_period": averaging_period}
    given = [name for name, value in others.items() if value is not None]
    if given or not (hook is None or hook in _HOOKS):
        what = ", ".join(
            [*given, *([f"ddp_comm_hook={_name(hook)}"] if hook is not None and hook not in _HOOKS else [])]
        )
        raise ValueError(
            f"{what}: torch's communication hooks work on the buckets of DistributedDataParallel, which ring_ddp does "
            "not use. Possible is ddp_comm_hook=fp16_compress_hook or bf16_compress_hook, without state or wrapper, "
            "which is the same as compression='fp16' or 'bf16'; use strategy='ddp' for others."
        )
    if hook is None or _HOOKS[hook] is None:
        return compression
    if compression not in (None, _HOOKS[hook]):
        raise ValueError(f"ddp_comm_hook={_name(hook)} and compression={compression!r} contradict each other.")
    return _HOOKS[hook]


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__name__", repr(hook))
