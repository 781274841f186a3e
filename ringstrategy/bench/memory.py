"""Peak memory of this process, with shared pages counted in proportion."""

from __future__ import annotations

import threading
from pathlib import Path

__all__ = ["PeakPss"]

_ROLLUP = Path("/proc/self/smaps_rollup")
_COUNTED = ("Pss_Anon:", "Pss_Shmem:")


class PeakPss:
    """Samples this process's proportional set size in a background thread and keeps the largest.

    PSS divides each page by the number of processes that map it, so that a segment shared by two ranks counts once,
    not twice. Pages of program files are left out: this process's share of them depends on what else runs on the
    machine. Reading it makes the kernel walk the page tables, which would disturb a measurement of time: run the
    sampler beside steps that are not timed.

    Args:
        interval_s: pause between two samples.

    Attributes:
        mebibytes: the largest PSS seen so far, in MiB.
    """

    def __init__(self, interval_s: float = 0.005) -> None:
        self.mebibytes = 0.0
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Sample from now on."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="peak-pss", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling; the thread has ended when this returns. Idempotent."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            self.mebibytes = max(self.mebibytes, _pss_mebibytes())
            if self._stop.wait(self._interval_s):
                return


def _pss_mebibytes() -> float:
    kibibytes = [int(line.split()[1]) for line in _ROLLUP.read_text().splitlines() if line.startswith(_COUNTED)]
    if len(kibibytes) != len(_COUNTED):
        raise RuntimeError(f"{_ROLLUP} has no lines {' and '.join(_COUNTED)}; peak memory needs Linux 5.4 or later")
    return sum(kibibytes) / 1024
