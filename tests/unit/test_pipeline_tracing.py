"""Any module as a chain of layers."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ringstrategy.pipeline.calls import Call, flatten_call
from ringstrategy.pipeline.tracing import Trace, Traces, common_layers, find_module, split_layers, trace
from tests.helpers.cut_models import Brancher, Branches, Counts, SkipsAtRandom, Tied


def _call(*args: Any) -> Call:
    return flatten_call(args or (torch.zeros(3, 4),), {})[1]


def _names(found: Trace) -> list[str]:
    return [layer.name for layer in found.layers]


def _state(module: nn.Module) -> list[tuple[str, list[tuple[str, int]]]]:
    """Identities of all attributes."""
    return [(name, [(key, id(value)) for key, value in vars(child).items()]) for name, child in module.named_modules()]


class Plain(nn.Module):
    """Operations before, between and after the called modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x * self.scale)
        h = self.second(h + self.offset)
        h = self.second(h)
        return torch.add(h, self.shift)


def test_a_layer_is_a_called_module_and_what_follows() -> None:
    found = trace(Plain(), _call())
    assert _names(found) == ["first", "second", "second (call 2)"]
    assert [layer.anchor for layer in found.layers] == [("first", 0), ("second", 0), ("second", 1)]
    assert [layer.parameters for layer in found.layers] == [
        ("scale", "first.weight", "first.bias"),
        ("second.weight", "second.bias"),
        ("second.weight", "second.bias", "shift"),
    ]
    assert [layer.buffers for layer in found.layers] == [("offset",), (), ()]


def test_a_module_that_calls_none_is_one_layer() -> None:
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    (layer,) = trace(Only(), _call()).layers
    assert (layer.name, layer.anchor, layer.parameters) == ("Only", ("", 0), ("weight",))


def test_tied_parameters_have_the_first_of_their_names() -> None:
    layers = trace(Tied(), _call(torch.zeros(2, 3, dtype=torch.long))).layers
    assert layers[0].parameters == layers[-1].parameters == ("embedding.weight",)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(4, 4), Counts()),
        nn.Sequential(nn.Linear(4, 4), SkipsAtRandom(), nn.Sequential(Brancher(), Branches())),
        Plain(),
    ],
)
def test_tracing_leaves_no_trace(module: nn.Module) -> None:
    before = _state(module), {name: value.clone() for name, value in module.state_dict().items()}
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    trace(module, _call())
    assert _state(module) == before[0]
    assert all(torch.equal(value, before[1][name]) for name, value in module.state_dict().items())
    drawn = random.random(), np.random.rand(), float(torch.rand(()))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert drawn == (random.random(), np.random.rand(), float(torch.rand(())))


class Nested(nn.Module):
    """The innermost module that cannot be traced stays whole, and only that."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), Brancher(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.inner(self.before(x)))


def test_the_innermost_module_stays_whole() -> None:
    found = trace(nn.Sequential(Nested(), nn.Tanh()), _call())
    assert _names(found) == ["0.before", "0.inner.first", "0.inner.branches", "0.inner.last", "0.after", "1"]


class Draws(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.draw = draw

    def forward(self, x: Tensor) -> Any:
        return self.body(x) * self.draw()


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_modules_that_draw_random_numbers_stay_whole(draw: Any) -> None:
    assert _names(trace(nn.Sequential(nn.Tanh(), Draws(draw)), _call())) == ["0", "1"]
    assert _names(trace(nn.Sequential(nn.Tanh(), Draws(lambda: 2)), _call())) == ["0", "1.body"]


class Sets(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.kind = kind
        self.count = 0
        self.history: list[Any] = []
        self.table: dict[str, Any] = {}
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        h = self.body(x)
        if self.kind == "int":
            self.count += 1
        if self.kind == "new":
            self.newest = 1
        if self.kind == "value":
            self.last = h
        if self.kind == "list":
            self.history.append(h)
        if self.kind == "dict":
            self.table["h"] = h
        if self.kind == "buffer":
            self.mean = h.mean(0)
        if self.kind == "child":
            setattr(self.body, "seen", True)  # noqa: B010  (mypy knows no such attribute)
        return h


@pytest.mark.parametrize("kind", ["int", "new", "value", "list", "dict", "buffer", "child"])
def test_modules_that_set_attributes_stay_whole(kind: str) -> None:
    module = nn.Sequential(nn.Tanh(), Sets(kind))
    before = _state(module)
    assert _names(trace(module, _call())) == ["0", "1"]
    assert _state(module) == before
    assert not module[1].history
    assert not module[1].table


class AsksForTypes(nn.Module):
    """Branches on types: known ones of arguments, unknown ones of values."""

    def __init__(self, of_value: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.of_value = of_value

    def forward(self, x: Tensor) -> Any:
        if not isinstance(x, Tensor):
            raise TypeError
        h = self.one(x)
        return self.two(h) if self.of_value and isinstance(h, Tensor) else h


def test_types_of_values_are_not_guessed() -> None:
    assert _names(trace(AsksForTypes(of_value=False), _call())) == ["one"]
    with pytest.raises(ValueError, match="the type of a traced value"):
        trace(AsksForTypes(of_value=True), _call())
    assert _names(trace(nn.Sequential(nn.Tanh(), AsksForTypes(of_value=True)), _call())) == ["0", "1"]


def test_an_untraceable_module_is_named_with_its_line_and_a_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"Branches\.forward cannot be traced at .*cut_models\.py:\d+, `return .*x\.sum"
    ) as e:
        trace(Branches(), _call())
    assert 'module="net"' in str(e.value)
    with pytest.raises(ValueError, match=r"SkipsAtRandom\.forward draws random numbers"):
        trace(SkipsAtRandom(), _call())
    with pytest.raises(ValueError, match=r"Counts\.forward sets Counts\.calls, Counts\.seen"):
        trace(Counts(), _call())


def test_parameters_of_others_are_not_frozen_into_a_trace() -> None:
    outside = nn.Linear(4, 4)

    class Borrows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ (outside.weight * 2)

    with pytest.raises(ValueError, match="computed from parameters that do not belong"):
        trace(Borrows(), _call())


def test_a_padding_mask_keeps_an_encoder_with_nested_tensors_whole() -> None:
    class Encodes(nn.Module):
        def __init__(self, nested: bool) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)

        def forward(self, x: Tensor, padding: Tensor | None = None) -> Any:
            return self.encoder(x, src_key_padding_mask=padding)

    x, padding = torch.zeros(2, 3, 8), torch.zeros(2, 3).bool()
    assert _names(trace(Encodes(nested=True), _call(x, padding))) == ["encoder"]
    layers = ["encoder.layers.0", "encoder.layers.1"]
    assert _names(trace(Encodes(nested=True), _call(x))) == layers
    assert _names(trace(Encodes(nested=False), _call(x, padding))) == layers


def test_traces_are_made_once_per_state() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout()))
    traces = Traces(module)
    first = traces.get(_call())
    assert traces.get(_call(torch.zeros(7, 4))) is first
    module[1].eval()
    assert traces.get(_call()) is not first
    module[1].train()
    assert traces.get(_call()) is first
    handle = module[1].register_forward_hook(lambda *_: None)
    assert _names(traces.get(_call())) == ["0", "1"]
    handle.remove()
    assert traces.get(_call()) is first
    module[1] = nn.Tanh()
    assert _names(traces.get(_call())) == ["0", "1"]


def test_the_forward_of_the_class_is_traced() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    module.forward = lambda x: pytest.fail("the forward of the instance was called")  # type: ignore[method-assign]
    module.register_forward_hook(lambda *_: pytest.fail("a hook of the module itself ran"))
    assert _names(trace(module, _call())) == ["0"]


class Auxiliary(nn.Module):
    """A head in training only, as GoogLeNet has, and an order that depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        extra = self.head(h) if self.training else None
        h = self.d(self.c(h)) if self.training else self.c(self.d(h))
        return h, extra


def test_common_layers_of_training_and_evaluation() -> None:
    module = Auxiliary()
    traces = [trace(module.train(training), _call()) for training in (True, False)]
    layers = common_layers(traces)
    assert [layer.name for layer in layers[:2]] == ["a", "b"]
    assert layers[2].name in ("c", "d")
    assert len(layers) == 3
    assert layers[1].parameters[:6] == (
        "b.weight",
        "b.bias",
        "head.0.weight",
        "head.0.bias",
        "head.1.weight",
        "head.1.bias",
    )
    named = {name for layer in layers for name in layer.parameters}
    assert named == {name for name, _ in module.named_parameters()}
    for found in traces:
        assert sum(map(len, split_layers(found, [layer.anchor for layer in layers[1:]]))) == len(found.layers)


def test_common_layers_where_nothing_is_common() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.a(x) if self.training else self.b(x)

    module = Either()
    (layer,) = common_layers([trace(module.train(training), _call()) for training in (True, False)])
    assert layer.parameters == ("a.weight", "a.bias", "b.weight", "b.bias")


class NoForward(pl.LightningModule):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class WithForward(NoForward):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_the_module_is_found() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh()))
    found = NoForward(loss=nn.MSELoss(), net=net, blocks=nn.ModuleList([nn.Linear(4, 4)]))
    assert find_module(found) == ("net", net)
    assert find_module(found, "net.1") == ("net.1", net[1])
    assert find_module(WithForward(net=net)) == ("net", net)
    both = WithForward(net=net, head=nn.Linear(4, 4))
    assert find_module(both) == ("", both)
    assert find_module(both, "head") == ("head", both.head)
    lists = WithForward(blocks=nn.ModuleList([nn.Linear(4, 4)]))
    assert find_module(lists) == ("", lists)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        (None, r"NoForward to cut into stages is not clear \(submodules with parameters: net, head\).*module=\"net\""),
        ("nets", "NoForward has no submodule 'nets'; submodules with parameters: net, head"),
        ("net.7", "NoForward has no submodule 'net.7'"),
        ("blocks", "NoForward.blocks has no forward"),
    ],
)
def test_what_was_found_instead_of_one_module_is_listed(attribute: str | None, message: str) -> None:
    module = NoForward(net=nn.Linear(4, 4), head=nn.Linear(4, 4), blocks=nn.ModuleList([nn.Linear(4, 4)]))
    with pytest.raises(ValueError, match=message):
        find_module(module, attribute)
    with pytest.raises(ValueError, match=r"submodules with parameters: none"):
        find_module(NoForward(), attribute)
