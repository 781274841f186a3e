"""How the code and the commands of a page are run in a test."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from ringstrategy.cli.main import main
from tests.docs.markdown import Block
from tests.helpers.pipelines import Classification, batches, layered
from tests.helpers.scripts import run_script
from tests.helpers.trainers import trainer_on_rank

__all__ = ["STEPS", "TWO_STEPS", "Way", "as_script", "config_only", "execute", "here", "json_files"]

Way = Callable[[str, Path], None]

STEPS = 5  # of an epoch where a block trains
TWO_STEPS = ["--trainer.max_epochs=1", *(f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test"))]

_PROGRAM = "ringstrategy"
# The same as the installed command.
_COMMAND = """
import sys
from ringstrategy.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""


def execute(rank: int, world_size: int, block: Block) -> int:
    """Run a block of Python on one of the ranks: its Trainers are small, a classifier and its batches are there.

    Returns:
        Steps of the last Trainer.
    """

    def small_trainer(*, accelerator: str, devices: int, **options: Any) -> pl.Trainer:
        assert (accelerator, devices) == ("cpu", world_size)
        return trainer_on_rank(rank, world_size, limit_train_batches=STEPS, limit_val_batches=1, **options)

    model, data = Classification(layered(dtype=torch.float32)), batches(*[8] * STEPS, dtype=torch.float32)
    namespace: dict[str, Any] = {"model": model, "data": data, "small_trainer": small_trainer}
    text = block.text.replace("pl.Trainer(", "small_trainer(")
    exec(compile("\n" * (block.line - 1) + text, "a block of the page", "exec"), namespace)
    steps: int = namespace["trainer"].global_step
    return steps


def here(*more: str, keys: tuple[str, ...] = ("environment", "rows")) -> Way:
    """In this process, with more words at the command's end.

    Args:
        *more: the words.
        keys: of the JSON that it writes, if it writes any.
    """

    def run(command: str, folder: Path) -> None:
        program, *words = shlex.split(command)
        assert program == _PROGRAM
        assert main([*words, *more]) == 0
        for file in json_files(command):
            assert tuple(json.loads((folder / file).read_text())) == keys

    return run


def json_files(command: str) -> list[str]:
    """The files that a command writes its results to."""
    return re.findall(r"--json (\S+)", command)


def config_only(command: str, folder: Path) -> None:
    """Up to the config that the run would have: every argument given is in it."""
    _, *words = shlex.split(command)
    output = folder / "config.yaml"
    with output.open("w") as file, contextlib.redirect_stdout(file), pytest.raises(SystemExit) as ended:
        main([*words, "--print_config"])
    assert ended.value.code == 0
    config = pl.core.saving.load_hparams_from_yaml(output)
    for name, value in zip(words[2::2], words[3::2], strict=True):
        place: Any = config
        for part in name.removeprefix("--").split("."):
            # Of a class, arguments may be given without saying that they are those of `__init__`.
            place = place[part] if part in place else place["init_args"][part]
        assert str(place) == value or float(place) == float(value)


def as_script(command: str, *more: str, folder: Path, timeout: float = 100.0) -> str:
    """What the installed command writes, with more words at its end."""
    program, *words = shlex.split(command)
    assert program == _PROGRAM
    ended = run_script(_COMMAND, *words, *more, cwd=folder, timeout=timeout)
    assert ended.returncode == 0, ended
    return ended.stdout
