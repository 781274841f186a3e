"""`ringstrategy plan` on a small classifier."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models

from ringstrategy.cli import plan

_SMALL = ("--model", "squeezenet1_1", "--size", "32")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command; gives exit status, output and errors."""
    parser = argparse.ArgumentParser(prog="ringstrategy")
    plan.add_parser(parser.add_subparsers())

    def run(*words: str) -> tuple[int, str, str]:
        try:
            args = parser.parse_args(["plan", *words])
            status = args.func(args)
        except SystemExit as ended:
            status = ended.code
        return (status, *capsys.readouterr())

    return run


Run = Callable[..., tuple[int, str, str]]


def test_a_plan_is_printed_written_and_drawn(run: Run, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    words = ("--stages", "3", "--chunks", "4", "--batch", "8", "--schedule", "1f1b", "--checkpoint", "never")
    files = ("--json", str(tmp_path / "plan.json"), "--plot", str(tmp_path / "plan.png"))
    status, printed, errors = run(*_SMALL, *words, *files)
    assert status == 0
    assert errors == f"measuring {printed.splitlines()[0]}\n"
    assert torch.get_num_threads() == threads

    title, *lines = printed.splitlines()
    assert title == "squeezenet1_1, 8 images of 32 x 32 in 4 micro-batches of 2, 1f1b, checkpoint=never"
    names = [line.split()[0] for line in lines if line.strip() and not line.startswith(("─", " " * 9))]
    assert names == ["stage", "0", "1", "2", "stage", "stage", "stage", "predicted", "bubble"]

    written = json.loads((tmp_path / "plan.json").read_text())
    made = written["plan"]
    assert made["micro_batches"] == [2, 2, 2, 2]
    assert made["balance"] == [len(row["layers"]) for row in written["rows"]]
    assert sum(row["parameters"] for row in written["rows"]) == 1_235_496  # all of SqueezeNet 1.1
    assert sorted(span["action"] for span in written["spans"] if span["stage"] == 1) == [
        *("B0", "B1", "B2", "B3", "F0", "F1", "F2", "F3")
    ]
    assert made["step_s"] == max(span["end_s"] for span in written["spans"])
    seconds = [row["forward"] + row["backward"] for row in written["rows"]]
    busy = sum(span["end_s"] - span["start_s"] for span in written["spans"])
    assert busy == pytest.approx(4 * sum(seconds))
    assert made["bubble"] == pytest.approx(1 - busy / (3 * made["step_s"]))
    assert made["ideal_bubble"] == pytest.approx(2 / 6)
    assert made["one_chunk_s"] == pytest.approx(busy, rel=0.1), "one after another, and the messages"
    assert made["speedup"] == made["one_chunk_s"] / made["step_s"]
    assert f"bubble          {made['bubble'] * 100:.1f} %; with equal stages (K-1)/(M+K-1) = 33.3 %" in printed
    assert written["environment"]["command"] == (
        "ringstrategy plan --model squeezenet1_1 --stages 3 --chunks 4 --schedule 1f1b --batch 8 --size 32"
        " --balance time --checkpoint never --threads 1"
    )
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_balance_by_hand_and_the_layers_to_choose_from(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ("--batch", "5", "--chunks", "2", "--balance", "10,47", "--json", str(path))
    status, printed, _ = run(*_SMALL, "--layers", *words)
    assert status == 0
    written = json.loads(path.read_text())
    assert written["plan"]["balance"] == [10, 47]
    assert written["plan"]["micro_batches"] == [3, 2]
    assert "in 2 micro-batches of 3 or 2, gpipe, checkpoint=except_last" in printed
    listed = [line.split()[:2] for line in printed.splitlines()[2:59]]
    assert listed == [[str(row["stage"]), layer] for row in written["rows"] for layer in row["layers"]]
    assert "--balance 10,47 " in written["environment"]["command"]
    recomputed = {span["action"]: span["end_s"] - span["start_s"] for span in written["spans"] if span["stage"] == 0}
    assert recomputed["B0"] - recomputed["B1"] == pytest.approx(written["rows"][0]["forward"])


@pytest.mark.parametrize(("layer", "sizes"), [(nn.BatchNorm2d(3), (3, 2)), (nn.LayerNorm(3), (1, 1, 1, 1, 1))])
def test_a_batch_norm_gets_two_images_at_a_time(layer: nn.Module, sizes: tuple[int, ...]) -> None:
    assert plan._sizes(nn.Sequential(layer), argparse.Namespace(batch=5, chunks=8)) == sizes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "resnet5"), "torchvision has no classifier 'resnet5'; did you mean resnet50, "),
        (("--model", "qqq"), "torchvision has no classifier 'qqq'; there are: alexnet, "),
        ((*_SMALL, "--balance", "3,5"), "balance=[3, 5] adds up to 8 layers, but the module has 57"),
        ((*_SMALL, "--balance", "57"), "balance=[57] is for 1 stages, but there are 2"),
        ((*_SMALL, "--balance", "evenly"), "'evenly' is no balance; choose time, size, memory or a number of layers"),
        ((*_SMALL, "--stages", "58"), "SqueezeNet has 57 layers, too few for 58 stages"),
        (
            ("--model", "squeezenet1_1", "--size", "4", "--batch", "2"),
            "squeezenet1_1 cannot run on images of 4 x 4, 1 at a time: ",
        ),
        ((*_SMALL, "--chunks", "0"), "argument --chunks: must be at least 1, not 0"),
        ((*_SMALL, "--plot", "plan.gif"), "argument --plot: 'plan.gif' must end in .png"),
        ((), "the following arguments are required: --model"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(run: Run, words: tuple[str, ...], message: str) -> None:
    status, printed, errors = run(*words)
    assert status == 2
    assert printed == ""
    assert errors.splitlines()[-1].startswith("ringstrategy plan: error: ")
    assert message in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("vit_b_32", {"image_size": 96}),
        ("maxvit_t", {"input_size": (96, 96)}),
        ("googlenet", {"init_weights": False}),
        ("resnet18", {}),
    ],
)
def test_a_model_is_made_for_the_size_of_the_images(
    model: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(models, "get_model", lambda name, **given: made.append({"name": name, **given}))
    plan._build(model, 96)
    assert made == [{"name": model, "weights": None, **arguments}]
