"""torch's own transformers as the loops over layers that they are; their code also looks at values on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

__all__ = ["FORWARDS"]


def _encode(
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """What ``nn.TransformerEncoder.forward`` computes."""
    if src_key_padding_mask is not None and encoder.use_nested_tensor:
        # Evaluation then packs the rows without padding for all layers at once, and returns zeros for padding.
        raise TraceError(
            "nn.TransformerEncoder cannot be cut if it is given a padding mask and may use nested tensors; make it "
            "with enable_nested_tensor=False"
        )
    causal = _find_out(mask, is_causal)
    for layer in encoder.layers:
        src = layer(src, src_mask=mask, is_causal=causal, src_key_padding_mask=src_key_padding_mask)
    return src if encoder.norm is None else _normed(encoder.norm, src)


def _decode(
    decoder: nn.TransformerDecoder,
    tgt: Tensor,
    memory: Tensor,
    tgt_mask: Tensor | None = None,
    memory_mask: Tensor | None = None,
    tgt_key_padding_mask: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> Tensor:
    """What ``nn.TransformerDecoder.forward`` computes."""
    causal = _find_out(tgt_mask, tgt_is_causal)
    for layer in decoder.layers:
        tgt = layer(
            tgt,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=causal,
            memory_is_causal=memory_is_causal,
        )
    return tgt if decoder.norm is None else _normed(decoder.norm, tgt)


def _transform(
    transformer: nn.Transformer,
    src: Tensor,
    tgt: Tensor,
    src_mask: Tensor | None = None,
    tgt_mask: Tensor | None = None,
    memory_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    tgt_key_padding_mask: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
    src_is_causal: bool | None = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> Any:
    """What ``nn.Transformer.forward`` computes; its layers find out by themselves whether shapes fit."""
    memory = transformer.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal)
    return transformer.decoder(
        tgt,
        memory,
        tgt_mask=tgt_mask,
        memory_mask=memory_mask,
        tgt_key_padding_mask=tgt_key_padding_mask,
        memory_key_padding_mask=memory_key_padding_mask,
        tgt_is_causal=tgt_is_causal,
        memory_is_causal=memory_is_causal,
    )


# By torch's forward: one that computes the same and can be traced.
FORWARDS: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        nn.TransformerEncoder.forward: _encode,
        nn.TransformerDecoder.forward: _decode,
        nn.Transformer.forward: _transform,
    }
)


def _normed(norm: nn.Module, values: Tensor) -> Tensor:
    result: Tensor = norm(values)
    return result


def _find_out(mask: Tensor | None, is_causal: bool | None) -> Any:
    """Whether a mask is causal: as the caller says, else found out at each run."""
    if mask is None or is_causal is not None:
        return is_causal is True
    return _is_causal(mask)


def _is_causal(mask: Tensor) -> bool:
    """Whether an additive or boolean mask hides from each position those after it, and nothing else."""
    length = mask.size(-2)
    if mask.size() != (length, length):
        return False
    if mask.dtype == torch.bool:
        return torch.equal(mask, torch.ones_like(mask).triu(1))
    return torch.equal(
        mask, nn.Transformer.generate_square_subsequent_mask(length, device=mask.device, dtype=mask.dtype)
    )


fx.wrap("_is_causal")
