"""What torch's communication hooks become."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

from ringstrategy import PipelineStrategy, RingDDPStrategy
from ringstrategy.comm_hooks import compression_of_hook


def test_hooks_that_compress_are_translated() -> None:
    assert compression_of_hook(None, None, None, None, None) is None
    assert compression_of_hook(None, None, None, None, "fp16") == "fp16"
    assert compression_of_hook(allreduce_hook, None, None, None, None) is None
    assert compression_of_hook(fp16_compress_hook, None, None, None, None) == "fp16"
    assert compression_of_hook(bf16_compress_hook, None, None, None, "bf16") == "bf16"


def test_the_strategies_accept_them() -> None:
    for strategy in (RingDDPStrategy, PipelineStrategy):
        strategy(ddp_comm_hook=fp16_compress_hook)
        strategy(compression="bf16")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"ddp_comm_hook": powerSGD_hook}, r"ddp_comm_hook=powerSGD_hook"),
        ({"ddp_comm_hook": fp16_compress_hook, "ddp_comm_state": object()}, r"ddp_comm_state: "),
        ({"ddp_comm_hook": allreduce_hook, "ddp_comm_wrapper": fp16_compress_wrapper}, r"ddp_comm_wrapper: "),
        ({"model_averaging_period": 2}, r"model_averaging_period: "),
    ],
)
def test_others_are_refused_with_what_is_possible(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named + r".*fp16_compress_hook or bf16_compress_hook.*strategy='ddp'"):
        RingDDPStrategy(**arguments)


def test_contradictions_and_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ddp_comm_hook=fp16_compress_hook and compression='bf16' contradict"):
        RingDDPStrategy(ddp_comm_hook=fp16_compress_hook, compression="bf16")
    with pytest.raises(ValueError, match=r"compression='int8' is unknown; choose one of 'bf16', 'fp16', or None"):
        RingDDPStrategy(compression="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"compression='bf16' and algorithm='ring' exclude each other"):
        RingDDPStrategy(compression="bf16", algorithm="ring")
