from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from frozen_backbone import FrozenBackbone
from image_classifier import ImageClassifier
from synthetic_data import SyntheticDataModule
from torch import Tensor

_DATA: dict[str, Any] = {"images": 16, "batch_size": 8, "channels": 1, "image_size": 8}


class _Snapshots(pl.Callback):
    """All parameters and buffers of the network at the end of every epoch."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Tensor]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, ImageClassifier)
        self.taken.append({name: value.clone() for name, value in pl_module.network.state_dict().items()})


def _fit(folder: Path, epochs: int, model: ImageClassifier, **fit: Any) -> tuple[list[dict[str, Tensor]], pl.Trainer]:
    snapshots = _Snapshots()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        default_root_dir=folder,
        callbacks=[FrozenBackbone(epochs=2), snapshots],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=SyntheticDataModule(**_DATA), **fit)
    return snapshots.taken, trainer


def _changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_the_head_trains_first_and_then_all(tmp_path: Path) -> None:
    model = ImageClassifier(backbone_factor=0.1, schedule="constant", warmup_fraction=0.0)
    start = {name: value.clone() for name, value in model.network.state_dict().items()}
    taken, trainer = _fit(tmp_path, 3, model)
    head = {f"{model.head}.weight", f"{model.head}.bias"}
    assert [_changed(a, b) for a, b in zip([start, taken[0]], taken[:2], strict=True)] == [head, head]
    assert _changed(taken[1], taken[2]) == start.keys()  # with the statistics of BatchNorm
    assert sorted({group["lr"] for group in trainer.optimizers[0].param_groups}) == pytest.approx([3e-4, 3e-3])


def test_a_run_that_goes_on_is_in_the_right_phase(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, trainer = _fit(tmp_path, 3, ImageClassifier())
    trainer.save_checkpoint(tmp_path / "third.ckpt")
    model = ImageClassifier()
    taken, _ = _fit(tmp_path, 4, model, ckpt_path=tmp_path / "third.ckpt")
    assert len(taken) == 1
    saved = torch.load(tmp_path / "third.ckpt", weights_only=True)["state_dict"]
    before = {name.removeprefix("network."): value for name, value in saved.items()}
    assert _changed(before, taken[0]) == before.keys()


def test_a_negative_number_of_epochs_is_refused() -> None:
    with pytest.raises(ValueError, match="epochs must not be negative, got -1"):
        FrozenBackbone(epochs=-1)
