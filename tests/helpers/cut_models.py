"""Modules that are not easy to cut: what a forward may do."""

from __future__ import annotations

import math
import random
from collections import OrderedDict, namedtuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = [
    "Arguments",
    "Brancher",
    "Branches",
    "ChangesInput",
    "Checkpoints",
    "Contexts",
    "Convolutions",
    "Counts",
    "Detections",
    "Double",
    "InPlace",
    "OwnParameters",
    "Reentrant",
    "Reused",
    "Skips",
    "SkipsAtRandom",
    "Structures",
    "Tied",
    "Transformer",
    "Views",
]

Detections = namedtuple("Detections", ["boxes", "scores"])


class Skips(nn.Module):
    """Values that live across several cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        early = self.layers[0](x)
        h = torch.relu(early)
        for layer in self.layers[1:5]:
            h = layer(h) + early * 0.5
        return torch.add(self.layers[5](h) + early, x)


class Structures(nn.Module):
    """Tuples, dicts, named tuples, None, ints and booleans cross the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(4, 4) for _ in range(4))
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, batch: dict[str, Any], pair: tuple[Tensor, Tensor | None], flag: bool = True) -> dict[str, Any]:
        h = self.one(batch["x"])
        rows, length, _ = h.shape
        mask = h > 0
        index = (h * 10).long()
        found = torch.max(h, dim=-1)
        sequence, (last, _) = self.lstm(h)
        h = self.two(sequence).masked_fill(mask, 0.5)
        if flag and pair[1] is None:
            h = h + pair[0]
        h = self.three(h).reshape(rows * length, -1)
        h = self.four(h.view(rows, length, 4)) * found.values[..., None]
        return {
            "boxes": Detections(h, (found.indices, [mask, None])),
            "index": index,
            "last": (last, length, "text", slice(1, 2)),
            "ordered": OrderedDict(b=h[:, 1:], a=batch["n"]),
        }


class Views(nn.Module):
    """Strided and expanded values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.one(x).transpose(0, 1)
        left, right = h.chunk(2, dim=1)
        scale = self.scale.expand(4, 4)
        g = self.two(h.t()) @ scale
        return self.three(g), left * 2, right, h[::2]


class InPlace(nn.Module):
    """Every stage may begin with an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Hardswish(inplace=True))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        h += 1
        h = self.last(h)
        h[:, 0] = 0.0
        h[:, 1:].mul_(2)
        return F.relu(h, inplace=True)


class ChangesInput(nn.Module):
    """What later stages read of the call's tensors is what earlier ones made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.one(y)
        x.view(-1).add_(1)
        h = self.two(h + x)
        x += h.detach()
        return torch.add(self.three(h) + x, y)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        h: Tensor = self.head(self.body(self.embedding(index)))
        return h


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.act = nn.Tanh()
        self.alias = self.shared

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.shared, self.act, self.shared, self.act, self.alias):
            x = layer(x)
        return x


class OwnParameters(nn.Module):
    """Parameters, buffers, tensors and constants that functions use."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])
        self.steps: Tensor
        self.register_buffer("offset", torch.arange(4.0))
        self.register_buffer("steps", torch.zeros(()))
        self.plain = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        h = self.one(x * self.scale) + self.offset
        constant = torch.arange(4) * 2
        constant += x.shape[0]
        h = self.two(h * self.plain) * constant
        return F.linear(h, self.two.weight, self.scales[1]) * self.scale + torch.arange(h.shape[1], device=h.device)


class Branches(nn.Module):
    """Control flow on values, within a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.positive(x), x) if x.sum() > 0 else (x, self.negative(x))


class Brancher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branches, self.last = nn.Linear(4, 4), Branches(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.branches(self.first(x))
        result: Tensor = self.last(left) * right
        return result


class SkipsAtRandom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else x + self.body(x) * torch.rand(1, dtype=x.dtype)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        h: Tensor = self.body(x) * self.calls
        return h


class Double(torch.autograd.Function):
    """A function whose backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.round() * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class Contexts(nn.Module):
    """A backward of its own, no gradient, and other precision."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.one(x)
        h = self.two(Double.apply(h + x, 3))
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(True):
            h = torch.matmul(h.float(), h.float().T).to(h.dtype) @ h
        return torch.neg(self.three(h))


class Arguments(nn.Module):
    """Default arguments, keywords, and layers that are made on the fly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Bilinear(4, 4, 4), "b": nn.Linear(4, 4)})

    def forward(self, x: Tensor, other: Tensor | None = None, *rest: Tensor, scale: float = 2.0, **more: Any) -> Any:
        assert x.shape[0] > 1 and x.ndim == 2, "too few rows"  # noqa: PT018  (two jumps to one error)
        other = x if other is None else other
        h = self.layers["a"](input1=x, input2=other) * scale
        h = nn.Softmax(dim=1)(h)
        return self.layers["b"](h), *(value * 2 for value in rest), more.get("bias", 1)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x).mean((2, 3))
        return self.head(F.dropout(h, 0.4, training=self.training))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Sizes that become arguments, a mask that every block reads, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleList((nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8))) for _ in range(3)
        )
        self.bias: Tensor
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).bool())

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        rows, length = tokens.size()
        h = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            norm, attention, project = block.children()
            query, key, value = attention(norm(h)).view(rows, length, 2, 12).transpose(1, 2).chunk(3, dim=-1)
            weights = query @ key.mT / math.sqrt(key.size(-1))
            weights = weights.masked_fill(~(self.bias[:length, :length] & mask[:, None, None]), -1e9)
            h = h + project((weights.softmax(-1) @ value).transpose(1, 2).reshape(rows, length, 8))
        return torch.matmul(h, self.tokens.weight.T)


class Checkpoints(nn.Module):
    """Activations that are computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.one, x, use_reentrant=False)
        h = checkpoint(self._rest, h, use_reentrant=False)
        return torch.tanh(h)

    def _rest(self, x: Tensor) -> Tensor:
        return torch.relu(self.three(torch.relu(self.two(x))))


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self._both, x, use_reentrant=True)

    def _both(self, x: Tensor) -> Tensor:
        return torch.relu(self.two(torch.relu(self.one(x))))
