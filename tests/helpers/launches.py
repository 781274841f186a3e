"""Launch :mod:`tests.helpers.launch_script`, and read what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.helpers import launch_script
from tests.helpers.launch_script import Used
from tests.helpers.scripts import Completed

__all__ = ["COMMAND_LINE", "SCRIPT", "assert_clean", "parameters_in", "parameters_of", "torchrun", "used_in"]

SCRIPT = Path(launch_script.__file__)
# For the command `cli`, after the subcommand of LightningCLI; the strategy is still to be named.
COMMAND_LINE = [
    *("--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_epochs=1", "--trainer.logger=false"),
    *("--trainer.enable_checkpointing=false", "--trainer.num_sanity_val_steps=0"),
    *("--trainer.use_distributed_sampler=false", "--trainer.enable_progress_bar=false"),
]


def torchrun(folder: Path) -> Path:
    """The program ``torchrun`` as a script in a folder."""
    script = folder / "torchrun.py"
    script.write_text("from torch.distributed.run import main\n\nmain()\n")
    return script


def assert_clean(completed: Completed) -> None:
    """A script has succeeded, and nothing of it is left."""
    assert completed.returncode == 0, completed
    assert not completed.leftover_pids, completed
    assert "destroy_process_group" not in completed.stderr, completed


def parameters_in(text: str) -> list[str]:
    """What the ranks say of their parameters."""
    return re.findall(r"^parameters (\w+)$", text, re.MULTILINE)


def parameters_of(completed: Completed) -> str:
    """What a successful script says of its parameters, once."""
    assert_clean(completed)
    (parameters,) = parameters_in(completed.stdout)
    return parameters


def used_in(completed: Completed) -> list[Used]:
    """What a successful script says of each use of a trainer on each rank."""
    assert_clean(completed)
    said = re.findall(r"\[.*?\]", completed.stdout)  # of several ranks, at times on one line
    return [Used(*json.loads(one)) for one in said]
