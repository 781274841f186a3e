"""The guards around every test see what a test leaves behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.guards import Snapshot, leaks_since
from tests.helpers.scripts import run_script


@contextmanager
def _process() -> Iterator[str]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield rf"child process {process.pid} \(sleep 600\)"
        process.kill()


@contextmanager
def _thread(daemon: bool = False) -> Iterator[str]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten", daemon=daemon)
    thread.start()
    yield "thread 'forgotten'"
    stop.set()
    thread.join()


def _daemon_thread() -> AbstractContextManager[str]:
    return _thread(daemon=True)


@contextmanager
def _socket() -> Iterator[str]:
    with socket.socket(socket.AF_UNIX) as opened:
        yield rf"open socket:\[{os.fstat(opened.fileno()).st_ino}\]"


@contextmanager
def _shared_memory() -> Iterator[str]:
    path = Path(f"/dev/shm/forgotten-{os.getpid()}")
    path.touch()
    yield f"file {path}"
    path.unlink()


@contextmanager
def _variable() -> Iterator[str]:
    os.environ["FORGOTTEN"] = "1"
    yield "environment variable FORGOTTEN: None became '1'"
    assert "FORGOTTEN" not in os.environ


@contextmanager
def _process_group() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    yield r"process group of torch\.distributed"
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "make", [_process, _thread, _daemon_thread, _socket, _shared_memory, _variable, _process_group]
)
def test_each_kind_of_leak_is_seen_and_its_end_as_well(make: Callable[[], AbstractContextManager[str]]) -> None:
    before = Snapshot.take()
    with make() as pattern:
        seen = leaks_since(before, patience=0.0)
        assert any(re.fullmatch(pattern, leak) for leak in seen), seen
    assert leaks_since(before) == []


HOLDER = """
import multiprocessing, sys, time
held = open(sys.argv[1], "w") if len(sys.argv) > 1 else multiprocessing.get_context("spawn").Semaphore()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["file", "semaphore"])
def test_shared_memory_that_a_foreign_process_holds_is_no_leak(kind: str) -> None:
    before = Snapshot.take()
    path = Path(f"/dev/shm/foreign-{os.getpid()}")
    # The shell starts the holder and ends, so that it is no child of ours.
    command = [sys.executable, "-c", HOLDER, *([str(path)] if kind == "file" else [])]
    shell = f"{shlex.join(command)} & echo $!"
    with subprocess.Popen(
        ["bash", "-c", shell], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as started:
        assert started.stdout is not None
        holder = int(started.stdout.readline())
        assert started.stdout.readline() == "ready\n"
    try:
        assert Snapshot.take().shared_memory - before.shared_memory
        assert leaks_since(before) == []
    finally:
        os.kill(holder, signal.SIGKILL)
        path.unlink(missing_ok=True)


def test_a_thread_on_its_way_out_is_waited_for() -> None:
    before = Snapshot.take()
    timer = threading.Timer(0.3, lambda: None)
    timer.start()
    assert leaks_since(before) == []


def test_variables_that_training_sets_are_put_back_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    before = Snapshot.take()
    os.environ["MASTER_PORT"] = "2"
    os.environ["PL_GLOBAL_SEED"] = "3"
    assert leaks_since(before) == []
    assert os.environ["MASTER_PORT"] == "1"
    assert "PL_GLOBAL_SEED" not in os.environ


@pytest.mark.slow
def test_a_test_that_leaks_fails_and_the_next_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "test_leak.py").write_text(
        "import os\n"
        "from tests.conftest import nothing_is_left_behind\n"
        "def test_leaks(): os.environ['FORGOTTEN'] = '1'\n"
        "def test_does_not(): assert 'FORGOTTEN' not in os.environ\n"
    )
    ended = run_script(
        "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))", "-p", "no:cacheprovider", str(tmp_path)
    )
    assert "the test left behind: environment variable FORGOTTEN: None became '1'" in ended.stdout
    assert "2 passed, 1 error" in ended.stdout, ended
