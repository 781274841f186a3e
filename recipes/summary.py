"""What a run came to: a table for the reader, a JSON file for programs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

__all__ = ["Summary"]


@dataclass(frozen=True)
class Summary:
    """The outcome of a run; ``None`` stands for what was not measured.

    Attributes:
        test_accuracy: share of test images classified right, in [0, 1].
        samples_per_s: training samples per second of the whole run, without start-up and validation.
        ranks: number of processes that trained.
        communication_share: share of the training time in which a rank waited for others, in [0, 1].
        checkpoint: absolute path of the best checkpoint, which is the one that was tested.
    """

    test_accuracy: float | None
    samples_per_s: float | None
    ranks: int
    communication_share: float | None
    checkpoint: str | None

    def write(self, path: Path) -> None:
        """Write the fields as one JSON object. A folder that is missing is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def table(self) -> Table:
        """The fields for the terminal; the checkpoint as seen from the current directory."""
        table = Table(title="Summary", show_header=False, title_justify="left")
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("test accuracy", _format(self.test_accuracy, ".4f"))
        table.add_row("samples/s", _format(self.samples_per_s, ",.0f"))
        table.add_row("ranks", str(self.ranks))
        table.add_row("waiting for others", _format(self.communication_share, ".1%"))
        table.add_row("best checkpoint", os.path.relpath(self.checkpoint) if self.checkpoint else "not saved")
        return table


def _format(value: float | None, spec: str) -> str:
    return "not measured" if value is None else format(value, spec)
