"""A stage's module: what it holds is untouched, what others hold keeps all but its memory."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ringstrategy.pipeline.absent import AbsentParameter
from ringstrategy.pipeline.placement import Placement


class _Special(nn.Parameter):
    """A class of parameters of somebody's own."""


class _SpecialLayer(nn.Module):
    """Registers what may be None, and what is not saved."""

    table: Tensor
    nothing: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.weight = _Special(torch.arange(6.0).view(2, 3).t())
        self.register_parameter("bias", None)
        self.register_buffer("table", torch.arange(4), persistent=False)
        self.register_buffer("nothing", None)


class _Net(nn.Module):
    """Something of everything; the decoder's weight is the encoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.special = _SpecialLayer()
        self.decoder = nn.Linear(3, 4)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.tensor(2.0))


def _owners(module: nn.Module, of: Mapping[str, int]) -> dict[str, frozenset[int]]:
    """Every tensor below a prefix on one stage."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)] + [
        name for name, _ in module.named_buffers(remove_duplicate=False)
    ]
    return {
        name: frozenset([stage])
        for name in names
        for prefix, stage in of.items()
        if name == prefix or name.startswith(f"{prefix}.")
    }


def _net() -> tuple[_Net, dict[str, frozenset[int]]]:
    torch.manual_seed(1)
    net = _Net()
    return net, _owners(net, {"encoder": 0, "norm": 0, "special": 1, "decoder": 2, "head": 2})


def _values(module: nn.Module) -> dict[str, Tensor]:
    names = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in names.items()}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_held_is_untouched_and_the_rest_has_no_memory(stage: int) -> None:
    net, owners = _net()
    before, registered = _values(net), dict(net.named_parameters(remove_duplicate=False))
    keys, buffers = list(net.state_dict()), [name for name, _ in net.named_buffers()]
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    frozen = registered["head.0.weight"].requires_grad_(False)
    vars(frozen)["note"] = "mine"
    placement = Placement(net, owners, stage)
    placement.leave()

    assert list(net.state_dict()) == keys
    assert [name for name, _ in net.named_buffers()] == buffers
    held = {0: ("encoder", "norm", "decoder.weight"), 1: ("special",), 2: ("encoder", "decoder", "head")}[stage]
    for name, tensor in {**registered, **dict(net.named_buffers())}.items():
        here = name.startswith((*held, "scale"))
        assert placement.holds(name) == here, name
        assert tensor.is_meta != here, name
        assert (tensor.shape, tensor.dtype, tensor.stride()) == (
            before[name].shape,
            before[name].dtype,
            before[name].stride(),
        )
        if here:
            assert torch.equal(tensor, before[name])
        if isinstance(tensor, nn.Parameter):
            assert tensor.grad is None or here
    for name, parameter in net.named_parameters(remove_duplicate=False):
        assert parameter is registered[name]
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad == (name != "head.0.weight")
        assert placement.is_absent(parameter) == parameter.is_meta
    assert type(net.special.weight) is _Special
    assert vars(frozen)["note"] == "mine"
    assert net.decoder.weight is net.encoder.weight
    assert net.special.nothing is None


def test_leaving_twice_changes_nothing() -> None:
    net, owners = _net()
    placement = Placement(net, owners, 1)
    placement.leave()
    weight = net.encoder.weight
    placement.leave()
    assert net.encoder.weight is weight
    assert weight.is_meta
    assert torch.equal(net.special.weight, torch.arange(6.0).view(2, 3).t())


def test_names_that_are_not_mentioned() -> None:
    net, _ = _net()
    placement = Placement(net, {"encoder.weight": frozenset([0]), "norm.running_mean": frozenset([0])}, 1)
    placement.leave()
    # The other name of a tied weight follows; what has no name among the mentioned stays everywhere.
    assert not placement.holds("decoder.weight")
    assert placement.holds("head.0.weight")
    assert placement.part_of(net.get_parameter("head.0.weight")) is None
    part = placement.part_of(net.encoder.weight)
    assert part is not None
    assert part.names == ("encoder.weight", "decoder.weight")
    assert {name for name, tensor in net.state_dict().items() if tensor.is_meta} == {
        "encoder.weight",
        "decoder.weight",
        "norm.running_mean",
    }


def test_a_tied_weight_belongs_to_the_stages_of_all_its_names() -> None:
    net, owners = _net()
    part = Placement(net, owners, 1).part_of(net.encoder.weight)
    assert part is not None
    assert part.stages == {0, 2}
    assert part.sender == 0


def test_buffers_that_are_shared_stay_shared_and_may_have_views() -> None:
    net = nn.ModuleList([nn.Module(), nn.Module()])
    table = torch.arange(10.0)
    net[0].register_buffer("table", table)
    net[1].register_buffer("table", table)
    net[1].register_buffer("part", table[:5])
    placement = Placement(net, _owners(net, {"0": 0, "1": 0}), 1)
    placement.leave()
    assert net[0].table is net[1].table
    assert all(buffer.is_meta for buffer in net.buffers())
    for part, value in zip(placement.absent, (table, table[:5]), strict=True):
        part.fill(value.clone())
    assert net[0].table is net[1].table
    assert torch.equal(net[1].get_buffer("part"), table[:5])


@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    ],
    ids=["sgd", "adamw_foreach", "adam_fused", "adagrad"],
)
def test_optimizers_built_before_and_after_survive(
    built: str, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
) -> None:
    def run(stage: int | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        net, owners = _net()

        def optimizer() -> torch.optim.Optimizer:
            first = [net.head[0].weight, net.special.weight]
            others = [p for p in net.parameters() if all(p is not one for one in first)]
            return make([{"params": first}, {"params": others, "weight_decay": 0.1}])

        early = optimizer() if built == "before" else None
        if stage is not None:
            Placement(net, owners, stage).leave()
        late = early or optimizer()
        for parameter in net.parameters():
            if not parameter.is_meta:
                parameter.grad = torch.ones_like(parameter) * parameter.numel()
        for _ in range(2):
            late.step()
        late.zero_grad()
        return net, late

    whole, plain = run(None)
    for stage in range(3):
        net, optimizer = run(stage)
        assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
        for name, value in net.state_dict().items():
            assert value.is_meta or torch.equal(value, whole.state_dict()[name]), name
        saved = optimizer.state_dict()["state"]
        held = [not p.is_meta for group in optimizer.param_groups for p in group["params"]]
        for index, state in plain.state_dict()["state"].items():
            if held[index]:
                torch.testing.assert_close(saved[index], state, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_leave_and_come_back(kind: Callable[..., nn.RNNBase]) -> None:
    torch.manual_seed(0)
    net = nn.ModuleList([kind(3, 4, num_layers=2, bidirectional=True), nn.Linear(8, 1)])
    x = torch.randn(5, 2, 3)
    with torch.no_grad():
        expected = net[0](x)[0]
    before = _values(net)
    placement = Placement(net, _owners(net, {"0": 0, "1": 1}), 1)
    placement.leave()
    assert all(weight.is_meta for weight in net[0].parameters())
    with pytest.raises(RuntimeError, match=r"Stage 1 does not hold parameter '0\.weight_ih_l0' \(stage 0 does\)"):
        net[0](x)
    for part in placement.absent:
        part.fill(before[part.name])
    assert torch.equal(net[0](x)[0], expected)
    # Not copies: what an optimizer changes is what is computed with.
    with torch.no_grad():
        for weight in net[0].parameters():
            weight.zero_()
    assert not net[0](x)[0].any()
    assert not copy.deepcopy(net)[0](x)[0].any()


def test_what_comes_back_is_what_it_was() -> None:
    net, owners = _net()
    before, registered = _values(net), dict(net.named_parameters(remove_duplicate=False))
    calls: list[str] = []

    def double(gradient: Tensor) -> Tensor:
        calls.append("gradient")
        return gradient * 2

    hooked = net.get_parameter("head.1.weight")
    handle = hooked.register_hook(double)  # type: ignore[no-untyped-call]
    hooked.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))  # type: ignore[no-untyped-call]
    placement = Placement(net, owners, 1)
    placement.leave()
    net.head[0].weight.requires_grad_(False)  # as a callback that freezes layers does
    for part in placement.absent:
        part.fill(before[part.name])

    assert dict(net.named_parameters(remove_duplicate=False)) == registered
    assert {name: type(p) for name, p in net.named_parameters()} == {
        name: _Special if name == "special.weight" else nn.Parameter for name, _ in net.named_parameters()
    }
    assert all(torch.equal(value, before[name]) for name, value in _values(net).items())
    assert not any("absence" in vars(p) for p in net.parameters())
    assert not net.head[0].weight.requires_grad
    net.head(torch.ones(1, 4)).sum().backward()
    assert calls == ["gradient", "accumulated"]
    handle.remove()
    net.head(torch.ones(1, 4)).sum().backward()
    assert calls == ["gradient", "accumulated", "accumulated"]


def _kept_output(net: _Net) -> object:
    return net.head(torch.ones(1, 4))


def _kept_view(net: _Net) -> object:
    with torch.no_grad():
        return net.get_parameter("head.1.weight").view(-1)


@pytest.mark.parametrize(
    ("keep", "why"),
    [
        (_kept_output, r"a tensor that was computed from it \(an output, a loss, a view\) is still alive"),
        (_kept_view, r"a tensor that was computed from it"),
        (lambda net: weakref.ref(net.head[1].weight), r"somebody keeps a weak reference to it"),
    ],
    ids=["output", "view", "weak_reference"],
)
def test_a_parameter_in_use_is_refused_and_nothing_has_changed(keep: Callable[[_Net], object], why: str) -> None:
    net, owners = _net()
    before, registered = _values(net), dict(net.named_parameters())
    kept = keep(net)
    placement = Placement(net, owners, 0)
    with pytest.raises(RuntimeError, match=rf"Stage 0 does not hold parameter 'head\.1\.weight' .*{why}"):
        placement.leave()
    assert dict(net.named_parameters()) == registered
    assert all(torch.equal(value, before[name]) for name, value in _values(net).items())
    assert type(net.special.weight) is _Special
    assert type(net.head[0].weight) is nn.Parameter
    del kept
    placement.leave()
    assert net.head[1].weight.is_meta


def test_an_output_that_only_a_cycle_keeps_does_not_matter() -> None:
    net, owners = _net()
    cycle: dict[str, object] = {"output": net.head(torch.ones(1, 4))}
    cycle["itself"] = cycle
    gc.disable()
    try:
        del cycle
        Placement(net, owners, 0).leave()
    finally:
        gc.enable()
    assert net.head[1].weight.is_meta


def test_owners_must_fit_the_module() -> None:
    net, _ = _net()
    with pytest.raises(ValueError, match=r"_Net has no parameter or buffer named 'head\.2\.bias', 'tail'"):
        Placement(net, {"tail": frozenset([0]), "head.2.bias": frozenset([1]), "scale": frozenset([0])}, 0)
    with pytest.raises(ValueError, match=r"No stage holds 'scale'"):
        Placement(net, {"scale": frozenset()}, 0)


class _Wrapper(Tensor):
    """A tensor that is more than it seems."""


def test_parameters_that_cannot_be_moved_are_refused_by_name() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(TypeError, match=r"'0\.weight' has no shape yet"):
        Placement(lazy, {"0.weight": frozenset([1])}, 0).leave()
    wrapped = nn.Module()
    wrapped.weight = nn.Parameter(torch.ones(2).as_subclass(_Wrapper))
    with pytest.raises(TypeError, match=r"'weight' is a _Wrapper"):
        Placement(wrapped, {"weight": frozenset([1])}, 0).leave()


def test_a_stage_without_values_for_what_it_is_to_hold_says_so() -> None:
    net, owners = _net()
    Placement(net, owners, 0).leave()
    with pytest.raises(RuntimeError, match=r"Stage 1 is to hold 'special\.weight', but has no values"):
        Placement(net, owners, 1).leave()


def test_copies_made_before_and_after_get_placements_of_their_own() -> None:
    net, owners = _net()
    early = copy.deepcopy(net)
    Placement(net, owners, 2).leave()
    late = copy.deepcopy(net)
    for module in (early, late):
        Placement(module, owners, 2).leave()
        assert module.encoder.weight is module.decoder.weight
        for (name, value), (_, original) in zip(module.state_dict().items(), net.state_dict().items(), strict=True):
            assert value.is_meta == original.is_meta, name
            assert value.is_meta or torch.equal(value, original)
        assert not {id(p) for p in module.parameters()} & {id(p) for p in net.parameters()}


@pytest.mark.parametrize(
    "use",
    [
        lambda absent, x: F.linear(x, absent),
        lambda absent, x: x @ absent,
        lambda absent, x: F.conv1d(x[None], absent[..., None]),
        lambda absent, x: F.conv1d(x[None], weight=absent.detach()[..., None], bias=absent),
        lambda absent, x: F.embedding(torch.tensor([0]), absent),
        lambda absent, x: torch.cat([absent, x]),
        lambda absent, x: absent.norm(),
        lambda absent, x: absent.chunk(2),
        lambda absent, x: absent.grad_fn is None and x.add_(absent),
        lambda absent, x: x.copy_(absent),
    ],
)
def test_computing_with_an_absent_parameter_names_it(use: Callable[[Tensor, Tensor], object]) -> None:
    module = nn.Linear(2, 2, bias=False)
    Placement(module, {"weight": frozenset([1, 3])}, 0).leave()
    with pytest.raises(RuntimeError, match=r"Stage 0 does not hold parameter 'weight' \(stage 1 and 3 does\), and \w+"):
        use(module.weight, torch.ones(2, 2))


def test_layers_of_other_stages_name_themselves_when_they_are_called() -> None:
    net, owners = _net()
    Placement(net, owners, 1).leave()
    for layer, name in ((net.encoder, "encoder.weight"), (net.norm.eval(), "norm.weight"), (net.head, "head.0.weight")):
        with pytest.raises(RuntimeError, match=rf"'{name}'.*Layers of other stages run where the pipelined module"):
            layer(torch.ones(2, layer.in_features if isinstance(layer, nn.Linear) else 4))


def test_what_needs_no_values_works_on_absent_parameters() -> None:
    net, owners = _net()
    averaged = AveragedModel(net)
    state = net.state_dict()
    Placement(net, owners, 1).leave()
    Placement(averaged.module, owners, 1).leave()
    assert isinstance(net.encoder.weight, AbsentParameter)
    assert sum(p.numel() for p in net.parameters()) == 12 + 8 + 6 + 4 + 10 + 6 + 1
    assert "meta" in repr(net.encoder.weight)
    for _ in range(3):
        averaged.update_parameters(net)
    assert torch.equal(averaged.module.get_parameter("special.weight"), net.special.weight)
    for average, parameter in zip(averaged.module.parameters(), net.parameters(), strict=True):
        parameter.detach().copy_(average)  # as Lightning's StochasticWeightAveraging ends
    with pytest.warns(UserWarning, match=r"copying from a non-meta parameter"):
        net.load_state_dict(state)
    net.double()
    assert net.encoder.weight.dtype == torch.float64
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    assert torch.load(file)["encoder.weight"].is_meta
    with torch.inference_mode():
        assert net.encoder.weight.detach().is_meta


def test_leaving_under_inference_mode_leaves_ordinary_tensors() -> None:
    net, owners = _net()
    with torch.inference_mode():
        Placement(net, owners, 1).leave()
    assert not any(tensor.is_inference() for tensor in (*net.parameters(), *net.buffers()))
    assert net.encoder.weight.requires_grad
