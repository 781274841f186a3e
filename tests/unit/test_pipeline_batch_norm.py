"""Micro-batches move running statistics as the whole mini-batch does in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ringstrategy.pipeline.batch_norm import deferred_statistics, untracked_statistics

_SIZES = [[6, 6], [2, 7], [3, 2, 2, 5], [2] * 9]
_LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, (3,)),
    "1d of sequences": (nn.BatchNorm1d, (3, 5)),
    "2d": (nn.BatchNorm2d, (3, 4, 5)),
    "3d": (nn.BatchNorm3d, (3, 2, 4, 3)),
    "sync": (nn.SyncBatchNorm, (3, 4)),
    "instance 1d": (nn.InstanceNorm1d, (3, 5)),
    "instance 2d": (nn.InstanceNorm2d, (3, 4, 5)),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are too small for more, which would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _rows(rows: int, shape: Sequence[int], seed: int = 0) -> Tensor:
    """Rows that differ in mean and scale, so that the micro-batches' statistics differ."""
    noise = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    place = torch.arange(float(rows), dtype=torch.float64).view(rows, *[1] * len(shape))
    return noise * (1 + place / 3) + place


def _statistics(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _assert_moved_alike(module: nn.Module, whole: nn.Module, before: dict[str, Tensor]) -> None:
    after, expected = _statistics(module), _statistics(whole)
    torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12)
    assert any(not torch.equal(after[name], before[name]) for name in before), "nothing has moved"


def _pass(module: nn.Module, rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """One forward call in micro-batches; what each of them gave."""
    outputs = []
    with deferred_statistics([module], len(sizes)) as statistics:
        for part in torch.split(rows, list(sizes)):
            with statistics.micro_batch():
                outputs.append(module(part))
    return outputs


def _attributes(module: nn.Module) -> list[dict[str, Any]]:
    """All that hangs on a module and its children, with containers copied."""
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in child.__dict__.items()}
        for child in module.modules()
    ]


@pytest.mark.parametrize("momentum", [0.1, None], ids=["exponential", "cumulative"])
@pytest.mark.parametrize("sizes", _SIZES, ids=str)
@pytest.mark.parametrize("kind", _LAYERS)
def test_statistics_are_those_of_the_whole_batch(kind: str, sizes: list[int], momentum: float | None) -> None:
    build, shape = _LAYERS[kind]
    layer = build(3, momentum=momentum, affine=True, track_running_stats=True).double()
    whole, before = copy.deepcopy(layer), _statistics(layer)
    for step in range(3):
        rows = _rows(sum(sizes), shape, seed=step)
        alone = [copy.deepcopy(layer)(part) for part in torch.split(rows, sizes)]
        assert all(map(torch.equal, _pass(layer, rows, sizes), alone)), "each is normalised by its own statistics"
        whole(rows)
        if kind.startswith("instance") and momentum is None:  # which torch takes for a momentum of 0
            assert all(torch.equal(value, before[name]) for name, value in _statistics(layer).items())
            torch.testing.assert_close(_statistics(layer), _statistics(whole))
        else:
            _assert_moved_alike(layer, whole, before)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 1000))
def test_any_number_of_micro_batches_of_any_size(sizes: list[int], seed: int) -> None:
    layer = nn.BatchNorm2d(2, dtype=torch.float64)
    whole, before = copy.deepcopy(layer), _statistics(layer)
    rows = _rows(sum(sizes), (2, 3, 1), seed)
    _pass(layer, rows, sizes)
    whole(rows)
    _assert_moved_alike(layer, whole, before)


class _Repeated(nn.Module):
    """One layer that is called three times, on inputs of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(self.norm(x)[..., :2] * 5 - 1)
        self.norm(x.exp().mean(-1))
        return output


def test_the_calls_of_a_layer_are_kept_apart() -> None:
    module = _Repeated()
    # The second call's input depends on how the first one normalised, so it is equal only where all parts are alike.
    part = _rows(4, (3, 4)) / 10
    rows = torch.cat([part, part.flip(0), part])
    whole, before = copy.deepcopy(module), _statistics(module)
    _pass(module, rows, [4, 4, 4])
    whole(rows)
    assert module.norm.num_batches_tracked == 3
    _assert_moved_alike(module, whole, before)


def _network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).double()


def test_one_micro_batch_is_the_ordinary_forward_to_the_bit() -> None:
    module = _network()
    whole, rows = copy.deepcopy(module), _rows(5, (3, 4, 4))
    with deferred_statistics([module], 1) as statistics:
        attributes = _attributes(module)
        with statistics.micro_batch():
            assert _attributes(module) == attributes, "something was touched"
            output = module(rows)
    assert torch.equal(output, whole(rows))
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, whole.get_buffer(name))


def test_recomputation_gives_the_same_and_moves_nothing() -> None:
    module = _network()
    whole, before, rows = copy.deepcopy(module), _statistics(module), _rows(9, (3, 4, 4))
    parts, again = torch.split(rows, [4, 3, 2]), []
    with deferred_statistics([module], 3) as statistics:
        outputs = []
        for part in parts:
            with statistics.micro_batch(), torch.no_grad():
                outputs.append(module(part))
            with untracked_statistics([module]):  # as where forwards and backwards take turns
                again.append(module(part))
    whole(rows)
    _assert_moved_alike(module, whole, before)
    with untracked_statistics([module]):
        again.append(module(parts[0]))
    _assert_moved_alike(module, whole, before)
    assert all(torch.equal(one, two) for one, two in zip([*outputs, outputs[0]], again, strict=True))
    assert again[0].requires_grad


def test_gradients_are_those_of_layers_without_running_statistics() -> None:
    module, plain = _network(), _network()
    assert isinstance(plain[1], nn.BatchNorm2d)
    plain[1].track_running_stats = False
    rows = _rows(7, (3, 4, 4))
    torch.autograd.backward([output.square().sum() for output in _pass(module, rows, [3, 4])])
    torch.autograd.backward([plain(part).square().sum() for part in torch.split(rows, [3, 4])])
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("sizes", [[8], [3, 5]], ids=str)
def test_an_earlier_graph_survives_the_move(sizes: list[int]) -> None:
    """Autograd saves running statistics, although a training layer's backward has no use for them."""
    layer, rows = nn.BatchNorm1d(3), torch.randn(8, 3, requires_grad=True)
    earlier = layer(rows)
    for _ in range(2):
        earlier = earlier + torch.cat(_pass(layer, rows, sizes))
    torch.autograd.backward(earlier.sum())
    assert rows.grad is not None


def _refuse_nan(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if inputs[0].isnan().any():
        raise KeyError("the user's own")


def test_nothing_stays_on_the_modules_also_after_an_exception() -> None:
    module = _network()
    module[3].register_forward_pre_hook(_refuse_nan)
    attributes, before, rows = _attributes(module), _statistics(module), _rows(8, (3, 4, 4))
    rows[7] = torch.nan
    with pytest.raises(KeyError, match="the user's own"):
        _pass(module, rows, [4, 4])
    assert _attributes(module) == attributes
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    with pytest.raises(KeyError, match="the user's own"), untracked_statistics([module]):
        module(rows)
    assert _attributes(module) == attributes
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    _pass(module, rows[:7], [4, 3])
    assert _attributes(module) == attributes


def test_layers_that_do_not_track_now_are_left_alone() -> None:
    evaluating, untracked, averaging = nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    untracked.track_running_stats = False
    module = nn.Sequential(evaluating, untracked, nn.BatchNorm1d(3, track_running_stats=False), averaging)
    before = _statistics(module)
    _pass(module, torch.randn(6, 3), [3, 3])
    moved = {name for name, buffer in module.named_buffers() if not torch.equal(buffer, before[name])}
    assert moved == {"3.running_mean", "3.running_var", "3.num_batches_tracked"}


def test_a_layer_that_is_given_twice_moves_once() -> None:
    layer = nn.BatchNorm1d(3, momentum=1.0, dtype=torch.float64)
    rows = _rows(6, (3,))
    with deferred_statistics([layer, nn.Sequential(layer), layer], 2) as statistics:
        for part in torch.split(rows, [2, 4]):
            with statistics.micro_batch():
                layer(part)
    assert layer.num_batches_tracked == 1
    torch.testing.assert_close(layer.running_mean, rows.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.running_var, rows.var(0), rtol=1e-12, atol=1e-12)


def test_an_instance_norm_takes_a_single_instance() -> None:
    layer = nn.InstanceNorm1d(3, track_running_stats=True, dtype=torch.float64)
    whole, before, rows = copy.deepcopy(layer), _statistics(layer), _rows(4, (3, 6))
    with deferred_statistics([layer], 2) as statistics:
        for part in (rows[:3], rows[3]):
            with statistics.micro_batch():
                layer(part)
    whole(rows)
    _assert_moved_alike(layer, whole, before)


def test_half_precision_inputs_are_summed_up_in_single_precision() -> None:
    layer = nn.BatchNorm2d(3, momentum=1.0)
    rows = (_rows(16, (3, 8, 8)) + 50).bfloat16()
    _pass(layer, rows, [2, 3, 5, 6])
    exact = rows.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(layer.running_mean, exact.mean(1).float(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(layer.running_var, exact.var(1).float(), rtol=1e-5, atol=0.0)


def test_a_layer_in_half_precision_stays_in_it() -> None:
    layer = nn.BatchNorm1d(3, momentum=1.0, dtype=torch.bfloat16)
    rows = _rows(12, (3,)).bfloat16()
    assert all(output.dtype == torch.bfloat16 for output in _pass(layer, rows, [4, 4, 4]))
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.running_mean.dtype == layer.running_var.dtype == torch.bfloat16
    # Rounded once in each micro-batch and once in the end, to 8 bits.
    torch.testing.assert_close(layer.running_mean.double(), rows.double().mean(0), rtol=2e-2, atol=0.0)
    torch.testing.assert_close(layer.running_var.double(), rows.double().var(0), rtol=2e-2, atol=0.0)


def test_lazy_layers_must_have_seen_an_input() -> None:
    layer = nn.LazyBatchNorm1d(affine=False, dtype=torch.float64)
    rows = _rows(6, (3,))
    with pytest.raises(ValueError, match=r"LazyBatchNorm1d\(.*has no shape yet.*Run the module once"):
        _pass(layer, rows, [3, 3])
    layer(rows)
    whole, before = copy.deepcopy(layer), _statistics(layer)
    _pass(layer, rows, [3, 3])
    whole(rows)
    _assert_moved_alike(layer, whole, before)
