"""What a message looks like in memory: the bytes of its tensors, and a header that describes all of its values.

.. code-block:: text

    ┌───────────┬─────────┬───────────┬────────────────────────────────┐
    │ tensor 0  │ tensor 1│  tensor 2 │ header: tag, values, layouts   │
    └───────────┴─────────┴───────────┴────────────────────────────────┘
    each begins at a multiple of 64 bytes

A tensor travels as its elements, in the order in which they lie in memory: a dense one keeps its strides, of an
expanded one every element is sent once. What is not an ordinary tensor travels in the header, pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ringstrategy.pipeline.channels import WrongMessage

__all__ = ["Message", "aligned", "pack", "unpack"]

_ALIGNMENT = 64  # of tensors: a cache line, and enough for every dtype


class _Slot(NamedTuple):
    """A tensor among the values of a header.

    Attributes:
        offset: of its first byte in the payload.
        dtype: of its elements.
        shape: of the tensor.
        stored: shape of what is sent: expanded dimensions are 1.
        stride: of both.
        requires_grad: whether the sender's tensor did.
        on_host: whether it belongs to host memory even where the ranks compute on a device.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    on_host: bool

    def find_in(self, payload: Tensor) -> Tensor:
        """The elements in the payload, a ``uint8`` tensor of whole multiples of 64 bytes."""
        stride = self.stride if self.stored == self.shape else _without_zeros(self.stride)
        elements = payload.view(self.dtype)
        start = elements.storage_offset() + self.offset // self.dtype.itemsize
        return elements.as_strided(self.stored, stride, start)


@dataclass(frozen=True, slots=True)
class Message:
    """A message before it is written.

    Attributes:
        header: describes all values.
        payload_bytes: room that the tensors need, a multiple of 64.
        tensor_bytes: bytes of the tensors alone.
        tensors: each with its place.
    """

    header: bytes
    payload_bytes: int
    tensor_bytes: int
    tensors: tuple[tuple[_Slot, Tensor], ...]

    def write(self, payload: Tensor) -> None:
        """Copy the tensors into a ``uint8`` tensor of at least ``payload_bytes`` elements, on any device."""
        for slot, tensor in self.tensors:
            slot.find_in(payload).copy_(tensor)


def pack(values: Sequence[Any], tag: str) -> Message:
    """Describe values and find room for the tensors among them.

    Args:
        values: what to send.
        tag: what the receiver expects.

    Raises:
        TypeError: a value that does not pickle.
    """
    described: list[Any] = []
    tensors: list[tuple[_Slot, Tensor]] = []
    offset = tensor_bytes = 0
    for value in values:
        if not _is_ordinary(value):
            described.append(value)
            continue
        stored = _stored(value)
        shape = tuple(value.shape)
        stored_shape = tuple(stored.shape)
        stride = _dense_strides(stored)
        if stored_shape != shape:
            stride = tuple(s if n == m else 0 for s, n, m in zip(stride, shape, stored_shape, strict=True))
        slot = _Slot(offset, value.dtype, shape, stored_shape, stride, value.requires_grad, value.is_cpu)
        described.append(slot)
        if nbytes := stored.numel() * stored.itemsize:
            tensors.append((slot, stored))
            tensor_bytes += nbytes
            offset += aligned(nbytes)
    try:
        header = pickle.dumps((tag, described), protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError, NotImplementedError) as error:
        kinds = ", ".join(type(value).__name__ for value in described if not isinstance(value, _Slot))
        raise TypeError(f"Message '{tag}' holds a value that does not pickle (of types {kinds}): {error}") from error
    return Message(header, offset, tensor_bytes, tuple(tensors))


def unpack(header: bytes | memoryview, payload: Tensor, tag: str, sender: str, device: torch.device) -> list[Any]:
    """Read a message into new tensors.

    Args:
        header: from :func:`pack`.
        payload: what :meth:`Message.write` filled, on the host or on ``device``.
        tag: what the message must be called.
        sender: who sent it, for the error.
        device: where tensors belong that were on the sender's device.

    Raises:
        WrongMessage: it is called otherwise.
    """
    sent_tag, values = pickle.loads(header)
    if sent_tag != tag:
        raise WrongMessage(
            f"The ranks went different ways: this rank waits for '{tag}' from {sender}, which sent '{sent_tag}'. All "
            "ranks must take the same path; one that alone catches an error, or skips a step, does not."
        )
    for index, slot in enumerate(values):
        if isinstance(slot, _Slot):
            where = torch.device("cpu") if slot.on_host else device
            tensor = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device=where)
            if tensor.numel():
                # Through a detached view, which may be written to although the elements of an expanded one repeat.
                target = tensor.detach()
                if slot.stored != slot.shape:
                    target = target.as_strided(slot.stored, _without_zeros(slot.stride))
                target.copy_(slot.find_in(payload))
            values[index] = tensor.requires_grad_() if slot.requires_grad else tensor
    return list(values)


def aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to where a tensor may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _is_ordinary(value: Any) -> bool:
    """Whether dtype, shape and strides say everything about a tensor; others (sparse, quantised, ...) are pickled."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_nested or value.is_meta)
    )


def _stored(tensor: Tensor) -> Tensor:
    """What is sent of a tensor: each element of an expanded one once, and conjugation carried out."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides without gaps: the tensor's own if it has none."""
    if tensor.is_contiguous():
        return tuple(tensor.stride())
    return tuple(torch.empty_like(tensor, device="meta").stride())


def _without_zeros(stride: tuple[int, ...]) -> tuple[int, ...]:
    """Strides for dimensions of size 1, where any will do."""
    return tuple(s or 1 for s in stride)
