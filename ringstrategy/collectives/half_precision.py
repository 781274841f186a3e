"""Numbers as 16 bits on their way to another rank: bytes and arithmetic only.

A message holds the part of a buffer that one rank sums, as one rank sees it:

    | factor, 4 bytes | counts, 4 bytes each | values, 2 bytes each | padding |

The values are those of the buffer times a power of two, which brings the largest of them to the top of the 16-bit
format's range; ``factor`` undoes it. That costs no accuracy, and keeps fp16 (whose largest number is 65504) from
overflowing, and from losing small numbers while there is room: it has all its 11 bits for values down to 2^-28 of the
largest, and is off by at most 2^-39 of the largest below. A value that is infinite or no number stays so, and does not
count for the scale.

Rounding to nearest changes a value x by at most u|x|, u being 2^-8 for bf16 and 2^-11 for fp16. Values are rounded
once on the way to the rank that adds them, in fp32, and their sum once on the way back, so that of N ranks' gradients
g, each scaled by 1/N, the sum is off by at most

    u (mean|g| + |mean g|)

whatever N is. (Sums that travel round a ring would be rounded at each of its N - 1 hops.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ringstrategy.collectives.chunks import split

__all__ = ["Compression", "Message", "MessageLayout", "add_into", "decode", "encode", "wire_dtype"]

Compression = Literal["bf16", "fp16"]

_WIRE = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The exponent to which the largest value is brought: rounding up must not leave the format's range.
_TOP = {torch.bfloat16: 126, torch.float16: 14}
_HEADER = 4
_ALIGNMENT = 16
# On CPU this many elements are handled in one go, for they stay in the core's own cache between the passes.
_SEGMENT = 32 * 1024


def wire_dtype(dtype: torch.dtype, compression: Compression) -> torch.dtype | None:
    """In which type numbers travel.

    Args:
        dtype: of the buffer; complex numbers count as pairs.
        compression: what the user asked for.

    Returns:
        A type of 16 bits; the buffer's own where it has 16. None for float64, which is chosen for its digits and
        travels in full.

    Raises:
        TypeError: the buffer holds whole numbers, or numbers of 8 bits.
    """
    if dtype.is_complex:
        dtype = dtype.to_real()
    if dtype in (torch.bfloat16, torch.float16):
        return dtype
    if dtype == torch.float32:
        return _WIRE[compression]
    if dtype == torch.float64:
        return None
    raise TypeError(
        f"compression={compression!r} is for gradients in floating point of 16 bits or more; {dtype} would not survive "
        "it. Use compression=None."
    )


@dataclass(frozen=True, slots=True)
class Message:
    """Views into the bytes of a message.

    Attributes:
        factor: what the values are to be multiplied by, shape (1,), float32.
        counts: what travels in full, float32.
        values: 16 bits each.
    """

    factor: Tensor
    counts: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """How a buffer is divided among ranks, and what their messages look like.

    Attributes:
        numel: elements of the buffer.
        exact: so many at its end travel in full, to everybody.
        ranks: who share the rest.
        dtype: 16 bits.
    """

    numel: int
    exact: int
    ranks: int
    dtype: torch.dtype

    @property
    def shards(self) -> list[tuple[int, int]]:
        """Start and stop of what each rank sums."""
        return split(0, self.numel - self.exact, self.ranks)

    def nbytes(self, counts: bool) -> int:
        """Size of a message with or without counts; the same for all shards, though some are an element longer."""
        longest = -(-(self.numel - self.exact) // self.ranks)
        size = _HEADER + 4 * self.exact * counts + 2 * longest
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def messages(self, memory: Tensor, counts: bool) -> list[Message]:
        """See memory as one message per shard, one after the other.

        Args:
            memory: at least ``ranks * nbytes(counts)`` bytes.
            counts: whether they have counts.
        """
        size = self.nbytes(counts)
        return [
            self._message(memory[rank * size : (rank + 1) * size], stop - start, counts)
            for rank, (start, stop) in enumerate(self.shards)
        ]

    def copies(self, memory: Tensor, rank: int) -> list[Message]:
        """See memory as the messages of all ranks about the shard of one, with counts, one after the other."""
        size, (start, stop) = self.nbytes(counts=True), self.shards[rank]
        return [
            self._message(memory[sender * size : (sender + 1) * size], stop - start, counts=True)
            for sender in range(self.ranks)
        ]

    def _message(self, raw: Tensor, length: int, counts: bool) -> Message:
        values = _HEADER + 4 * self.exact * counts
        return Message(
            raw[:_HEADER].view(torch.float32),
            raw[_HEADER:values].view(torch.float32),
            raw[values : values + 2 * length].view(self.dtype),
        )


def encode(shard: Tensor, message: Message) -> None:
    """Write numbers into a message, rounded to nearest.

    Args:
        shard: of the message's length; float32, or what has the message's own 16 bits and goes as it is.
        message: its counts are left alone.
    """
    values = message.values
    if shard.dtype == values.dtype or not shard.numel():
        values.copy_(shard)
        message.factor.fill_(1.0)
        return
    exponent = torch.frexp(_largest(shard)).exponent  # the largest is below 2^exponent
    shift = (_TOP[values.dtype] + 1 - exponent).clamp_(-126, 126)
    message.factor.copy_(_power_of_two(-shift))
    scale = _power_of_two(shift)
    for part, out in zip(_segments(shard), _segments(values), strict=True):
        torch.mul(part, scale, out=out)


def add_into(total: Tensor, message: Message) -> None:
    """Add a message's values to ``total``, in float32."""
    for part, values in zip(_segments(total), _segments(message.values), strict=True):
        part.add_(values * message.factor)


def decode(message: Message, out: Tensor) -> None:
    """Overwrite ``out`` with a message's values."""
    if out.dtype == message.values.dtype:
        out.copy_(message.values)  # the factor is 1
        return
    for part, values in zip(_segments(out), _segments(message.values), strict=True):
        torch.mul(values, message.factor, out=part)


def _largest(values: Tensor) -> Tensor:
    """The largest finite magnitude, shape (1,), without making the host wait for a GPU."""
    if not values.is_cuda:
        low, high = torch.aminmax(values)
        largest = torch.maximum(-low, high)
        if torch.isfinite(largest):
            return largest.reshape(1)
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0).abs().max().reshape(1)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent from its bits, for exponents from -126 to 127: a power function need not be exact."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def _segments(values: Tensor) -> tuple[Tensor, ...]:
    return (values,) if values.is_cuda else torch.split(values, _SEGMENT)
