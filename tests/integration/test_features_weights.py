"""Callbacks that average, freeze or prune weights, under ``ring_ddp``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn

from tests.helpers.compare import (
    Logged,
    Normalised,
    Place,
    assert_same,
    fit_alone,
    fit_both,
    fit_under,
    result_of,
    run_both,
)
from tests.helpers.features import feature
from tests.helpers.models import Batch, network

pytestmark = pytest.mark.slow  # the whole table takes minutes

_GROUP = "Averaging, freezing, pruning"


@feature(
    _GROUP,
    "`StochasticWeightAveraging`",
    tried="from the third of five epochs, with BatchNorm, whose statistics it renews",
    outcome="same bits",
)
def test_stochastic_weight_averaging() -> None:
    ours, theirs = fit_both(
        Normalised, max_epochs=5, callbacks=[StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)]
    )
    assert_same(ours, theirs)


def _fit_and_save(place: Place, decay: float | None, folder: Path) -> dict[str, Any]:
    module = Normalised(place.rank)
    averaging = WeightAveraging() if decay is None else EMAWeightAveraging(decay=decay)
    folder = folder / place.strategy
    saving = ModelCheckpoint(folder, monitor="val_loss", save_top_k=-1, filename="{epoch}")
    trainer = place.trainer(max_epochs=3, callbacks=[averaging, saving], enable_checkpointing=True)
    trainer.fit(module, place.shard(), place.shard())
    tested = trainer.test(module, place.shard(), verbose=False)
    saved = {path.name: torch.load(path, weights_only=False)["state_dict"] for path in sorted(folder.iterdir())}
    return {"trained": result_of(trainer, module), "tested": tested, "saved": saved}


@feature(
    _GROUP,
    "`WeightAveraging`, `EMAWeightAveraging`",
    tried="parameters and buffers (BatchNorm) averaged, evaluated, saved in each of three epochs, tested",
    outcome="same bits, in the checkpoints too",
)
@pytest.mark.parametrize("decay", [None, 0.8])
def test_weight_averaging(decay: float | None, tmp_path: Path) -> None:
    ours, theirs = run_both(_fit_and_save, decay, tmp_path)
    assert_same([rank["trained"] for rank in ours], [rank["trained"] for rank in theirs])
    assert ours[0]["tested"] == theirs[0]["tested"]
    assert list(ours[0]["saved"]) == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"]
    torch.testing.assert_close(ours[0]["saved"], theirs[0]["saved"], rtol=0, atol=0)


class _Backbone(Logged):
    """Its backbone is frozen at first. No BatchNorm: it would see other rows in one process."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, network())
        self.backbone = nn.Sequential(self.net.get_submodule("0"), nn.LayerNorm(6))

    def loss(self, batch: Batch) -> Tensor:
        hidden = self.backbone(batch[0])
        self.record("trainable", self.net.get_parameter("0.weight").requires_grad)
        return F.mse_loss(self.net.get_submodule("2")(torch.tanh(hidden)), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@feature(
    _GROUP,
    "`BackboneFinetuning`",
    tried="backbone frozen for an epoch, then trained for two",
    outcome="ranks identical, within 1e-6 of one process",
)
def test_a_backbone_that_is_unfrozen_is_averaged() -> None:
    options: dict[str, Any] = {"max_epochs": 3, "callbacks": [BackboneFinetuning(unfreeze_backbone_at_epoch=1)]}
    ours = fit_under("ring_ddp", _Backbone, **options)
    assert_same(ours, fit_alone(_Backbone, **options), tolerance=1e-6)
    assert [rank.records["trainable"] for rank in ours] == [[False] * 6 + [True] * 12] * 2


@feature(
    _GROUP,
    "`GradientAccumulationScheduler`",
    tried="windows of one, two and four batches in three epochs",
    outcome="same bits",
)
def test_gradient_accumulation_scheduler() -> None:
    ours, theirs = fit_both(Normalised, max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})])
    assert_same(ours, theirs)
    assert ours[0].global_step == 6 + 3 + 2


@feature(
    _GROUP,
    "`ModelPruning`",
    tried="three tenths of the weights after each of two epochs, made permanent",
    outcome="same bits",
)
def test_pruning() -> None:
    pruning = ModelPruning(
        "l1_unstructured", amount=0.3, parameter_names=["weight"], use_lottery_ticket_hypothesis=False
    )
    ours, theirs = fit_both(Normalised, max_epochs=2, callbacks=[pruning])
    assert_same(ours, theirs)
    assert sum((tensor == 0).sum().item() for name, tensor in ours[0].state.items() if name.endswith("weight")) > 20
