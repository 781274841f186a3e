"""Any module as a chain of layers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from ringstrategy.pipeline.calls import Call, flatten_call
from ringstrategy.pipeline.tracing import Trace, Traces, common_layers, find_module, split_layers, trace
from tests.helpers.cut_models import Tied


def _call(*args: Any) -> Call:
    return flatten_call(args or (torch.zeros(3, 4),), {})[1]


def _names(found: Trace) -> list[str]:
    return [layer.name for layer in found.layers]


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


def test_attributes_may_be_dicts_by_parameter() -> None:
    """Symptom: a boolean value of a tensor is ambiguous, once ``toggle_optimizer`` was called: it keeps such a dict."""
    module = Plain()
    vars(module)["trains"] = {parameter: parameter.requires_grad for parameter in module.parameters()}
    assert _names(trace(module, _call())) == ["first", "second", "second (call 2)"]
    assert list(vars(module)["trains"]) == list(module.parameters())


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


def test_a_number_that_changes_at_each_step_is_warned_of() -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor, factor: int) -> Tensor:
            return x * factor

    traces = Traces(Scales())
    for step in range(15):
        traces.get(_call(torch.zeros(1), step))
    with pytest.warns(UserWarning, match="Scales has been traced 16 times.*make it a tensor"):
        traces.get(_call(torch.zeros(1), 15))


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


def test_a_compiled_module_is_refused() -> None:
    net: Any = torch.compile(nn.Linear(4, 4), backend="eager")
    module = NoForward(net=net)
    with pytest.raises(ValueError, match=r"NoForward\.net is compiled.*leave out torch\.compile"):
        find_module(module)


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
