"""Run a script as a user would, in a session of its own, and see what is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.processes import Family, LiveProcess

__all__ = ["Completed", "RunningScript", "run_script", "start_script"]

ROOT = Path(__file__).resolve().parents[2]
# What an outer launcher or an earlier test may have set and a script must not see.
_LAUNCH_VARIABLES = {
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
}


@dataclass(frozen=True)
class Completed:
    """How a script ended.

    Attributes:
        returncode: exit status of the process that was started; negative for a signal, ``None`` if it had to be killed.
        stdout: what all its processes wrote there.
        stderr: likewise; after a timeout with the stacks of every Python process.
        leftover_pids: its processes that outlived it (they have been killed since).
        seconds: how long the process ran that was started.
    """

    returncode: int | None
    stdout: str
    stderr: str
    leftover_pids: tuple[int, ...]
    seconds: float

    @property
    def timed_out(self) -> bool:
        """Whether the script had to be killed."""
        return self.returncode is None

    def __str__(self) -> str:
        return (
            f"exit status {self.returncode} after {self.seconds:.1f} s, left behind: {list(self.leftover_pids)}\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


class RunningScript:
    """A script under way; see :func:`start_script`."""

    def __init__(self, command: Sequence[str], folder: Path, environ: Mapping[str, str], cwd: Path) -> None:
        # Files, not pipes: a process that is left behind would hold a pipe open for ever.
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        self._began = time.monotonic()
        mark = ("SCRIPT_UNDER_TEST", uuid.uuid4().hex)
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**environ, mark[0]: mark[1]},
                cwd=cwd,
                start_new_session=True,
            )
        self._family = Family(self._process.pid, "=".join(mark))

    @property
    def pid(self) -> int:
        """The process that was started."""
        return self._process.pid

    @property
    def stdout(self) -> str:
        """What has been written so far."""
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What has been written so far."""
        return self._stderr.read_text(errors="replace")

    def processes(self) -> list[LiveProcess]:
        """The live processes that it has become."""
        return self._family.alive()

    def wait_for(self, text: str, timeout: float = 60.0) -> None:
        """Wait until ``text`` stands in stdout or stderr.

        Raises:
            AssertionError: it did not appear in time, or the script ended without it.
        """
        deadline = time.monotonic() + timeout
        while text not in self.stdout and text not in self.stderr:
            ended = self._process.poll() is not None and text not in self.stdout and text not in self.stderr
            if ended or time.monotonic() > deadline:
                raise AssertionError(
                    f"{text!r} was not written {'before the script ended' if ended else f'within {timeout:g} s'}\n"
                    f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
                )
            time.sleep(0.02)

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the process that was started, and to no other."""
        self._process.send_signal(signum)

    def finish(self, timeout: float = 60.0, grace: float = 10.0) -> Completed:
        """Wait for the end, look for processes that outlive it, and kill them.

        Args:
            timeout: seconds the process that was started may still run; then every process shows its stacks and is
                killed.
            grace: seconds that its children get to end after it.
        """
        returncode: int | None
        try:
            returncode = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            returncode = None
        seconds = time.monotonic() - self._began
        left = self._family.wait_until_gone(0.0 if returncode is None else grace)
        if returncode is None:
            self._family.send(signal.SIGABRT)  # faulthandler answers with the stacks of all threads
            self._family.wait_until_gone(2.0)
        self.kill()
        return Completed(returncode, self.stdout, self.stderr, tuple(process.pid for process in left), seconds)

    def kill(self) -> None:
        """End all its processes at once, and wait until they have ended: a signal takes its time."""
        self._family.send(signal.SIGKILL)
        self._process.wait()
        self._family.wait_until_gone(5.0)


@contextlib.contextmanager
def start_script(
    script: str | Path, *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[RunningScript]:
    """Start a Python script in a new session; whatever runs of it is killed at the end of the ``with`` block.

    Args:
        script: source text, or the path of a file, or of a program to be run as it is if it does not end in ``.py``.
        *args: its command line.
        env: variables to set besides the caller's; a script has one thread unless this says otherwise.
        cwd: folder to run in, by default a temporary one.
    """
    with tempfile.TemporaryDirectory(prefix="script-") as name:
        folder = Path(name)
        if isinstance(script, str):
            path = folder / "script.py"
            path.write_text(textwrap.dedent(script))
        else:
            path = script.absolute()
        environ = {key: value for key, value in os.environ.items() if key not in _LAUNCH_VARIABLES}
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
        # The package and the helpers are importable from everywhere, installed or not.
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
        environ |= env or {}
        command = [sys.executable, str(path), *args] if path.suffix == ".py" else [str(path), *args]
        running = RunningScript(command, folder, environ, cwd or folder)
        try:
            yield running
        finally:
            running.kill()


def run_script(
    script: str | Path,
    *args: str,
    timeout: float = 60.0,
    grace: float = 10.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Completed:
    """Run a Python script to its end; see :func:`start_script` and :meth:`RunningScript.finish` for the arguments."""
    with start_script(script, *args, env=env, cwd=cwd) as running:
        return running.finish(timeout, grace)
