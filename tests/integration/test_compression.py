"""Training with gradients that travel in 16 bits."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringstrategy import PipelineStrategy
from ringstrategy.collectives.half_precision import Compression
from tests.helpers.assertions import assert_close_to_single_process, assert_ranks_identical
from tests.helpers.models import Batch, Regression, blocks, network, parameters_of, shard, train_single_process
from tests.helpers.ranks import RanksFailedError, run_ranks
from tests.helpers.scripts import run_script
from tests.helpers.trainers import Fitted, fit_ranks, strategy_under_test, trainer_on_rank

_COMPRESSIONS: list[Compression] = ["bf16", "fp16"]
# Six steps with momentum, at a learning rate of 0.1, of gradients around 1.
_TOLERANCE = {"bf16": 2e-2, "fp16": 2e-3}


def _compressed(compression: Compression | None) -> partial[Any]:
    return partial(strategy_under_test, transport="backend", compression=compression)


def _fit(compression: Compression | None, world_size: int = 2, **options: Any) -> list[Fitted]:
    strategy = _compressed(compression)
    return fit_ranks(Regression, world_size, rows=24 * world_size, batch_size=4, strategy=strategy, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
        pytest.param({"gradient_clip_val": 0.05}, marks=pytest.mark.slow),
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=["plain", "accumulated", "clipped", "accumulated, clipped, short window"],
)
@pytest.mark.parametrize("compression", _COMPRESSIONS)
def test_training_is_close_to_training_in_full_and_alike_on_all_ranks(
    compression: Compression, options: dict[str, Any]
) -> None:
    ranks, in_full = _fit(compression, **options), _fit(None, **options)
    assert_ranks_identical([rank.parameters for rank in ranks])
    assert_close_to_single_process(ranks[0].parameters, in_full[0].parameters, tolerance=_TOLERANCE[compression])
    same = [torch.equal(ranks[0].parameters[name], in_full[0].parameters[name]) for name in ranks[0].parameters]
    assert not all(same), "nothing was compressed"
    assert ranks[0].all_reduces == in_full[0].all_reduces


def test_three_ranks_are_close_to_one_process() -> None:
    ranks = _fit("fp16", world_size=3)
    assert_ranks_identical([rank.parameters for rank in ranks])
    expected = train_single_process(network(), blocks(72, 12))
    assert_close_to_single_process(ranks[0].parameters, expected, tolerance=_TOLERANCE["fp16"])


def test_mixed_precision_trains() -> None:
    ranks, in_full = _fit("bf16", precision="bf16-mixed"), _fit(None, precision="bf16-mixed")
    assert_ranks_identical([rank.parameters for rank in ranks])
    assert_close_to_single_process(ranks[0].parameters, in_full[0].parameters, tolerance=_TOLERANCE["bf16"])


class _Wide(Regression):
    """50 000 parameters, so that what surrounds them weighs little."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, nn.Sequential(nn.Linear(8, 4000), nn.Tanh(), nn.Linear(4000, 3)))


def test_half_the_bytes_are_sent() -> None:
    def sent(compression: Compression | None) -> int:
        first, second = fit_ranks(_Wide, 2, rows=16, batch_size=4, strategy=_compressed(compression))
        assert first.bytes_sent == second.bytes_sent
        assert first.bytes_sent is not None
        return first.bytes_sent

    assert 0.49 < sent("bf16") / sent(None) < 0.51


class _UsesPart(Regression):
    """Rank 1 leaves one layer out, and nobody uses another; gradients of one step are huge, of another tiny."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.sometimes, self.never = nn.Linear(3, 3), nn.Linear(3, 3)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, targets = batch
        outputs: Tensor = self.net(inputs)
        if self.rank == 0:
            outputs = self.sometimes(outputs)
        return F.mse_loss(outputs, targets) * (1.0, 2.0**60, 2.0**-60)[batch_idx % 3]

    def on_after_backward(self) -> None:
        self.record("sometimes", self.sometimes.weight.grad)
        self.record("never", self.never.weight.grad)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("compression", _COMPRESSIONS)
def test_who_used_what_is_known_whatever_the_size_of_gradients(compression: Compression) -> None:
    ranks = fit_ranks(_UsesPart, 2, rows=24, batch_size=4, strategy=_compressed(compression))
    in_full = fit_ranks(_UsesPart, 2, rows=24, batch_size=4, strategy=_compressed(None))
    for rank, expected in zip(ranks, in_full, strict=True):
        assert rank.records["never"] == [None] * 3
        for ours, theirs in zip(rank.records["sometimes"], expected.records["sometimes"], strict=True):
            assert ours is not None
            error = (ours - theirs).abs().max() / theirs.abs().max()
            assert 0 < error < 2.0**-7


class _InfiniteOnRank1(Regression):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        factor = float("inf") if self.rank == 1 and batch_idx == 1 else 1.0
        return self.loss(batch) * factor

    def on_after_backward(self) -> None:
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.record("finite", all(bool(grad.isfinite().all()) for grad in grads))
        for grad in grads:
            grad.zero_()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("compression", _COMPRESSIONS)
def test_a_gradient_that_is_not_finite_shows_on_every_rank(compression: Compression) -> None:
    for rank in fit_ranks(_InfiniteOnRank1, 2, rows=24, batch_size=4, strategy=_compressed(compression)):
        assert rank.records["finite"] == [True, False, True]


def _train(rank: int, world_size: int, dtype: torch.dtype, **arguments: Any) -> None:
    trainer = trainer_on_rank(rank, world_size, strategy=strategy_under_test(**arguments))
    trainer.fit(Regression(net=network(dtype=dtype)), shard(rank, world_size, 8, 4, dtype))


def test_shared_memory_says_that_there_is_nothing_to_compress(capsys: pytest.CaptureFixture[str]) -> None:
    said = "compression='bf16' has no effect: the ranks share memory"
    run_ranks(_train, 2, torch.float32, compression="bf16")
    assert capsys.readouterr().out.count(said) == 1
    run_ranks(_train, 2, torch.float32, compression="bf16", transport="backend")
    assert said not in capsys.readouterr().out


def test_float64_says_that_it_is_sent_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_train, 2, torch.float64, compression="fp16", transport="backend")
    assert capsys.readouterr().out.count("gradients in float64, e.g. of 'net.0.weight', are sent in full") == 1


class _WithIntegers(Regression):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)


def test_parameters_of_integers_are_refused_before_the_first_step() -> None:
    with pytest.raises(RanksFailedError) as caught:
        fit_ranks(_WithIntegers, 2, rows=8, batch_size=4, strategy=_compressed("bf16"))
    for outcome in caught.value.outcomes:
        assert outcome.error is not None
        assert "Parameter 'table' is torch.int64" in outcome.error


def _disagree(rank: int, world_size: int) -> None:
    strategy = strategy_under_test(transport="backend", compression="bf16" if rank == 0 else None)
    trainer_on_rank(rank, world_size, strategy=strategy).fit(Regression(rank), shard(rank, world_size, 8, 4))


def test_ranks_that_disagree_are_told_the_setting_and_the_rank() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_disagree, 2)
    for outcome in caught.value.outcomes:
        assert outcome.error is not None
        assert "compression is 'bf16' on rank 0 (host " in outcome.error
        assert " and None on rank 1 (host " in outcome.error


def _train_replicas(rank: int, world_size: int, compression: Compression | None) -> tuple[dict[str, Tensor], int]:
    strategy = PipelineStrategy(num_stages=2, chunks=2, balance=[2, 1], transport="backend", compression=compression)
    module = Regression(rank)
    trainer_on_rank(rank, world_size, strategy=strategy).fit(module, shard(rank // 2, world_size // 2, 48, 4))
    return parameters_of(module), strategy.communication.all_reduces


def test_replicas_of_a_pipeline_compress_each_stage() -> None:
    ranks, in_full = (run_ranks(_train_replicas, 4, compression) for compression in ("bf16", None))
    assert_ranks_identical([parameters for parameters, _ in ranks])
    assert_close_to_single_process(ranks[0][0], in_full[0][0], tolerance=_TOLERANCE["bf16"])
    assert any(not torch.equal(ranks[0][0][name], in_full[0][0][name]) for name in ranks[0][0])
    assert all(all_reduces > 0 for _, all_reduces in ranks)


class _FailsOnRank1(Regression):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if self.rank == 1 and batch_idx == 2:
            raise ValueError("the reason")
        return super().training_step(batch, batch_idx)


def test_a_failure_wakes_those_who_wait_for_messages() -> None:
    begun = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        fit_ranks(_FailsOnRank1, 3, rows=72, batch_size=4, strategy=_compressed("bf16"))
    assert [outcome.error_type for outcome in caught.value.outcomes] == ["RankFailure", "ValueError", "RankFailure"]
    assert "ValueError: the reason" in (caught.value.outcomes[0].error or "")
    assert time.monotonic() - begun < 20


@pytest.mark.slow
@pytest.mark.timeout(700)  # trains twice, to the end
@pytest.mark.parametrize("compression", _COMPRESSIONS)
def test_digits_are_learned_as_well_as_without(compression: Compression, tmp_path: Path) -> None:
    def accuracy(*arguments: str) -> float:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        command = (
            "import sys\nfrom ringstrategy.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
        )
        strategy = ["--trainer.strategy=ringstrategy.RingDDPStrategy", "--trainer.strategy.transport=backend"]
        ended = run_script(command, "run", "digits", *strategy, *arguments, cwd=folder, timeout=300.0)
        assert ended.returncode == 0, ended
        (summary,) = folder.glob("runs/*/*/summary.json")
        return float(json.loads(summary.read_text())["test_accuracy"])

    assert accuracy(f"--trainer.strategy.compression={compression}") > accuracy() - 0.01
