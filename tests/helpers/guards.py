"""What a test must not leave behind in the process that runs pytest."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from tests.helpers.processes import children_of, live_processes

__all__ = ["Snapshot", "leaks_since"]

# Servers of multiprocessing, which live as long as the process that uses them.
_SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
# Set by Lightning and torch in the process that trains; put back after each test, but no fault of the test.
_SET_BY_TRAINING = {
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
}
# Set by pytest while a test runs.
_SET_BY_PYTEST = {"PYTEST_CURRENT_TEST"}


@dataclass(frozen=True)
class Snapshot:
    """What this process holds at one moment.

    Attributes:
        children: live child processes: command line by process id.
        threads: Python threads.
        sockets: open sockets, as ``/proc`` names them.
        shared_memory: names in ``/dev/shm``.
        variables: the environment.
        has_process_group: whether ``torch.distributed`` is initialised.
    """

    children: dict[int, str]
    threads: frozenset[threading.Thread]
    sockets: frozenset[str]
    shared_memory: frozenset[str]
    variables: dict[str, str]
    has_process_group: bool

    @classmethod
    def take(cls) -> Snapshot:
        """The present moment."""
        return cls(
            children={
                child.pid: child.command
                for child in children_of(os.getpid())
                if not any(server in child.command for server in _SERVERS)
            },
            threads=frozenset(threading.enumerate()),
            sockets=frozenset(_open_sockets()),
            shared_memory=frozenset(entry.name for entry in Path("/dev/shm").iterdir()),
            variables=dict(os.environ),
            has_process_group=dist.is_initialized(),
        )

    def leaks_since(self, before: Snapshot) -> list[str]:
        """What is here and was not ``before``, in words."""
        children = {pid: command for pid, command in self.children.items() if pid not in before.children}
        leaks = [f"child process {pid} ({command})" for pid, command in children.items()]
        leaks += [f"thread {thread.name!r}" for thread in self.threads - before.threads]
        leaks += [f"open {socket}" for socket in self.sockets - before.sockets]
        leaks += [
            f"file /dev/shm/{name}"
            for name in self.shared_memory - before.shared_memory
            if not _is_held_elsewhere(name)
        ]
        leaks += [
            f"environment variable {name}: {before.variables.get(name)!r} became {self.variables.get(name)!r}"
            for name in sorted((self.variables.keys() | before.variables.keys()) - _SET_BY_PYTEST - _SET_BY_TRAINING)
            if self.variables.get(name) != before.variables.get(name)
        ]
        if self.has_process_group and not before.has_process_group:
            leaks.append("process group of torch.distributed")
        return leaks

    def restore(self) -> None:
        """Put back what can be, so that one test's leak does not fail the next."""
        for name in (os.environ.keys() | self.variables.keys()) - _SET_BY_PYTEST:
            if name not in self.variables:
                del os.environ[name]
            elif os.environ.get(name) != self.variables[name]:
                os.environ[name] = self.variables[name]
        if dist.is_initialized() and not self.has_process_group:
            dist.destroy_process_group()


def leaks_since(before: Snapshot, patience: float = 2.0) -> list[str]:
    """What this process holds that it did not hold ``before``, once what ends by itself has ended.

    Args:
        before: the snapshot to compare with; the environment and the process group are put back to it.
        patience: seconds that a process, thread or socket on its way out gets.
    """
    deadline = time.monotonic() + patience
    while leaks := Snapshot.take().leaks_since(before):
        gc.collect()  # a socket may hang on a cycle
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    before.restore()
    return leaks


def _open_sockets() -> Iterator[str]:
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if (target := os.readlink(descriptor)).startswith("socket:"):
                yield target


def _is_held_elsewhere(name: str) -> bool:
    """Whether a live process that has nothing to do with us has this shared memory mapped or open.

    Told by its inode: a named semaphore is mapped under the temporary name that it was made with.
    """
    try:
        inode = Path(f"/dev/shm/{name}").stat().st_ino
    except FileNotFoundError:
        return True  # it was, and is gone
    ours = {os.getpid(), *(child.pid for child in children_of(os.getpid()))}
    return any(inode in _shared_memory_of(process.pid) for process in live_processes() if process.pid not in ours)


def _shared_memory_of(pid: int) -> Iterator[int]:
    """The inodes in ``/dev/shm`` that a process has mapped or open."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/dev/shm/" in line:
                yield int(line.split()[4])
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(descriptor).startswith("/dev/shm/"):
                    yield descriptor.stat().st_ino
