"""What is looked into, what stays whole, and what cannot be traced."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ringstrategy.pipeline.calls import Call, flatten_call
from ringstrategy.pipeline.programs import cut
from ringstrategy.pipeline.tracing import Trace, trace
from tests.helpers.cut_models import Brancher, Branches, Counts, SkipsAtRandom


def _call(*args: Any) -> Call:
    return flatten_call(args or (torch.zeros(3, 4),), {})[1]


def _names(found: Trace) -> list[str]:
    return [layer.name for layer in found.layers]


def _state(module: nn.Module) -> list[tuple[str, list[tuple[str, int]]]]:
    """Identities of all attributes."""
    return [(name, [(key, id(value)) for key, value in vars(child).items()]) for name, child in module.named_modules()]


class AsksForDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        device = next(self.parameters()).device
        h = self.two(self.one(x))
        return h + torch.arange(h.shape[1], device=device)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(4, 4), Counts()),
        nn.Sequential(nn.Linear(4, 4), SkipsAtRandom(), nn.Sequential(Brancher(), Branches())),
        AsksForDevice(),
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


class Switches(nn.Module):
    def __init__(self, back: bool) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.back = back

    def forward(self, x: Tensor) -> Any:
        torch.set_grad_enabled(False)
        h = self.body(x) if self.back else x
        torch.set_grad_enabled(self.back)
        return h


@pytest.mark.parametrize("back", [True, False])
def test_modules_that_switch_gradients_stay_whole(back: bool) -> None:
    with torch.enable_grad():
        assert _names(trace(nn.Sequential(nn.Tanh(), Switches(back), nn.Tanh()), _call())) == ["0", "1", "2"]
        assert torch.is_grad_enabled()
        with pytest.raises(ValueError, match="gradients"):
            trace(Switches(back), _call())
        assert torch.is_grad_enabled()


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


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.body(x).square().sum(), x, create_graph=True)[0]


def test_gradients_within_a_forward_need_all_of_it() -> None:
    with pytest.raises(ValueError, match="gradients are computed within the forward"):
        trace(Energy(), _call())
    assert _names(trace(nn.Sequential(nn.Tanh(), Energy()), _call())) == ["0", "1"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_modules_with_classes_of_their_own_stay_whole() -> None:
    module = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    )
    found = trace(module, _call())
    assert _names(found) == ["0", "1", "2"]
    assert found.layers[0].parameters[-1] == "0.parametrizations.weight.original1"
    assert found.layers[1].parameters == ("1.0.weight", "1.0.bias")
    assert found.layers[2].buffers == ("2.parametrizations.weight.0._u", "2.parametrizations.weight.0._v")


def test_the_device_of_a_parameter_that_another_stage_holds() -> None:
    module = AsksForDevice()
    module.one.to("meta")
    last = cut(trace(module, _call()), [("two", 0)])[1]
    x = torch.rand(3, 4)
    torch.testing.assert_close(last((x,), [x])[0], module.two(x) + torch.arange(4))


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


def test_a_cut_outlasts_hooks_that_come_and_go() -> None:
    """Symptom: a summary or a profiler hooks all modules, and the stages no longer find where they begin."""
    module = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Tanh(), nn.Tanh()), nn.Sequential(nn.Tanh()))
    anchors = [("1.1", 0)]
    seen: list[Any] = []
    handles = [child.register_forward_hook(lambda *_: seen.append(1)) for child in (module[1], module[2])]
    assert _names(trace(module, _call())) == ["0", "1", "2"]
    with pytest.warns(UserWarning, match="Hooks on '1' of Sequential do not run"):
        hooked = trace(module, _call(), anchors)
    assert _names(hooked) == ["0", "1.0", "1.1", "2"]
    assert not seen
    inputs = torch.randn(2, 4)
    values: tuple[Any, ...] = ()
    for program in cut(hooked, anchors):
        values = program(values, [inputs if 0 in program.inputs else None])
    torch.testing.assert_close(values[0], module(inputs))
    assert len(seen) == 1 + 2
    for handle in handles:
        handle.remove()
    assert _names(trace(module, _call(), [("1", 0)])) == ["0", "1", "2.0"]
