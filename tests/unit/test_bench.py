from __future__ import annotations

import argparse
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import GoogLeNetOutputs

from ringstrategy.bench.all_reduce import AllReduceConfig, AllReduceRow, contribution, modulus
from ringstrategy.bench.memory import PeakPss
from ringstrategy.bench.models import SyntheticBatches, SyntheticClassifier, build_network
from ringstrategy.bench.sizes import format_size, parse_size, parse_sizes
from ringstrategy.bench.train_step import Contender, TrainStepConfig
from ringstrategy.cli import bench as bench_command


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64KiB", 65_536),
        ("25MiB", 26_214_400),
        ("1GiB", 1_073_741_824),
        ("1.5 kib", 1536),
        ("10MB", 10_000_000),
        ("4096", 4096),
        ("1B", 1),
    ],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "64 foo", "1e3", "0", "0.5", "1.0001KiB", "nan", "64KiB KiB"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_size(text)


def test_a_list_of_sizes_keeps_its_order() -> None:
    assert parse_sizes("1MiB, 64KiB,5") == (1_048_576, 65_536, 5)
    with pytest.raises(ValueError, match="''"):
        parse_sizes("1MiB,,2MiB")


def test_bandwidths_follow_the_convention_of_nccl_tests() -> None:
    row = AllReduceRow.of("backend", ranks=4, nbytes=3_000_000_000, median_s=1.5)
    assert row.algbw_GBps == pytest.approx(2.0)  # 3e9 bytes / 1.5 s
    assert row.busbw_GBps == pytest.approx(3.0)  # 2.0 * 2 * (4 - 1) / 4
    assert AllReduceRow.of("backend", 2, 1000, 1e-6).busbw_GBps == pytest.approx(1.0)  # the factor is 1 for two ranks


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    list(itertools.product([2, 3, 4, 7], [torch.float32, torch.float64, torch.bfloat16, torch.float16])),
)
def test_contributions_differ_and_add_up_exactly(ranks: int, dtype: torch.dtype) -> None:
    count = 5000
    each = [contribution(rank, ranks, count, dtype) for rank in range(ranks)]
    for one, other in itertools.combinations(each, 2):
        assert (one != other).all()
    for values in each:
        assert (values[1:] != values[:-1]).all()
        # A chunk of a quarter or half of a power of two, put into another's place, is seen.
        assert all((values[chunk : 2 * chunk] != values[:chunk]).any() for chunk in (1024, 2048))
    total = torch.stack(each).sum(0)
    assert torch.equal(total.to(dtype).to(torch.int64), total)
    # In whatever order the ranks are added, no partial sum is rounded.
    running = torch.zeros(count, dtype=dtype)
    for values in reversed(each):
        running += values.to(dtype)
    assert torch.equal(running.to(torch.int64), total)


def test_the_largest_contribution_of_all_ranks_is_exact() -> None:
    for ranks, dtype in itertools.product((2, 3, 5, 8), (torch.float32, torch.bfloat16)):
        largest = ranks * (modulus(ranks, dtype) - 1)
        assert int(torch.tensor(largest, dtype=torch.int64).to(dtype)) == largest
        assert modulus(ranks, dtype) % 2 == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 1}, "at least 2 ranks"),
        ({"sizes": (6,)}, "6 is no whole number of float32 elements of 4 bytes"),
        ({"algorithms": ("backend", "backend")}, "named twice"),
        ({"algorithms": ("backend", "auto")}, "unknown algorithm 'auto': choose from shared_memory, .*backend, ring, "),
        ({"algorithms": ("measure",)}, "'measure' chooses from the other algorithms that are named; name some"),
        ({"dtype": "int64"}, "no floating-point dtype"),
        ({"dtype": "nn"}, "no floating-point dtype"),
    ],
)
def test_an_all_reduce_that_cannot_be_measured_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AllReduceConfig(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        ("ring_ddp", True),
        ("ring_ddp+release", False),
        ("ddp", False),
        ("ddp+keep", True),
        ("none", False),
        ("none+keep", True),
        ("ring_ddp+bf16", True),
        ("ring_ddp+release+backend+fp16", False),
    ],
)
def test_a_strategy_says_what_it_does_with_freed_memory(text: str, keeps: bool) -> None:
    contender = Contender.parse(text)
    assert contender.name == text
    assert contender.keeps == keeps


@pytest.mark.parametrize("text", ["fsdp", "ddp+", "ddp+hold", "", "+keep", "ddp+bf16", "ring_ddp+bf16+fp16"])
def test_an_unknown_strategy_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="unknown strategy"):
        Contender.parse(text)


def test_an_unknown_model_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ValueError, match=r"no model 'resnet17'.*mobilenet_v3_small.*resnet18"):
        TrainStepConfig(model="resnet17")


def test_a_strategy_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="named twice"):
        TrainStepConfig(strategies=(Contender("ddp"), Contender("ddp")))


def test_the_mlp_has_ten_and_a_half_million_parameters() -> None:
    network, shape = build_network("mlp", image_size=32)
    assert sum(parameter.numel() for parameter in network.parameters()) == pytest.approx(10.5e6, rel=0.002)
    assert network(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("model", ["resnet18", "mobilenet_v3_small"])
def test_a_classifier_of_torchvision_trains(model: str) -> None:
    network, shape = build_network(model, image_size=32)
    assert shape == (3, 32, 32)
    batch = SyntheticBatches(shape, batch_size=2, length=1, seed=0)[0]
    torch.autograd.backward(SyntheticClassifier(network).training_step(batch, 0))
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_auxiliary_heads_are_left_aside() -> None:
    class TwoHeads(nn.Linear):
        def forward(self, inputs: Tensor) -> GoogLeNetOutputs:
            logits = super().forward(inputs)
            return GoogLeNetOutputs(logits, -logits, -logits)

    network = TwoHeads(3, 10)
    batch = SyntheticBatches((3,), batch_size=4, length=1, seed=0)[0]
    expected = nn.functional.cross_entropy(nn.functional.linear(batch[0], network.weight, network.bias), batch[1])
    assert torch.equal(SyntheticClassifier(network).training_step(batch, 0), expected)


def test_synthetic_batches_repeat_and_end() -> None:
    batches = SyntheticBatches((3,), batch_size=5, length=6, seed=1, distinct=4)
    loaded = list(batches.loader())
    assert len(loaded) == len(batches) == 6
    assert loaded[0][0].shape == (5, 3)
    assert torch.equal(loaded[0][0], loaded[4][0])
    assert not torch.equal(loaded[0][0], loaded[1][0])
    assert not torch.equal(loaded[0][0], SyntheticBatches((3,), 5, 6, seed=2)[0][0])


def test_peak_memory_is_kept_after_it_has_been_freed() -> None:
    pss = PeakPss(interval_s=0.001)
    pss.start()
    pss.stop()
    before = pss.mebibytes
    assert before > 10  # torch alone is more
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    pss.start()
    pss.stop()
    assert pss.mebibytes > before + 50
    peak = pss.mebibytes
    del block
    pss.start()
    pss.stop()
    pss.stop()
    assert pss.mebibytes >= peak


@pytest.mark.parametrize("config", [AllReduceConfig(sizes=(65536, 12)), TrainStepConfig(rounds=1)])
def test_the_command_repeats_the_measurement(config: AllReduceConfig | TrainStepConfig) -> None:
    args = _parser().parse_args(config.command.split()[1:])
    for name in ("ranks", "sizes", "algorithms", "repeats", "warmup", "rounds", "steps", "model", "image_size"):
        if hasattr(config, name):
            assert getattr(args, name) == getattr(config, name), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("all-reduce --sizes 64foo", "'64foo' is not a size"),
        ("all-reduce --ranks 1", "must be at least 2, not 1"),
        ("all-reduce --ranks two", "'two' is no whole number"),
        ("all-reduce --repeats 0", "must be at least 1"),
        ("all-reduce --algorithms backend,", "has an empty name"),
        ("all-reduce --dtype int8", "invalid choice: 'int8'"),
        ("all-reduce --json missing/rows.json", "a folder, or lies in one that does not exist"),
        ("train-step --json .", "a folder, or lies in one that does not exist"),
        ("train-step --plot steps.jpeg", "must end in .png"),
        ("train-step --warmup 0", "must be at least 1"),
        ("", "KIND"),
    ],
)
def test_bad_words_are_explained(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        _parser().parse_args(["bench", *words.split()])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("all-reduce --sizes 6", "6 is no whole number of float32 elements"),
        ("all-reduce --algorithms backend,backend", "named twice"),
        ("all-reduce --algorithms carrier_pigeon", "unknown algorithm 'carrier_pigeon'"),
        ("all-reduce --algorithms measure", "name some"),
        ("train-step --strategies ddp,fsdp", "unknown strategy 'fsdp'"),
        ("train-step --model resnet17", "no model 'resnet17'"),
    ],
)
def test_what_cannot_be_measured_ends_with_status_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = _parser().parse_args(["bench", *words.split()])
    assert args.func(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("ringstrategy bench: error: ")
    assert message in error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ringstrategy")
    bench_command.add_parser(parser.add_subparsers())
    return parser
