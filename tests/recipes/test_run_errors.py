"""``ringstrategy run`` in this process and without a strategy: what it says when something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringstrategy.cli.main import main
from tests.recipes.image_files import write_pictures
from tests.recipes.recipe_runs import SMALL, TINY, TWO_STEPS


def _here(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status."""
    monkeypatch.chdir(folder)
    alone = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto")
    return main(["run", *arguments, *alone, *TWO_STEPS])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cifar10_resnet18"], "FileNotFoundError: CIFAR-10 is not complete: cifar-10-batches-py/data_batch_1, "),
        (["imagefolder_resnet50"], "FileNotFoundError: no folder train and no folder val in "),
        (["finetune_efficientnet"], "FileNotFoundError: there are no weights in "),
        (["digits", "--model.network=resnet19"], "ValueError: unknown network 'resnet19'"),
        (["digits", "--model.num_classes=9"], "ValueError: the images have num_classes=10, the model 9"),
    ],
)
def test_an_error_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _here(tmp_path, monkeypatch, *arguments) == 1
    told = capsys.readouterr().err
    assert f"ringstrategy run: {message}" in told
    assert "Traceback" not in told


def test_with_debug_an_error_has_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="CIFAR-10 is not complete"):
        _here(tmp_path, monkeypatch, "cifar10_resnet18", "--debug")


def test_a_corrupt_picture_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(tmp_path / "data" / "pictures")
    corrupt = tmp_path / "data" / "pictures" / "val" / "cat" / "1.JPEG"
    corrupt.write_bytes(corrupt.read_bytes()[:200])
    name = "imagefolder_resnet50"
    assert _here(tmp_path, monkeypatch, name, *TINY[name], *SMALL[name]) == 1
    told = capsys.readouterr().err
    assert "ringstrategy run: OSError: data/pictures/val/cat/1.JPEG is no picture that can be read" in told


def test_made_up_images_stand_in_for_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = ("--data=synthetic_data.SyntheticDataModule", "--data.num_classes=10", "--data.batch_size=4")
    assert _here(tmp_path, monkeypatch, "cifar10_resnet18", *made_up, *SMALL["cifar10_resnet18"]) == 0
    assert (tmp_path / "runs" / "cifar10_resnet18" / "version_0" / "summary.json").is_file()


@pytest.mark.parametrize("told", ["", "rank 1 failed first (train, step 3): "])
def test_the_traceback_of_a_process_that_loads_data_is_left_out(
    told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        text = "Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File ..."
        raise OSError(f"{told}{text}\nOSError: 3.JPEG is no picture\n")

    monkeypatch.setattr("ringstrategy.cli.recipes.recipes_folder", fail)
    assert main(["recipes"]) == 1
    expected = f"OSError: {told}OSError: 3.JPEG is no picture" if told else "OSError: 3.JPEG is no picture"
    assert capsys.readouterr().err == f"ringstrategy recipes: {expected} (--debug shows where)\n"
