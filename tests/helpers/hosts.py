"""Two hosts on one machine: network namespaces with a name of their own, joined by a link that can be slow, or cut.

    host-a 10.77.0.1 ──────── link0 ──────── link0 ──────── 10.77.0.2 host-b

Nothing is left of them when the process ends that made them, however it does: a namespace lives as long as a process is
in it, and those that keep them read from a pipe of their maker's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.scripts import RunningScript, start_script

__all__ = ["LINK", "TwoHosts", "enter", "make_hosts", "obstacle_to_hosts", "start_on", "two_hosts"]

_NAMES = ("host-a", "host-b")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "link0"
_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000  # of setns(2)


@dataclass(frozen=True)
class TwoHosts:
    """The hosts, by the processes that keep their namespaces.

    Attributes:
        keepers: a process of each host.
    """

    keepers: tuple[int, int]

    @property
    def address(self) -> str:
        """Where the first host is reached from both."""
        return _ADDRESSES[0]

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """A command that runs on a host."""
        return ["nsenter", "--target", str(self.keepers[host]), "--net", "--uts", *command]

    def bytes_sent(self, host: int) -> int:
        """What a host has sent over the link so far, headers included."""
        counter = ["cat", f"/sys/class/net/{LINK}/statistics/tx_bytes"]
        # The counters shown are those of the namespace in which /sys was mounted.
        script = 'mount -t sysfs none /sys && exec "$@"'
        return int(_run(self.on(host, ["unshare", "--mount", "sh", "-c", script, "sh", *counter])))


@functools.cache
def obstacle_to_hosts() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    missing = [program for program in ("ip", "unshare", "nsenter") if shutil.which(program) is None]
    if missing:
        return f"two hosts on one machine need the programs {', '.join(missing)}"
    try:
        with make_hosts():
            return None
    except (OSError, RuntimeError) as error:
        return f"network namespaces cannot be made here: {error}"


@contextlib.contextmanager
def two_hosts(rate: str | None = None) -> Iterator[TwoHosts]:
    """Make two hosts, or skip the test with the reason why that is not possible.

    Args:
        rate: of the link in each direction, as ``tc`` understands it, e.g. ``"1gbit"``; None does not limit it.
    """
    if obstacle := obstacle_to_hosts():
        pytest.skip(obstacle)
    if rate is not None and shutil.which("tc") is None:
        pytest.skip("a slow link needs the program tc")
    with make_hosts(rate) as hosts:
        yield hosts


@contextlib.contextmanager
def start_on(
    hosts: TwoHosts, host: int, script: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> Iterator[RunningScript]:
    """Start a Python script on a host; see :func:`tests.helpers.scripts.start_script`."""
    program, *options = hosts.on(host, [sys.executable, str(script), *arguments])
    path = shutil.which(program)
    assert path is not None
    with start_script(Path(path), *options, env={"GLOO_SOCKET_IFNAME": LINK, **(env or {})}) as running:
        yield running


def enter(hosts: TwoHosts, host: int) -> None:
    """Move this thread, and what it starts from here on, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, flag in (("net", _CLONE_NEWNET), ("uts", _CLONE_NEWUTS)):
        with open(f"/proc/{hosts.keepers[host]}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), flag):
                raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of {_NAMES[host]}")
    os.environ |= {"GLOO_SOCKET_IFNAME": LINK, "MASTER_ADDR": hosts.address}


@contextlib.contextmanager
def make_hosts(rate: str | None = None) -> Iterator[TwoHosts]:
    """Make two hosts; see :func:`two_hosts`.

    Raises:
        OSError, RuntimeError: that is not possible here.
    """
    with contextlib.ExitStack() as stack:
        keepers = tuple(stack.enter_context(_keeper(name)) for name in _NAMES)
        first, second = map(str, keepers)
        ends = ["name", LINK, "netns", first, "type", "veth", "peer", "name", LINK, "netns", second]
        _run(["ip", "link", "add", *ends])
        hosts = TwoHosts((int(first), int(second)))
        for host, address in enumerate(_ADDRESSES):
            _run(hosts.on(host, ["ip", "addr", "add", f"{address}/24", "dev", LINK]))
            _run(hosts.on(host, ["ip", "link", "set", LINK, "up"]))
            if rate is not None:
                shape = ["tc", "qdisc", "add", "dev", LINK, "root", "tbf", "rate", rate]
                _run(hosts.on(host, [*shape, "burst", "256kb", "latency", "50ms"]))
        yield hosts


@contextlib.contextmanager
def _keeper(name: str) -> Iterator[int]:
    """A process that does nothing in namespaces of its own, until its input ends."""
    script = f"hostname {name} && ip link set lo up && echo ready && exec cat >/dev/null"
    keeper = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    try:
        if keeper.stdout.readline() != "ready\n":
            raise RuntimeError(keeper.stderr.read().strip())
        yield keeper.pid
    finally:
        keeper.communicate()


def _run(command: Sequence[str]) -> str:
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise RuntimeError(re.sub(r"\s+", " ", f"{' '.join(command)}: {completed.stderr}").strip())
    return completed.stdout
