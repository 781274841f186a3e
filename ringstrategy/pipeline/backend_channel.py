"""Messages between two ranks on any hosts, by the process group's point-to-point operations.

A message is one or two tensors of bytes, over the control group, which is gloo's:

.. code-block:: text

    prelude, always 512 bytes      │ size of the body │ size of the header │ the header, if it fits      │
    body, if it is not empty       │ tensor 0 │ tensor 1 │ ... │ the header, if it did not fit           │

Tensors on a device are staged through host memory. NCCL would be the wrong road here: one communicator per pair of
ranks carries both directions in one order, so two ranks that both send before they receive would wait for each other.

gloo's operations can be waited for, but neither asked whether they are done nor interrupted. So two threads wait: one
for what was sent, and keeps its memory until then, one for what is to be received. The caller waits for the second
thread, which a failure interrupts.
"""

from __future__ import annotations

import queue
import signal
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.collectives.links import LinkLost, naming
from ringstrategy.pipeline.messages import pack, unpack
from ringstrategy.process_group import RankGroup

__all__ = ["BackendChannel"]

_PRELUDE_BYTES = 512
_TICK_SECONDS = 0.1
_SIZES = struct.Struct("=QQ")  # of the body and of the header
_PRELUDE_TAG, _BODY_TAG = 0x9100, 0x9101  # unlike 0, which others may use in the group


class BackendChannel:
    """Messages to and from another rank; see :class:`~ringstrategy.pipeline.channels.Channel`.

    A group carries one channel between two ranks at a time.

    Args:
        group: the ranks.
        place: the other rank's place in the group.
    """

    def __init__(self, group: RankGroup, place: int) -> None:
        self.bytes_sent = 0
        self._control = group.control
        self._place = place
        self._peer = group.ranks[place]
        self._device = group.device
        self._timeout = group.timeout.total_seconds()
        self._aborted: BaseException | None = None
        self._lost: LinkLost | None = None
        self._asked = 0  # messages that the receiving thread was asked for, less those that were handed out
        self._arrived: queue.SimpleQueue[_Arrived | None] = queue.SimpleQueue()  # None: there will be no more
        self._sending = _Jobs(f"sending-to-{self._peer.rank}", self._lose)
        self._receiving = _Jobs(f"receiving-from-{self._peer.rank}", self._lose)

    def send(self, values: Sequence[Any], tag: str) -> None:
        """Copy the values to host memory, and start sending."""
        self._raise_if_aborted()
        if self._lost is not None:
            raise self._lost
        message = pack(values, tag)
        inline = _SIZES.size + len(message.header) <= _PRELUDE_BYTES
        body_bytes = message.payload_bytes + (0 if inline else len(message.header))
        prelude = bytearray(_PRELUDE_BYTES)
        _SIZES.pack_into(prelude, 0, body_bytes, len(message.header))
        body = torch.empty(body_bytes, dtype=torch.uint8)
        message.write(body[: message.payload_bytes])
        if inline:
            prelude[_SIZES.size : _SIZES.size + len(message.header)] = message.header
        else:
            body.numpy()[message.payload_bytes :] = memoryview(message.header)
        self._start_sending(torch.frombuffer(prelude, dtype=torch.uint8), _PRELUDE_TAG)
        if body_bytes:
            self._start_sending(body, _BODY_TAG)
        self.bytes_sent += message.tensor_bytes

    def receive(self, tag: str) -> list[Any]:
        """Wait for the receiving thread, and copy the values out of its buffer."""
        self._raise_if_aborted()
        if not self._asked:
            self.expect(1)
        try:
            arrived = self._arrived.get(timeout=self._timeout)
        except queue.Empty:
            self._lose(LinkLost(f"it sent nothing within {self._timeout:g} s"))
            arrived = None
        self._raise_if_aborted()
        if arrived is None:
            assert self._lost is not None
            self._arrived.put(None)  # for the next call
            raise self._lost
        self._asked -= 1
        return unpack(arrived.header, arrived.payload, tag, str(self._peer), self._device)

    def expect(self, count: int) -> None:
        """Let ``count`` messages be received in the background."""
        self._asked += count
        for _ in range(count):
            self._receiving.add(self._receive_one)

    def abort(self, error: BaseException) -> None:
        """Make pending and later calls raise ``error``; what is under way stays behind. Safe from any thread."""
        self._aborted = self._aborted or error
        self._arrived.put(None)

    def close(self) -> None:
        """Wait until the peer has received all, unless it is lost or the channel was aborted."""
        for jobs in (self._sending, self._receiving):
            jobs.finish(unless=lambda: self._aborted is not None or self._lost is not None)

    def _start_sending(self, data: Tensor, tag: int) -> None:
        with naming(self._peer):
            work = dist.isend(data, group=self._control, group_dst=self._place, tag=tag)
        self._sending.add(lambda: _wait(work, data))

    def _receive_one(self) -> None:
        prelude = torch.empty(_PRELUDE_BYTES, dtype=torch.uint8)
        self._receive_into(prelude, _PRELUDE_TAG)
        raw = prelude.numpy().data
        body_bytes, header_bytes = _SIZES.unpack_from(raw)
        body = torch.empty(body_bytes, dtype=torch.uint8)
        if body_bytes:
            self._receive_into(body, _BODY_TAG)
        if _SIZES.size + header_bytes <= _PRELUDE_BYTES:
            self._arrived.put(_Arrived(raw[_SIZES.size : _SIZES.size + header_bytes], body))
        else:
            payload_bytes = body_bytes - header_bytes
            self._arrived.put(_Arrived(body.numpy().data[payload_bytes:], body[:payload_bytes]))

    def _receive_into(self, data: Tensor, tag: int) -> None:
        _wait(dist.irecv(data, group=self._control, group_src=self._place, tag=tag), data)

    def _lose(self, error: BaseException) -> None:
        self._lost = LinkLost.told(self._peer, error)
        self._lost.__cause__ = error
        self._arrived.put(None)

    def _raise_if_aborted(self) -> None:
        if self._aborted is not None:
            raise self._aborted


class _Arrived(NamedTuple):
    """A message as it came: both parts lie on the host."""

    header: memoryview
    payload: Tensor


class _Jobs:
    """A thread that does one job after the other, until one fails.

    Args:
        name: of the thread.
        on_error: is told, in the thread, why a job failed.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._on_error = on_error
        # A daemon: one that is stuck in an operation which never ends must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"ringstrategy-{name}", daemon=True)

    def add(self, job: Callable[[], None]) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put(job)

    def finish(self, unless: Callable[[], bool]) -> None:
        """Wait until all jobs are done; give up as soon as ``unless()``. Idempotent."""
        self._jobs.put(None)
        while self._thread.is_alive() and not unless():
            self._thread.join(_TICK_SECONDS)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except Exception as error:
            self._on_error(error)


def _wait(work: dist.Work | None, data: Tensor) -> None:
    """Wait for an operation, which until then needs its ``data``."""
    assert work is not None
    work.wait()
