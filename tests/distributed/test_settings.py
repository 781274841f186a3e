"""Ranks that were given different settings are told which, and where."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from ringstrategy.process_group import RankGroup
from ringstrategy.settings import SettingMismatch, check_same_settings
from tests.helpers.ranks import run_ranks


def _compare(rank: int, world_size: int, settings: list[dict[str, object]]) -> str | None:
    group = RankGroup.connect(torch.device("cpu"), timedelta(seconds=20))
    try:
        check_same_settings(group, settings[rank])
    except SettingMismatch as error:
        return str(error)
    return None


def test_the_same_settings_pass() -> None:
    settings: dict[str, object] = {"compression": None, "bucket_cap_mb": 4.0, "betas": (0.9, 0.99)}
    assert run_ranks(_compare, 2, [settings, settings | {"bucket_cap_mb": 4}]) == [None, None]


def test_every_rank_is_told_each_difference_and_its_first_rank() -> None:
    settings: dict[str, object] = {"algorithm": "auto", "compression": "bf16", "bucket_cap_mb": None, "betas": (1, 2)}
    others = settings | {"compression": None, "betas": (1, 3)}
    messages = run_ranks(_compare, 3, [settings, settings, others])
    assert len(set(messages)) == 1
    message = messages[0]
    assert message is not None
    assert "compression is 'bf16' on rank 0 (host " in message
    assert " and None on rank 2 (host " in message
    assert "betas is '(1, 2)' on rank 0" in message
    assert "algorithm" not in message
    assert "bucket_cap_mb" not in message


@pytest.mark.parametrize("values", [(True, 1.5), ("4", 4), (None, 0)])
def test_values_of_different_types_differ(values: tuple[object, object]) -> None:
    messages = run_ranks(_compare, 2, [{"x": value} for value in values])
    assert messages == [messages[0]] * 2
    assert messages[0] is not None
    assert f"x is {values[0]!r} on rank 0" in messages[0]
