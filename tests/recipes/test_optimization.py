from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optimization import build_optimizer, find_optimizer, learning_rate_factor, parameter_groups
from torch import nn


def test_a_cosine_ends_at_zero_and_stays_there() -> None:
    factors = [learning_rate_factor(step, 0, 4) for step in (0, 2, 4, 9)]
    assert factors == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_the_warm_up_is_a_line_up_to_one() -> None:
    factors = [learning_rate_factor(step, 3, 10) for step in range(5)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.5 * (1 + math.cos(math.pi / 7))])


def test_steps_fall_at_their_shares_of_the_run() -> None:
    factors = [
        learning_rate_factor(step, 1, 10, "step", milestones=(0.3, 0.8), gamma=0.2) for step in (0, 1, 2, 3, 7, 8, 10)
    ]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.2, 0.2, 0.04, 0.04])


def test_a_constant_rate_only_warms_up() -> None:
    assert [learning_rate_factor(step, 1, 10, "constant") for step in (0, 1, 9)] == [0.5, 1.0, 1.0]


def test_groups_have_every_parameter_once_with_its_rate_and_decay() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    network[0].requires_grad_(False)  # may thaw later
    groups = parameter_groups(network, head="2", learning_rate=1.0, backbone_factor=0.1, weight_decay=0.5)
    settings = {
        id(parameter): (group["lr"], group["weight_decay"]) for group in groups for parameter in group["params"]
    }
    expected = {
        name: (1.0 if name.startswith("2.") else 0.1, 0.5 if parameter.ndim > 1 else 0.0)
        for name, parameter in network.named_parameters()
    }
    assert {name: settings[id(parameter)] for name, parameter in network.named_parameters()} == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adamw", torch.optim.AdamW),
        ("SGD", torch.optim.SGD),
        ("nadam", torch.optim.NAdam),
        ("torch.optim.RMSprop", torch.optim.RMSprop),
    ],
)
def test_an_optimizer_by_name_or_import_path(name: str, kind: type[torch.optim.Optimizer]) -> None:
    assert find_optimizer(name) is kind


def test_an_optimizer_gets_its_arguments() -> None:
    optimizer = build_optimizer("sgd", [{"params": [torch.ones(1)], "lr": 0.25}], {"momentum": 0.9, "nesterov": True})
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.25, 0.9, True)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("adamv", {}, "unknown optimizer 'adamv': .*adamw"),
        ("nowhere.Lion", {}, "optimizer 'nowhere.Lion' cannot be imported"),
        ("torch.nn.Linear", {}, "'torch.nn.Linear' is no class of optimizers"),
        ("torch.optim.Nothing", {}, "'torch.optim.Nothing' is no class of optimizers"),
        ("adamw", {"momentum": 0.9}, r"AdamW does not take optimizer_args .*momentum"),
    ],
)
def test_what_is_no_optimizer_is_named(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(name, [{"params": [torch.ones(1)], "lr": 0.1}], arguments)
