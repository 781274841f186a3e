"""The stages' weights, buffers and optimizer states make those of one process."""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ringstrategy.pipeline.channels import Channel
from ringstrategy.pipeline.connect import connect
from ringstrategy.pipeline.placement import Placement
from ringstrategy.pipeline.state import (
    gather_optimizer_state,
    gather_state_dict,
    keep_own_optimizer_state,
    make_optimizer_whole,
    make_whole,
)
from ringstrategy.process_group import RankGroup
from tests.helpers.ranks import run_ranks

Owners = dict[str, frozenset[int]]


class _Odd(nn.Module):
    """Tensors of unusual types and shapes, and a state besides tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.brief = nn.Parameter(torch.randn(3, 2).to(torch.bfloat16))
        self.precise = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.imaginary = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.last = nn.Parameter(torch.randn(1, 2, 3, 4).contiguous(memory_format=torch.channels_last))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("wide", torch.randn(1, 3).expand(4, 3))
        self.register_buffer("hidden", torch.randn(3), persistent=False)
        self.register_buffer("later", None)
        self.wide: Tensor
        self.seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class _Model(nn.Module):
    """The decoder's weight is the encoder's; what is saved of the norm has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(2))
        self.encoder = nn.Linear(3, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.odd = _Odd()
        self.recurrent = nn.LSTM(4, 4)
        self.decoder = nn.Linear(3, 4)
        self.decoder.weight = self.encoder.weight
        self.norm.register_state_dict_post_hook(_rename)  # type: ignore[no-untyped-call]


def _rename(module: nn.Module, state: OrderedDict[str, Tensor], prefix: str, metadata: dict[str, Any]) -> None:
    # Computed: a hook that saw meta tensors would save no values.
    assert isinstance(module.weight, nn.Parameter)
    state[f"{prefix}deviation"] = state.pop(f"{prefix}running_var").sqrt()


_CHAIN = ("encoder", "norm", "odd", "recurrent", "decoder")


def _model() -> _Model:
    torch.manual_seed(3)
    return _Model()


def _owners(module: nn.Module, stages: int, chain: Sequence[str] = _CHAIN) -> Owners:
    """The children of a chain, spread over stages."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers()]
    names += ["odd.later"] if "odd" in chain else []
    places = {child: place * stages // len(chain) for place, child in enumerate(chain)}
    return {name: frozenset([places[child]]) for name in names if (child := name.partition(".")[0]) in places}


@contextlib.contextmanager
def _channels() -> Iterator[dict[int, Channel]]:
    group = RankGroup.connect(torch.device("cpu"), timedelta(seconds=20))
    channels = connect(group)
    try:
        yield channels
    finally:
        for channel in channels.values():
            channel.close()


def _change(module: nn.Module) -> None:
    """Give everything that is here other values, the same wherever it is: as training does."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if not tensor.is_meta and 0 not in tensor.stride():
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                tensor.copy_(torch.randn(tensor.shape, generator=generator).abs())


def _trained(module: _Model) -> None:
    _change(module)
    module.odd.seen = 7
    module.odd.later = torch.arange(5)


def _assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert type(ours) is type(theirs)
    assert list(ours) == list(theirs)
    assert getattr(ours, "_metadata", None) == getattr(theirs, "_metadata", None)
    for name, value in theirs.items():
        if isinstance(value, Tensor):
            assert not ours[name].requires_grad
            _assert_same(ours[name], value, name)
        else:
            assert ours[name] == value, name


def _assert_same(one: Tensor, other: Tensor, name: str) -> None:
    assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device), name
    assert torch.equal(one, other), name


def _state_dicts(rank: int, world_size: int) -> None:
    module = _model()
    whole = copy.deepcopy(module)
    _trained(whole)
    registered = list(module.parameters())
    placement = Placement(module, _owners(module, world_size), rank)
    placement.leave()
    _change(module)
    if placement.holds("odd.scalar"):
        _trained(module)
    with _channels() as channels:
        for to in (0, world_size - 1, None):
            state = gather_state_dict(placement, channels, to=to)
            if to in (rank, None):
                _assert_same_state(state, whole.state_dict())
            else:
                assert set(whole.state_dict()) - set(state) <= {"odd.later"}  # None but where it was set
                for name in ("encoder.weight", "odd.scalar", "recurrent.bias_hh_l0"):
                    assert state[name].is_meta != placement.holds(name)
            # The module is as it was.
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                assert tensor.is_meta != placement.holds(name), name
            assert all(one is other for one, other in zip(module.parameters(), registered, strict=True))
    assert whole.state_dict()["odd._extra_state"] == {"seen": 7}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_state_dicts_are_those_of_one_process(world_size: int) -> None:
    run_ranks(_state_dicts, world_size)


def _whole_again(rank: int, world_size: int, to: int | None) -> None:
    module = _model()
    whole = copy.deepcopy(module)
    _trained(whole)
    registered = dict(module.named_parameters(remove_duplicate=False))
    placement = Placement(module, _owners(module, world_size), rank)
    with _channels() as channels:
        for _ in range(2):  # a second fit finds what it needs
            placement.leave()
            _change(module)
            if placement.holds("odd.scalar"):
                _trained(module)
            with torch.inference_mode():  # as at the end of a validation
                make_whole(placement, channels, to=to)
            if to not in (rank, None):
                assert module.odd.scalar.is_meta != placement.holds("odd.scalar")
                return
            _assert_same_state(module.state_dict(), whole.state_dict())
            assert dict(module.named_parameters(remove_duplicate=False)) == registered
            for (name, one), (_, other) in zip(module.named_buffers(), whole.named_buffers(), strict=True):
                _assert_same(one, other, name)
            assert not any(tensor.is_inference() for tensor in (*module.parameters(), *module.buffers()))
            assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
            x = torch.randn(2, 1, 4)
            assert torch.equal(module.recurrent(x)[0], whole.recurrent(x)[0])
            if to is not None:
                return


@pytest.mark.parametrize(("world_size", "to"), [(1, None), (2, None), (4, None), (3, 0)])
def test_modules_become_whole_again(world_size: int, to: int | None) -> None:
    run_ranks(_whole_again, world_size, to)


def _averaged(rank: int, world_size: int) -> None:
    whole, module = _model(), _model()
    for model in (whole, module):
        model.odd.wide = torch.ones(3)  # torch does not average expanded tensors
    expected, early = AveragedModel(whole), AveragedModel(module)
    owners = _owners(module, world_size)
    placement = Placement(module, owners, rank)
    placement.leave()
    late = AveragedModel(module)
    copies = [Placement(averaged.module, owners, rank) for averaged in (early, late)]
    for one in copies:
        one.leave()
    _change(whole)
    _change(module)
    for averaged in (expected, early, late):
        for _ in range(2):
            averaged.update_parameters(whole if averaged is expected else module)
    with _channels() as channels:
        for one in copies:
            state = gather_state_dict(one, channels)
            if rank == 0:
                _assert_same_state(state, expected.module.state_dict())
            make_whole(one, channels)
            _assert_same_state(one.module.state_dict(), expected.module.state_dict())


def test_averaged_copies_are_gathered_by_placements_of_their_own() -> None:
    run_ranks(_averaged, 2)


# -- optimizers ------------------------------------------------------------------------------------------------------

_LAYERS = ("first", "norm", "second", "third")


class _Classifier(nn.Module):
    """Something to train; the third layer's weight is the first's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4, bias=False)
        self.third.weight = self.first.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(torch.tanh(self.second(self.norm(self.first(x * self.scale)))))
        return y


class _Stateful(torch.optim.SGD):
    """Keeps numbers, lists of tensors and None in its state; and something that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["calls"] = state.get("calls", 0) + 1
                    state["history"] = [*state.get("history", []), parameter.grad.clone()][-2:]
                    state["nothing"] = None
        state_of_all: dict[Any, Any] = self.state
        state_of_all["rounds"] = state_of_all.get("rounds", 0) + 1
        super().step(closure)


def _groups(module: _Classifier) -> list[dict[str, Any]]:
    """Not in the order of the module, with different options."""
    ends = [*module.second.parameters(), module.first.weight]
    others = [p for p in module.parameters() if all(p is not end for end in ends)]
    return [{"params": ends, "lr": 0.05}, {"params": others, "weight_decay": 0.1}]


_OPTIMIZERS: dict[str, Callable[[_Classifier], list[Optimizer]]] = {
    "sgd": lambda module: [torch.optim.SGD(module.parameters(), lr=0.1)],
    "momentum": lambda module: [torch.optim.SGD(_groups(module), lr=0.1, momentum=0.9, nesterov=True, foreach=True)],
    "adam": lambda module: [torch.optim.Adam(module.parameters(), lr=0.01, amsgrad=True, foreach=False)],
    "adamw": lambda module: [torch.optim.AdamW(_groups(module), lr=0.01, fused=True)],
    "adagrad": lambda module: [torch.optim.Adagrad(module.parameters(), lr=0.01)],
    "stateful": lambda module: [_Stateful(_groups(module), lr=0.01, momentum=0.5)],
    "two": lambda module: [
        torch.optim.SGD([module.scale, *module.second.parameters()], lr=0.1, momentum=0.9),
        torch.optim.AdamW([*module.first.parameters(), *module.norm.parameters(), *module.unused.parameters()]),
    ],
}


def _classifier() -> _Classifier:
    torch.manual_seed(5)
    return _Classifier()


def _gradients(module: _Classifier, seed: int) -> dict[str, Tensor | None]:
    """Of the whole model, at its current values."""
    module.zero_grad()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    module(x).square().mean().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def _steps(
    module: _Classifier, whole: _Classifier, optimizers: dict[_Classifier, list[Optimizer]], seeds: range
) -> None:
    """Train the whole model, and a stage of it with the gradients of the whole."""
    for seed in seeds:
        gradients = _gradients(whole, seed)
        for name, parameter in module.named_parameters():
            gradient = gradients[name]
            parameter.grad = None if gradient is None or parameter.is_meta else gradient.clone()
        for mine in (whole, module):
            for optimizer in optimizers[mine]:
                optimizer.step()
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if not buffer.is_meta:
                    buffer.copy_(whole.get_buffer(name))


def _assert_same_optimizer_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    indices = [key for key in ours["state"] if isinstance(key, int)]
    assert indices == sorted(indices)
    for key, expected in theirs["state"].items():
        torch.testing.assert_close(ours["state"][key], expected, rtol=0, atol=0, msg=f"state of {key}")


def _trains_as_one(rank: int, world_size: int, kind: str, built_early: bool) -> None:
    build = _OPTIMIZERS[kind]
    module, whole = _classifier(), _classifier()
    optimizers = {whole: build(whole)}
    placement = Placement(module, _owners(module, world_size, _LAYERS), rank)
    if built_early:
        optimizers[module] = build(module)
    placement.leave()
    if not built_early:
        optimizers[module] = build(module)
    with _channels() as channels:
        _steps(module, whole, optimizers, range(2))
        weights = gather_state_dict(placement, channels)
        before = [dict(one.state) for one in optimizers[module]]
        states = [gather_optimizer_state(one, placement, channels) for one in optimizers[module]]
        for one, entries in zip(optimizers[module], before, strict=True):  # is as it was
            assert {key: id(entry) for key, entry in one.state.items()} == {key: id(entries[key]) for key in entries}
        if rank == 0:
            _assert_same_state(weights, whole.state_dict())
            for ours, theirs in zip(states, optimizers[whole], strict=True):
                _assert_same_optimizer_state(ours, theirs.state_dict())
        # Resumed by other stages, from what one process saved.
        saved = [copy.deepcopy(one.state_dict()) for one in optimizers[whole]]
        module = _classifier()
        module.load_state_dict(whole.state_dict())
        owners = _owners(module, world_size, _LAYERS[::-1])
        placement = Placement(module, owners, rank)
        placement.leave()
        optimizers[module] = build(module)
        for optimizer, state in zip(optimizers[module], saved, strict=True):
            own = keep_own_optimizer_state(state, optimizer, placement)
            assert own["param_groups"] == state["param_groups"]
            optimizer.load_state_dict(own)
            values = [value for entry in own["state"].values() if isinstance(entry, dict) for value in entry.values()]
            assert not any(isinstance(value, Tensor) and value.is_meta for value in values)
            for key in optimizer.state:
                assert not isinstance(key, Tensor) or not placement.is_absent(key)
        _steps(module, whole, optimizers, range(2, 4))
        # At the end every rank has everything.
        make_whole(placement, channels)
        for optimizer in optimizers[module]:
            make_optimizer_whole(optimizer, placement, channels)
    _assert_same_state(module.state_dict(), whole.state_dict())
    for ours_whole, theirs in zip(optimizers[module], optimizers[whole], strict=True):
        _assert_same_optimizer_state(_by_index(ours_whole.state_dict()), theirs.state_dict())
    _steps(module, whole, optimizers, range(4, 5))
    _assert_same_state(module.state_dict(), whole.state_dict())


def _by_index(state: dict[str, Any]) -> dict[str, Any]:
    return {
        **state,
        "state": dict(sorted(state["state"].items(), key=lambda item: (isinstance(item[0], str), item[0]))),
    }


@pytest.mark.parametrize("kind", list(_OPTIMIZERS))
def test_optimizers_over_stages_are_those_of_one_process(kind: str) -> None:
    run_ranks(_trains_as_one, 3, kind, built_early=False)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_one_stage_and_one_per_layer(world_size: int) -> None:
    run_ranks(_trains_as_one, world_size, "adam", built_early=True)


# -- how it travels --------------------------------------------------------------------------------------------------


class _Counted:
    """A channel that knows how many bytes were sent and not yet acknowledged."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.on_its_way = 0
        self.most = 0

    def send(self, values: Sequence[Any], tag: str) -> None:
        self.on_its_way += sum(value.nbytes for value in values if isinstance(value, Tensor))
        self.most = max(self.most, self.on_its_way)
        self.channel.send(values, tag)

    def receive(self, tag: str) -> list[Any]:
        values = self.channel.receive(tag)
        self.on_its_way = 0
        return values


def _one_at_a_time(rank: int, world_size: int) -> tuple[int, int]:
    module = nn.Sequential(*(nn.Linear(10, 10 * (width + 1), bias=False) for width in range(6)))
    owners = {f"{place}.weight": frozenset([min(place, world_size - 1)]) for place in range(6)}
    optimizer = torch.optim.Adam(module.parameters())
    placement = Placement(module, owners, rank)
    placement.leave()
    for parameter in module.parameters():
        parameter.grad = None if parameter.is_meta else torch.ones_like(parameter)
    optimizer.step()
    with _channels() as channels:
        counted = {peer: _Counted(channel) for peer, channel in channels.items()}
        gather_state_dict(placement, counted)  # type: ignore[arg-type]
        gather_optimizer_state(optimizer, placement, counted)  # type: ignore[arg-type]
        make_whole(placement, counted)  # type: ignore[arg-type]
    return max(one.most for one in counted.values()), sum(channel.bytes_sent for channel in channels.values())


def test_no_more_than_one_tensor_is_on_its_way() -> None:
    (_, zero), (one, _), (two, sent) = run_ranks(_one_at_a_time, 3)
    assert one == 4 * 10 * 20
    assert two == 4 * 10 * 60  # the largest of four
    # What stage 2 has, to both others at last; its two moments, and the number of steps per parameter, to stage 0.
    mine = 4 * 10 * (30 + 40 + 50 + 60)
    assert sent == mine + 2 * mine + 4 * 4 + 2 * mine
    assert zero == 2 * 4 * 10 * 10


def _stages_that_differ(rank: int, world_size: int) -> str:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = ("0", "1") if rank == 0 else ("1", "0")
    owners = {f"{first}.weight": frozenset([1]), f"{second}.bias": frozenset([1])}
    placement = Placement(module, owners, rank)
    with _channels() as channels, pytest.raises(RuntimeError) as caught:
        gather_state_dict(placement, channels)
    return str(caught.value)


def test_stages_that_disagree_on_what_they_hold_are_told() -> None:
    message = run_ranks(_stages_that_differ, 2)[0]
    assert "0.weight" in message
    assert "0.bias" in message
