"""Programs and blocks for a shell that a page shows, run as its reader would."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.docs.markdown import blocks
from tests.helpers.scripts import ROOT
from tests.helpers.trainers import trainer_on_rank

__all__ = ["patched", "programs", "run_program", "terminal"]


def programs(page: Path) -> dict[str, str]:
    """The blocks of Python that begin with the name of a file, by that name."""
    named = {}
    for block in blocks(page):
        if block.language == "python" and (name := re.match(r"# (\w+\.py)\n", block.text)):
            named[name[1]] = block.text
    return named


def patched(text: str, patch: str) -> str:
    """A program with the lines of a block of language ``diff`` exchanged."""
    changed = re.findall(r"^-(.*)\n\+(.*)$", patch, re.MULTILINE)
    assert changed
    for old, new in changed:
        assert text.count(f"{old}\n") == 1, old
        text = text.replace(f"{old}\n", f"{new}\n")
    return text


def run_program(rank: int, world_size: int, text: str, folder: Path, **options: Any) -> dict[str, float]:
    """Run a program on one of the ranks that exist already, where its Trainer would have started them.

    Args:
        rank: this rank.
        world_size: ranks that the program asks for.
        text: the program.
        folder: to run in; what it imports may lie there.
        **options: of the Trainer, over those of the program.

    Returns:
        What the last Trainer has logged.
    """
    trainers: list[pl.Trainer] = []

    def make(*, accelerator: str, devices: int, **own: Any) -> pl.Trainer:
        assert (accelerator, devices) == ("cpu", world_size)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(pl, "Trainer", lightnings)
            trainers.append(trainer_on_rank(rank, world_size, **({"use_distributed_sampler": True} | own | options)))
        return trainers[-1]

    lightnings = pl.Trainer
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "Trainer", make)
        exec(compile(text, "program.py", "exec"), {"__name__": "__main__"})
    return {name: value.item() for name, value in trainers[-1].callback_metrics.items()}


def terminal(folder: Path, *more: str, stand_ins: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables with which a shell finds the commands of the pages.

    Args:
        folder: the commands are put into its folder ``bin``.
        *more: words at the end of every ``ringstrategy run``, however it is started.
        stand_ins: further commands, by name: Python's text.

    Returns:
        The variables.
    """
    bin = folder / "bin"
    bin.mkdir()
    run = 'case "$*" in *"ringstrategy.cli.main run"*) set -- "$@" $RUN_MORE;; esac\n'
    commands = {
        "python": f'{run}exec {sys.executable} "$@"\n',
        "torchrun": f'{run}exec {sys.executable} -m torch.distributed.run "$@"\n',
        "ringstrategy": f'exec {bin}/python -m ringstrategy.cli.main "$@"\n',
    }
    for name, text in commands.items():
        (bin / name).write_text(f"#!/bin/sh\n{text}")
    for name, text in (stand_ins or {}).items():
        (bin / name).write_text(f"#!{sys.executable}\n{text}")
    for command in bin.iterdir():
        command.chmod(0o755)
    return {"PATH": f"{bin}:{os.environ['PATH']}", "RUN_MORE": " ".join(more), "PYTHONPATH": str(ROOT)}
