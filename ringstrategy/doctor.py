"""What a run would find on this machine: each finding in a sentence, with what to do about it."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

import ringstrategy
from ringstrategy.quantities import format_bytes, format_time
from ringstrategy.self_test import Trial

__all__ = ["Finding", "examine", "judge"]

State = Literal["ok", "note", "broken"]

_SIOCGIFADDR = 0x8915  # netdevice(7)
_FEW_FILES = 1024
_SMALL_SHM = 1024**3
_LAUNCHERS = {
    "torchrun": TorchElasticEnvironment.detect,
    "SLURM": SLURMEnvironment.detect,
    "LSF": LSFEnvironment.detect,
    "MPI": MPIEnvironment.detect,
}


@dataclass(frozen=True)
class Finding:
    """One thing that matters to a run.

    Attributes:
        topic: what it is about, in a word or two.
        state: ``"ok"``; ``"note"`` is worth knowing; ``"broken"`` stops a run.
        text: a sentence or two.
    """

    topic: str
    state: State
    text: str


def examine(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Look at software, devices, launcher, network and limits. Starts nothing and changes nothing.

    Args:
        environ: the variables that launchers and backends read.
    """
    return [*_software(), *_launch(environ), *_network(environ), *_limits(environ)]


def judge(trials: list[Trial]) -> list[Finding]:
    """Say what the self test means for a run.

    Args:
        trials: its outcome.
    """
    findings = []
    for trial in trials:
        what = f"{trial.ranks} rank{'s' * (trial.ranks > 1)} on {trial.device}"
        if trial.error is not None:
            findings.append(Finding("self test", "broken", f"{what}, {trial.collective}: {trial.error}"))
        elif trial.seconds is None:
            text = f"{what} cannot use {trial.collective}: {trial.obstacle}. Gradients take the backend instead."
            findings.append(Finding("self test", "note", text))
        else:
            size, seconds = format_bytes(trial.nbytes), format_time(trial.seconds)
            findings.append(Finding("self test", "ok", f"{what} summed {size} by {trial.collective} in {seconds}."))
    worked = {(trial.device, trial.collective) for trial in trials if trial.seconds is not None}
    if ("cpu", "shared_memory") in worked:
        text = "CPU ranks of one host: shared memory. CPU ranks of several hosts: shared memory and gloo."
    elif ("cpu", "backend") in worked:
        text = "CPU ranks: gloo, also within one host."
    else:
        return findings
    if ("cuda", "backend") in worked:
        text += " CUDA ranks: NCCL."
    return [*findings, Finding("transport", "ok", text)]


# -- software and devices --------------------------------------------------------------------------------------------


def _software() -> Iterator[Finding]:
    names = ("torch", "lightning")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    yield Finding(
        "software", "ok", f"ringstrategy {ringstrategy.__version__}, {versions}, Python {platform.python_version()}."
    )
    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding("backend", "broken", "This torch has no gloo, over which ranks meet. Install another build.")
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Finding("backend", "ok", "gloo: no CUDA device is seen, so ranks compute on the CPU.")
    elif not dist.is_nccl_available():
        text = f"{count} CUDA device(s), but this torch has no NCCL; use accelerator='cpu' or another build of torch."
        yield Finding("backend", "broken", text)
    else:
        text = f"nccl for {count} x {torch.cuda.get_device_name(0)} (one rank each); gloo for accelerator='cpu'."
        yield Finding("backend", "ok", text)


def _launch(environ: Mapping[str, str]) -> Iterator[Finding]:
    found = [name for name, detect in _LAUNCHERS.items() if _holds(detect)]
    if found:
        rank, size = environ.get("RANK", environ.get("SLURM_PROCID")), environ.get("WORLD_SIZE")
        which = f" This is rank {rank}{f' of {size}' if size else ''}." if rank is not None else ""
        yield Finding("launcher", "ok", f"{found[0]} has started this process, and starts the ranks.{which}")
    else:
        yield Finding("launcher", "ok", "Lightning starts the ranks of this host itself.")
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if address is None:
        text = "One host: MASTER_ADDR is not set. For several, set it (and MASTER_PORT, NODE_RANK) or use torchrun."
        yield Finding("hosts", "ok", text)
        return
    node = environ.get("NODE_RANK", environ.get("GROUP_RANK", "0"))
    try:
        resolved = socket.gethostbyname(address)
    except OSError as error:
        yield Finding("hosts", "broken", f"MASTER_ADDR={address} is no address: {error}.")
        return
    yield Finding("hosts", "ok", f"Ranks meet at MASTER_ADDR={address} ({resolved}); this is node {node}.")
    if port is not None:
        yield _port(address, port, first=node == "0")


def _holds(detect: Callable[[], bool]) -> bool:
    try:
        return detect()
    except (ImportError, RuntimeError):  # a launcher's library is there, but not the launcher
        return False


# -- network ---------------------------------------------------------------------------------------------------------


def _port(address: str, port: str, first: bool) -> Finding:
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        return Finding("port", "broken", f"MASTER_PORT={port} is no port; choose a number from 1024 to 65535.")
    if not first:
        return Finding("port", "ok", f"Rank 0 listens at port {port} of {address}.")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", int(port)))
        except OSError as error:
            return Finding(
                "port", "note", f"MASTER_PORT={port} cannot be opened now ({error.strerror}): is a run at it?"
            )
    return Finding("port", "ok", f"MASTER_PORT={port} is free.")


def _network(environ: Mapping[str, str]) -> Iterator[Finding]:
    interfaces = _interfaces()
    try:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
    except OSError as error:
        yield Finding(
            "network", "broken", f"No port of 127.0.0.1 can be opened ({error.strerror}), so no ranks can meet."
        )
    listing = ", ".join(f"{name} ({address or 'no IPv4 address'})" for name, address in interfaces.items())
    yield Finding("interfaces", "ok", f"{listing or 'none'}.")
    for variable, backend in (("GLOO_SOCKET_IFNAME", "gloo"), ("NCCL_SOCKET_IFNAME", "NCCL")):
        wanted = environ.get(variable)
        if wanted is None:
            continue
        # NCCL takes prefixes, with ^ for others than these and = for whole names.
        names = [name for name in wanted.lstrip("^=").split(",") if name]
        unknown = [name for name in names if not any(own.startswith(name) for own in interfaces)]
        if unknown and not wanted.startswith("^"):
            yield Finding(variable, "broken", f"{variable}={wanted}: there is no interface {', '.join(unknown)} here.")
        else:
            yield Finding(variable, "ok", f"{backend} uses {wanted}.")
    if "GLOO_SOCKET_IFNAME" not in environ:
        yield _host_name(socket.gethostname())


def _host_name(name: str) -> Finding:
    try:
        address = socket.gethostbyname(name)
    except OSError:
        text = (
            f"This host's name {name} has no address, so gloo listens on the loopback interface: enough for one host. "
            "For several, set GLOO_SOCKET_IFNAME to the interface that the others reach."
        )
        return Finding("host name", "note", text)
    if address.startswith("127."):
        text = (
            f"This host's name {name} means {address}, which other hosts do not reach: enough for one host. For "
            "several, set GLOO_SOCKET_IFNAME to the interface that the others reach."
        )
        return Finding("host name", "note", text)
    return Finding("host name", "ok", f"gloo listens at {address}, the address of this host's name {name}.")


def _interfaces() -> dict[str, str | None]:
    """IPv4 addresses by the names of interfaces."""
    found: dict[str, str | None] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:
                found[name] = None
            else:
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


# -- limits ----------------------------------------------------------------------------------------------------------


def _limits(environ: Mapping[str, str]) -> Iterator[Finding]:
    yield _threads(environ)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield Finding("locked memory", "ok", "Not limited.")
    else:
        text = (
            f"At most {format_bytes(locked)} may be locked. Buckets are not; NCCL over InfiniBand and pinned batches "
            "need more (ulimit -l unlimited)."
        )
        yield Finding("locked memory", "note" if torch.cuda.is_available() else "ok", text)
    yield _shared_memory()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"A process may have {files} open. A rank needs a few for each other rank, and data loaders one per tensor."
    yield Finding("open files", "note" if files < _FEW_FILES else "ok", text)


def _threads(environ: Mapping[str, str]) -> Finding:
    cores, wanted = len(os.sched_getaffinity(0)), environ.get("OMP_NUM_THREADS")
    quota = _quota()
    usable = f"{cores} core{'s' * (cores != 1)}" + (f", of which a quota allows {quota:.3g}" if quota else "")
    each = (
        "Lightning gives each of several ranks its share"
        if wanted is None
        else f"OMP_NUM_THREADS={wanted} for each rank"
    )
    if quota is not None and quota < cores:
        text = f"{usable}. Programs count cores, not quotas: set OMP_NUM_THREADS to {max(int(quota), 1)} / ranks."
        return Finding("threads", "note", text)
    return Finding("threads", "ok", f"{usable}; {each}.")


def _quota() -> float | None:
    """How many cores the control group of this process may use; None if it says nothing."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("shared memory", "note", f"No /dev/shm ({error.strerror}): data loaders with workers need it.")
    text = (
        f"{format_bytes(free)} free in /dev/shm, which data loaders with workers and NCCL use; buckets do not, their "
        "memory has no name there."
    )
    return Finding("shared memory", "note" if free < _SMALL_SHM else "ok", text)
