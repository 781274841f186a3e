"""What the benchmark of pipelines works out, without processes."""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from ringstrategy.bench import BenchError
from ringstrategy.bench.contenders import Bench, build_contender
from ringstrategy.bench.models import SyntheticClassifier, build_network
from ringstrategy.bench.pipeline import PipelineConfig, PipelineRow, summarise
from ringstrategy.bench.pipeline_worker import RankResult, StepRecord, Variant, difference
from ringstrategy.bench.plot import plot_pipeline
from ringstrategy.bench.report import pipeline_table, write_json
from ringstrategy.cli import bench as bench_command
from ringstrategy.pipeline.calls import Example, flatten_call
from ringstrategy.pipeline.engine import Engine
from ringstrategy.pipeline.plan import PipelinePlan, choose_cut


def test_the_naive_one_comes_first_and_once() -> None:
    config = PipelineConfig(chunks=(2, 4), variants=("gpipe", "naive", "torch_1f1b"))
    assert config.contenders == (
        Variant("naive", 1),
        *(Variant("gpipe", 2), Variant("torch_1f1b", 2)),
        *(Variant("gpipe", 4), Variant("torch_1f1b", 4)),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": 1}, "at least 2 stages, not 1"),
        ({"variants": ("gpipe", "zero_bubble")}, "unknown variant 'zero_bubble': choose from gpipe, 1f1b, torch_gpipe"),
        ({"variants": ("gpipe", "gpipe")}, "a variant is named twice: gpipe, gpipe"),
        ({"chunks": (2, 2)}, "a number of chunks is named twice: 2, 2"),
        ({"chunks": (0,)}, "0 chunks do not divide a batch of 64"),
        ({"chunks": (3,)}, "3 chunks do not divide a batch of 64"),
        ({"stages": 3}, "torch_1f1b needs at least as many chunks as stages, not 2 for 3 stages"),
        ({"model": "resnet17"}, "no model 'resnet17'; choose mlp, cifar_resnet18 or a classifier"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineConfig(**arguments)  # type: ignore[arg-type]


def test_the_command_repeats_the_measurement() -> None:
    config = PipelineConfig(model="mlp", stages=3, chunks=(3, 6), batch=12, rounds=4)
    parser = argparse.ArgumentParser("ringstrategy")
    bench_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(config.command.split()[1:])
    for name in ("model", "image_size", "batch", "stages", "chunks", "variants", "rounds", "steps", "warmup"):
        assert getattr(args, name) == getattr(config, name), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--chunks 2;4", "'2;4' is no list of whole numbers"),
        ("--stages 1", "must be at least 2, not 1"),
        ("--variants gpipe,,naive", "has an empty name"),
    ],
)
def test_bad_words_are_explained(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser("ringstrategy")
    bench_command.add_parser(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["bench", "pipeline", *words.split()])
    assert message in capsys.readouterr().err


def test_a_measurement_is_summed_up_by_its_slowest_rank() -> None:
    # Two stages, two micro-batches, two rounds of one step; stage 1 is slower.
    stage_0 = [[StepRecord(9.0, (1.0, 1.0), (2.0, 2.0))], [StepRecord(11.0, (1.0, 1.0), (2.0, 2.0))]]
    stage_1 = [[StepRecord(10.0, (1.0, 2.0), (3.0, 3.0))], [StepRecord(8.0, (1.0, 2.0), (3.0, 3.0))]]
    timing = summarise(Variant("gpipe", 2), [stage_0, stage_1])
    assert timing.rounds_s == (10.0, 11.0)
    assert timing.median_s == 10.5
    assert timing.forward_s == (1.0, 1.5)
    assert timing.backward_s == (2.0, 3.0)
    # F0 on stage 0, F0 F1 B1 B0 on stage 1, B0 on stage 0.
    assert timing.critical_s == pytest.approx(1.0 + 2 * 1.5 + 2 * 3.0 + 2.0)
    # 6 + 9 of 2 * 10 and of 2 * 11 seconds.
    assert timing.bubble == pytest.approx((0.25 + 7 / 22) / 2)


def test_the_critical_path_is_that_of_the_schedule() -> None:
    # With a slow first stage and cheap backwards, 1F1B is held up where GPipe is not.
    steps = [[[StepRecord(1.0, (4.0,) * 4, (1.0,) * 4)]], [[StepRecord(1.0, (1.0,) * 4, (1.0,) * 4)]]]
    gpipe, ours, theirs = (summarise(Variant(name, 4), steps).critical_s for name in ("gpipe", "1f1b", "torch_1f1b"))
    assert gpipe == pytest.approx(4 * 4.0 + 1.0 + 1.0 + 4 * 1.0)
    assert ours == theirs != gpipe


def test_what_a_rank_saw_survives_its_file(tmp_path: Path) -> None:
    result = RankResult((3, 4), (((StepRecord(1.5, (0.1, 0.2), (0.3, 0.4)),),), ((StepRecord(2.0, (), ()),),)), (7, 8))
    result.write(str(tmp_path), rank=1)
    assert RankResult.read(str(tmp_path), rank=1) == result


def test_gradients_are_compared_by_name_and_relative_to_their_size() -> None:
    right: dict[str, Tensor | None] = {"weight": torch.ones(100) * 1e3, "bias": torch.ones(4), "frozen": None}
    assert difference(dict(right), right) is None
    assert difference({**right, "weight": torch.ones(100) * (1e3 + 0.05)}, right) is None
    assert "weight is off by 2" in str(difference({**right, "weight": torch.ones(100) * (1e3 + 0.2)}, right))
    # Small ones are not drowned by large ones, but rounding of large ones may be all there is of a small one.
    assert "bias is off by 0.2" in str(difference({**right, "bias": torch.ones(4) * 1.1}, right))
    assert difference({**right, "bias": torch.ones(4) + 1e-3}, right) is None
    assert "weight is off by nan" in str(difference({**right, "weight": torch.full((100,), torch.nan)}, right))
    assert "weight has no gradient" in str(difference({**right, "weight": None}, right))
    assert "frozen has a gradient" in str(difference({**right, "frozen": torch.zeros(1)}, right))


def test_group_norm_keeps_samples_apart() -> None:
    torch.manual_seed(0)
    network, shape = build_network("resnet18", image_size=32, norm="group")
    assert not any(isinstance(child, nn.BatchNorm2d) for child in network.modules())
    images = torch.randn(3, *shape)
    torch.testing.assert_close(network(images)[:1], network(images[:1]), rtol=1e-4, atol=1e-5)


def test_a_stem_for_small_images_keeps_their_size() -> None:
    network, shape = build_network("cifar_resnet18", image_size=32)
    sizes: list[tuple[int, ...]] = []
    network.get_submodule("layer1").register_forward_pre_hook(lambda _, args: sizes.append(tuple(args[0].shape)))
    assert network(torch.zeros(2, *shape)).shape == (2, 10)
    assert sizes == [(2, 64, 32, 32)]


def test_torch_is_not_given_a_cut_that_it_cannot_run() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden: Tensor = self.second(self.first(inputs))
            return hidden + inputs

    network = Skip()
    module = SyntheticClassifier(network)
    inputs = torch.zeros(4, 4)
    cut = choose_cut(network, 2, [1, 1], Example(*flatten_call((inputs,), {})), chunks=2)
    engine = Engine(1, {0: None})  # type: ignore[dict-item]
    bench = Bench(module, PipelinePlan("network", network, cut, module), engine, (inputs, torch.zeros(4)))
    with pytest.raises(BenchError, match="stage 1 reads the input of the module"):
        build_contender("torch_gpipe", 2, bench)


NAIVE = PipelineRow(
    median_s=1.0,
    rounds_s=(0.9, 1.0, 1.2),
    forward_s=(0.1, 0.2),
    backward_s=(0.2, 0.4),
    critical_s=0.9,
    bubble=0.55,
    variant="naive",
    chunks=1,
    model="mlp",
    batch=64,
    stages=2,
    balance=(10, 11),
    ideal_bubble=0.5,
    sent_bytes=3 * 2**20,
    peak_pss_MiB=(500.4, 410.2),
)
OURS = replace(NAIVE, variant="gpipe", chunks=4, median_s=0.5, rounds_s=(0.5,), critical_s=0.48, ideal_bubble=0.2)
TORCH = replace(OURS, variant="torch_gpipe", median_s=0.6)


def test_the_table_shows_what_a_variant_is_measured_against() -> None:
    lines = _rendered([NAIVE, OURS, TORCH])
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[:4] for row in rows] == [
        ["1", "naive", "1.00 s", "900.0 to 1200.0 ms"],
        ["4", "gpipe", "500 ms", "500.0 to 500.0 ms"],
        ["", "torch_gpipe", "600 ms", "500.0 to 500.0 ms"],
    ]
    # Against torch and naive, the critical path, and the bubble.
    assert [row[4:] for row in rows] == [
        ["-", "1.00x", "900 ms", "+11.1%", "55.0%", "50.0%", "3.00 MiB", "500, 410"],
        ["1.20x", "2.00x", "480 ms", "+4.2%", "55.0%", "20.0%", "3.00 MiB", "500, 410"],
        ["-", "1.67x", "480 ms", "+25.0%", "55.0%", "20.0%", "3.00 MiB", "500, 410"],
    ]
    assert "2 stages of one thread (10 + 11 layers), mlp, batch 64" in " ".join(lines)


def test_the_table_does_without_the_naive_one() -> None:
    lines = _rendered([OURS])
    assert [cell.strip() for cell in next(line for line in lines if "gpipe" in line).split("│")][5:7] == ["-", "-"]


def test_json_holds_a_flat_row(tmp_path: Path) -> None:
    write_json(tmp_path / "rows.json", {"cpu": "x"}, [OURS])
    row = json.loads((tmp_path / "rows.json").read_text())["rows"][0]
    assert {
        "variant": "gpipe",
        "median_s": 0.5,
        "balance": [10, 11],
        "peak_pss_MiB": [500.4, 410.2],
    }.items() <= row.items()


@pytest.mark.parametrize("rows", [[NAIVE, OURS, TORCH, replace(OURS, chunks=8)], [NAIVE], [TORCH]])
def test_a_picture_is_drawn(rows: list[PipelineRow], tmp_path: Path) -> None:
    plot_pipeline(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def _rendered(rows: list[PipelineRow]) -> list[str]:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as capture:
        console.print(pipeline_table(rows))
    return capture.get().splitlines()
