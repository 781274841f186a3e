"""``ringstrategy predict``: the checkpoint of a run alone, and pictures of any kind."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import numpy
import pytest
import torch
from digits_data import DigitsDataModule, split_digits
from image_classifier import ImageClassifier
from lightning.pytorch.demos.boring_classes import BoringModel
from PIL import Image
from predict import contact_sheet, load_model, predict
from sklearn.datasets import load_digits

from ringstrategy.cli.main import main
from tests.recipes.image_files import write_digit


def _trainer(folder: Path) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        limit_val_batches=0,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of a short training and some test images as pictures."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    trainer = _trainer(folder)
    trainer.fit(ImageClassifier(), datamodule=DigitsDataModule())
    trainer.save_checkpoint(folder / "digits.ckpt")
    digits = load_digits()
    for index in split_digits(torch.from_numpy(digits.target), seed=0).test[:30].tolist():
        write_digit(folder / f"{digits.target[index]}-{index}.png", digits.images[index])
    return folder


def _pictures(run: Path) -> list[Path]:
    return sorted(run.glob("*-*.png"))


def test_a_picture_gets_the_answer_of_its_image(run: Path) -> None:
    model, form = load_model(run / "digits.ckpt")
    data = DigitsDataModule()
    data.setup("test")
    pictures = _pictures(run)
    predictions = [predict(model, form, path, top=3) for path in pictures]
    right = sum(each.answers[0][0] == each.path.name[0] for each in predictions)
    assert right >= 25
    positions = split_digits(torch.from_numpy(load_digits().target), seed=0).test.tolist()
    for each in predictions[:5]:
        image, _ = data.test_images[positions.index(int(each.path.stem.partition("-")[2]))]
        probabilities = model(image.unsqueeze(0)).softmax(dim=1)[0]
        # A picture has 256 greys, the scans 17.
        assert each.answers[0][1] == pytest.approx(probabilities.max().item(), abs=0.02)
        assert [share for _, share in each.answers] == sorted((share for _, share in each.answers), reverse=True)


def test_the_command_prints_a_row_per_picture_and_draws(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = _pictures(run)[:5]
    words = ["predict", str(run / "digits.ckpt"), *map(str, pictures), "--plot", str(tmp_path / "sheet.png")]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.count("%") == 5
    assert all(path.name in shown for path in pictures)
    width, height = Image.open(tmp_path / "sheet.png").size
    assert width > height > 100


def test_pictures_of_other_sizes_and_colours_are_prepared(run: Path, tmp_path: Path) -> None:
    (path,) = _pictures(run)[:1]
    grey = Image.open(path)
    large = grey.resize((16, 16), Image.Resampling.NEAREST)
    model, form = load_model(run / "digits.ckpt")
    expected = predict(model, form, path).answers[0]
    deep = Image.fromarray(numpy.array(grey).astype(numpy.uint16) * 256)
    others = {"rgb": grey.convert("RGB"), "rgba": grey.convert("RGBA"), "deep": deep, "large": large}
    for name, picture in others.items():
        picture.save(tmp_path / f"{name}.png")
        found = predict(model, form, tmp_path / f"{name}.png").answers[0]
        assert found[0] == expected[0]
        assert found[1] == pytest.approx(expected[1], abs=0.1)


def test_a_picture_that_cannot_be_read_is_named_and_the_others_classified(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(_pictures(run)[0].read_bytes()[:60])
    assert main(["predict", str(run / "digits.ckpt"), str(broken), "none.png", str(_pictures(run)[0])]) == 1
    told = capsys.readouterr()
    assert f"{broken} is no picture that can be read" in told.err
    assert "there is no picture none.png" in told.err
    assert told.out.count("%") == 1


def test_what_is_no_checkpoint_of_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    other = _trainer(tmp_path)
    other.fit(BoringModel(), BoringModel().train_dataloader())
    other.save_checkpoint(tmp_path / "other.ckpt")
    for name, message in (
        ("none.ckpt", "FileNotFoundError: there is no checkpoint"),
        ("text.ckpt", "text.ckpt is no checkpoint of an image classifier's run"),
        ("other.ckpt", "other.ckpt is no checkpoint of an image classifier's run"),
    ):
        assert main(["predict", str(tmp_path / name), "picture.png"]) == 1
        told = capsys.readouterr().err
        assert message in told
        assert "Traceback" not in told


def test_a_contact_sheet_has_a_place_for_every_picture(run: Path) -> None:
    model, form = load_model(run / "digits.ckpt")
    figure = contact_sheet([predict(model, form, path) for path in _pictures(run)[:7]])
    titles = [axes.get_title() for axes in figure.axes]
    assert [bool(title) for title in titles] == [True] * 7 + [False]
    assert all("%" in title for title in titles[:7])
