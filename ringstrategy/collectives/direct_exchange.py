"""All-reduce with half the bytes on the wire: numbers travel in 16 bits and are added in 32.

Each rank sums one shard of the buffer. Shards go straight to the rank that sums them (all-to-all), in 16 bits; it adds
them in fp32, in the order of the ranks, rounds the sum once, and hands it to everybody (all-gather):

                 rank 0               rank 1               rank 2
                 A0  B0  C0           A1  B1  C1           A2  B2  C2           the buffer, fp32
    all-to-all   A0  A1  A2           B0  B1  B2           C0  C1  C2           16 bits
    add          A = A0 + A1 + A2     B = B0 + B1 + B2     C = C0 + C1 + C2     fp32
    all-gather   A   B   C            A   B   C            A   B   C            16 bits

On CPU a buffer is cut into segments, so that numbers of one are rounded and added while another is on the wire.

Each rank sends N - 1 messages of 1/N of the buffer twice, as in a ring, each number in half the bytes. In a ring every
hop would have to round its partial sum; here nothing is rounded more often with more ranks. Everybody, the rank that
summed it included, takes the rounded sum: all ranks end with the same bits.

:mod:`ringstrategy.collectives.half_precision` says how a message looks, and why neither large nor small numbers are
lost.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.collectives.chunks import segments
from ringstrategy.collectives.half_precision import (
    Compression,
    MessageLayout,
    add_into,
    decode,
    encode,
    wire_dtype,
)

__all__ = ["DirectExchange"]

# The same under the name it has from torch 2.14 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class DirectExchange:
    """The exchange itself, in the thread that calls it.

    Args:
        process_group: the ranks, on whose device buffers live.
        device: that device.
        compression: the type in which float32 travels.
        join: waits for an operation of the process group. By default, as the backend does.
        segment_bytes: most bytes of a buffer that are rounded in one go.

    Attributes:
        bytes_sent: bytes of messages handed to other ranks so far.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        device: torch.device,
        compression: Compression,
        join: Callable[[dist.Work], object] = dist.Work.wait,
        segment_bytes: int | None = None,
    ) -> None:
        self.bytes_sent = 0
        self._process_group = process_group
        self._rank, self._ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._compression: Compression = compression
        self._join = join
        self._segment_bytes = segment_bytes
        self._outgoing, self._incoming = (torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2))
        self._total = torch.empty(0, dtype=torch.float32, device=device)

    def check(self, dtype: torch.dtype) -> None:
        """Refuse what cannot travel.

        Raises:
            TypeError: the type holds whole numbers, or numbers of 8 bits.
        """
        wire_dtype(dtype, self._compression)

    @torch.no_grad()
    def all_reduce(self, buffer: Tensor, exact: int = 0) -> None:
        """Sum a buffer over the ranks, in place. Every rank calls it with the same length, dtype and ``exact``.

        Args:
            buffer: contiguous and one-dimensional.
            exact: so many elements at its end are counts, which travel in 32 bits.
        """
        if buffer.is_complex():
            buffer, exact = torch.view_as_real(buffer).view(-1), 2 * exact
        dtype = wire_dtype(buffer.dtype, self._compression)
        if dtype is None:
            self._finish(dist.all_reduce(buffer, group=self._process_group, async_op=True))
            self.bytes_sent += 2 * (self._ranks - 1) * buffer.nbytes // self._ranks
            return
        # A version counter of its own: autograd need not see these writes.
        parts = self._cut(buffer.detach(), exact, dtype)
        # Every rank starts the same operations in the same order; while one is under way, the next is made ready.
        works = [self._send_shards(part) for part in parts]
        for index, part in enumerate(parts):
            self._finish(works[index])
            works[index] = self._send_sum(part)
        for work, part in zip(works, parts, strict=True):
            self._finish(work)
            for shard, message in zip(part.shards, part.layout.messages(part.incoming, counts=False), strict=True):
                decode(message, shard)

    def _cut(self, buffer: Tensor, exact: int, dtype: torch.dtype) -> list[_Part]:
        """Segments of a buffer, each with room for its messages; the counts go with the last one."""
        body = buffer.numel() - exact
        longest = max(1, self._segment_bytes // buffer.element_size()) if self._segment_bytes else max(body, 1)
        cuts = segments(0, 1, body, longest) or [(0, 0)]
        layouts = [
            MessageLayout(
                stop - start + (exact if stop == body else 0), exact if stop == body else 0, self._ranks, dtype
            )
            for start, stop in cuts
        ]
        sizes = [self._ranks * layout.nbytes(counts=True) for layout in layouts]
        if self._outgoing.numel() < sum(sizes):
            self._outgoing, self._incoming = (self._outgoing.new_empty(sum(sizes)) for _ in range(2))
        numel = max(-(-longest // self._ranks), exact)
        if self._total.numel() < numel:
            self._total = self._total.new_empty(numel)
        rooms = zip(*(torch.split(room[: sum(sizes)], sizes) for room in (self._outgoing, self._incoming)), strict=True)
        return [
            _Part(buffer[start : start + layout.numel], layout, outgoing, incoming)
            for (start, _), layout, (outgoing, incoming) in zip(cuts, layouts, rooms, strict=True)
        ]

    def _send_shards(self, part: _Part) -> dist.Work | None:
        """Start handing each rank the shard that it sums, and everybody the counts."""
        for shard, message in zip(part.shards, part.layout.messages(part.outgoing, counts=True), strict=True):
            encode(shard, message)
            message.counts.copy_(part.counts)
        return self._start(dist.all_to_all_single, part.incoming, part.outgoing)

    def _send_sum(self, part: _Part) -> dist.Work | None:
        """Sum what has arrived, and start handing the sum to everybody."""
        layout, received = part.layout, part.layout.copies(part.incoming, self._rank)
        total = self._total[: part.shards[self._rank].numel()].zero_()
        for message in received:
            add_into(total, message)
        (mine,) = MessageLayout(total.numel(), 0, 1, layout.dtype).messages(part.outgoing, counts=False)
        encode(total if part.counts.dtype == torch.float32 else total.to(part.counts.dtype), mine)
        counts = self._total[: layout.exact].zero_()
        for message in received:
            counts.add_(message.counts)
        part.counts.copy_(counts)
        size = layout.nbytes(counts=False)
        return self._start(_all_gather, part.incoming[: self._ranks * size], part.outgoing[:size])

    def _start(self, operation: Callable[..., dist.Work | None], output: Tensor, messages: Tensor) -> dist.Work | None:
        self.bytes_sent += (self._ranks - 1) * (output.numel() // self._ranks)
        # As whole numbers of 8 bits, which every backend moves as they are.
        return operation(output, messages, group=self._process_group, async_op=True)

    def _finish(self, work: dist.Work | None) -> None:
        assert work is not None
        self._join(work)


class _Part:
    """A segment of a buffer, and the memory for its messages.

    Args:
        values: the segment, counts included.
        layout: of its messages.
        outgoing: one message per rank.
        incoming: likewise.
    """

    def __init__(self, values: Tensor, layout: MessageLayout, outgoing: Tensor, incoming: Tensor) -> None:
        self.layout, self.outgoing, self.incoming = layout, outgoing, incoming
        self.shards = [values[start:stop] for start, stop in layout.shards]
        self.counts = values[layout.numel - layout.exact :]
