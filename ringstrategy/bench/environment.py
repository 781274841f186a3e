"""What a measurement was made on and with."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import ringstrategy

__all__ = ["command_line", "describe", "in_a_line"]


def describe(command: str) -> dict[str, str | float]:
    """Describe this machine and the software on it, without names of hosts or paths.

    Call it before the measurement: the load is that of the machine as it was found.

    Args:
        command: the command that repeats the measurement.

    Returns:
        What belongs beside every number: versions, processor, usable cores, memory, kernel, load, date,
        command.
    """
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "lightning": version("lightning"),
        "ringstrategy": ringstrategy.__version__,
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_GiB": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": f"{platform.system()} {platform.release()}",
        "load_1min": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
    }


def in_a_line(environment: Mapping[str, str | float]) -> str:
    """What :func:`describe` found, without the command, as it stands below a table."""
    return (
        "{cpu}, {cores} cores, {memory_GiB} GiB, {kernel}; Python {python}, torch {torch}, lightning {lightning},"
        " ringstrategy {ringstrategy}; load before {load_1min}; {date}"
    ).format_map(environment)


def command_line(kind: str, options: Mapping[str, object]) -> str:
    """Write down a command of ``ringstrategy bench``.

    Args:
        kind: what it measures, e.g. ``"train-step"``.
        options: by their names as arguments of the parser; several values become a list with commas.

    Returns:
        The command, e.g. ``"ringstrategy bench train-step --batch-size 32 --strategies ring_ddp,ddp"``.
    """
    words = ["ringstrategy", "bench", kind]
    for name, value in options.items():
        values = value if isinstance(value, (tuple, list)) else (value,)
        words += ["--" + name.replace("_", "-"), ",".join(str(each) for each in values)]
    return " ".join(words)


def _cpu_model() -> str:
    """The processor's name; ``platform.processor()`` is empty on most Linux systems."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
