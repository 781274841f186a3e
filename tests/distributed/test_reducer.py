"""From each rank's gradients to their mean, without a Trainer."""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringstrategy.collectives.choose import Transport, choose_collective
from ringstrategy.gradients.reducer import GradientReducer
from ringstrategy.process_group import RankGroup
from tests.helpers.ranks import run_ranks

_TRANSPORTS: list[Transport] = ["shared_memory", "backend"]


@contextlib.contextmanager
def _reducing(module: nn.Module, transport: Transport = "auto", cap: int = 200) -> Iterator[GradientReducer]:
    group = RankGroup.connect(torch.device("cpu"), timedelta(seconds=20))
    collective = choose_collective(group, transport=transport)
    reducer = GradientReducer(list(module.named_parameters()), collective, group, bucket_cap_bytes=cap)
    try:
        yield reducer
    finally:
        reducer.close()
        collective.close()


def _network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def _rows(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=dtype)


def _mean_of_all(step: int, world_size: int) -> list[Tensor]:
    """The oracle: one process, the mean over ranks of each rank's loss."""
    network = _network()
    _backward(torch.stack([network(_rows(step, rank)).square().mean() for rank in range(world_size)]).mean())
    return _gradients(network)


def _backward(loss: Tensor, **options: bool) -> None:
    loss.backward(**options)  # type: ignore[no-untyped-call]


def _gradients(module: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in module.parameters()]
    return [gradient.clone() for gradient in gradients if gradient is not None]


def _steps(rank: int, world_size: int, transport: Transport, explicit: bool) -> list[list[Tensor]]:
    network = _network()
    seen = []
    with _reducing(network, transport) as reducer:
        for step in range(4):
            network.zero_grad()
            with reducer.backward() if explicit else contextlib.nullcontext():
                _backward(network(_rows(step, rank)).square().mean())
            seen.append(_gradients(network))
    return seen


@pytest.mark.parametrize("explicit", [True, False], ids=["strategy", "plain backward"])
@pytest.mark.parametrize("transport", _TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_are_the_mean_over_ranks(world_size: int, transport: Transport, explicit: bool) -> None:
    first, *others = run_ranks(_steps, world_size, transport, explicit)
    for other in others:
        assert all(
            torch.equal(a, b) for one, two in zip(first, other, strict=True) for a, b in zip(one, two, strict=True)
        )
    for step, gradients in enumerate(first):
        torch.testing.assert_close(gradients, _mean_of_all(step, world_size), rtol=1e-12, atol=1e-12)


def _launch_times(rank: int, world_size: int) -> tuple[int, int, int]:
    """All-reduces that had started by the end of backward, in the first and in the second step; and in all."""
    network = _network()
    started = []
    with _reducing(network) as reducer:
        for step in range(2):
            network.zero_grad()
            before = reducer.all_reduces
            with reducer.backward():
                _backward(network(_rows(step, rank)).square().mean())
                started.append(reducer.all_reduces - before)
        return started[0], started[1], reducer.all_reduces


def test_the_first_backward_observes_and_later_ones_overlap() -> None:
    for first, second, total in run_ranks(_launch_times, 2):
        assert first == 0
        assert second == total // 2 > 2


def _copy_times(rank: int, world_size: int) -> None:
    network = _network()
    with _reducing(network) as reducer:
        for step in range(3):
            copied, exposed, begun = reducer.copy_seconds, reducer.exposed_seconds, time.perf_counter()
            with reducer.no_sync(), reducer.backward():
                _backward(network(_rows(step, rank)).square().mean())
            assert reducer.copy_seconds == copied, "nothing is copied before it is sent"
            with reducer.backward():
                _backward(network(_rows(step + 3, rank)).square().mean())
            elapsed = time.perf_counter() - begun
            assert reducer.copy_seconds > copied
            # Disjoint, so that both may be told from the time of a step.
            assert reducer.copy_seconds - copied + reducer.exposed_seconds - exposed < elapsed


def test_copies_are_timed_apart_from_waiting() -> None:
    run_ranks(_copy_times, 2)


class _Branches(nn.Module):
    """Layers in the opposite order of their use, one never used, one used by some ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.last = nn.Linear(4, 1, dtype=torch.float64)
        self.never = nn.Linear(4, 4, dtype=torch.float64)
        self.sometimes = nn.Linear(5, 4, dtype=torch.float64)
        self.first = nn.Linear(5, 4, dtype=torch.float64)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        hidden: Tensor = self.first(x) + self.sometimes(x) if use else self.first(x)
        output: Tensor = self.last(hidden)
        return output.square().mean()


def _branches(rank: int, world_size: int) -> dict[str, Tensor | None]:
    module = _Branches()
    with _reducing(module, cap=60) as reducer:
        for step in range(3):
            module.zero_grad()
            with reducer.backward():
                _backward(module(_rows(step, rank), use=rank == 1))
        return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def test_unused_parameters_keep_no_gradient_and_partly_used_ones_count_zero() -> None:
    module = _Branches()
    _backward(torch.stack([module(_rows(2, rank), use=rank == 1) for rank in range(3)]).mean())
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert expected["never.weight"] is None
    for gradients in run_ranks(_branches, 3):
        assert gradients["never.weight"] is None
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)


def _no_gradient_at_all(rank: int, world_size: int) -> list[Tensor]:
    network = _network()
    with _reducing(network) as reducer:
        for step in range(2):
            network.zero_grad()
            with reducer.backward():
                loss = network(_rows(step, 0)).square().mean() if rank == 0 else torch.zeros((), requires_grad=True)
                _backward(loss)
        return _gradients(network)


def test_a_rank_whose_loss_touches_nothing_counts_zero() -> None:
    expected = [gradient / 2 for gradient in _mean_of_all(1, 1)]
    for gradients in run_ranks(_no_gradient_at_all, 2):
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)


def _two_losses(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Two backwards before a step: over the same parameters, and over disjoint ones."""
    network, other = _network(), _network()
    with _reducing(nn.ModuleList([network, other])) as reducer:
        for step in (0, 1):
            with reducer.backward():
                _backward(network(_rows(step, rank)).square().mean())
        once = _gradients(network)
        with reducer.backward():
            _backward(other(_rows(2, rank)).square().mean())
        return once, _gradients(network), _gradients(other)


def test_two_backwards_before_a_step_average_once() -> None:
    sums = [a + b for a, b in zip(_mean_of_all(0, 3), _mean_of_all(1, 3), strict=True)]
    for once, kept, other in run_ranks(_two_losses, 3):
        torch.testing.assert_close(once, sums, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(a, b) for a, b in zip(once, kept, strict=True)), "a mean must survive bit for bit"
        torch.testing.assert_close(other, _mean_of_all(2, 3), rtol=1e-12, atol=1e-12)


def _accumulate(rank: int, world_size: int, set_to_none: bool) -> tuple[list[Tensor], list[int]]:
    network = _network()
    sent = []
    with _reducing(network) as reducer:
        collective = reducer._collective
        for window in range(2):
            network.zero_grad(set_to_none=set_to_none)
            for micro in range(4):
                before = collective.bytes_sent
                with reducer.no_sync() if micro < 3 else contextlib.nullcontext(), reducer.backward():
                    _backward(network(_rows(4 * window + micro, rank)).square().mean())
                sent.append(collective.bytes_sent - before)
        return _gradients(network), sent


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_sends_once_per_window(set_to_none: bool) -> None:
    steps = [_mean_of_all(4 + micro, 2) for micro in range(4)]
    expected = [torch.stack(parts).sum(0) for parts in zip(*steps, strict=True)]
    for gradients, sent in run_ranks(_accumulate, 2, set_to_none):
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)
        assert sent[:3] == sent[4:7] == [0, 0, 0]
        assert sent[3] == sent[7] > 0


def _accumulated_elsewhere(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """What accumulated under no_sync counts, even if the synced backward does not touch it."""
    one, two = _network(), _network()
    with _reducing(nn.ModuleList([one, two])) as reducer:
        for step in (0, 1):
            one.zero_grad()
            two.zero_grad()
            with reducer.no_sync(), reducer.backward():
                _backward(one(_rows(step, rank)).square().mean())
            with reducer.backward():
                _backward(two(_rows(step, rank)).square().mean())
        return _gradients(one), _gradients(two)


def test_gradients_of_a_blocked_backward_are_not_lost() -> None:
    for one, two in run_ranks(_accumulated_elsewhere, 2):
        torch.testing.assert_close(one, _mean_of_all(1, 2), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(two, _mean_of_all(1, 2), rtol=1e-12, atol=1e-12)


def _nested_no_sync(rank: int, world_size: int) -> list[bool]:
    with _reducing(_network()) as reducer:
        states = []
        with reducer.no_sync():
            with contextlib.suppress(KeyError), reducer.no_sync():
                raise KeyError
            states.append(reducer._sync)
        states.append(reducer._sync)
        return states


def test_no_sync_nests_and_survives_exceptions() -> None:
    assert run_ranks(_nested_no_sync, 1) == [[False, True]]


def _unfreeze(rank: int, world_size: int) -> list[list[Tensor]]:
    network = _network()
    network[0].requires_grad_(False)
    seen = []
    with _reducing(network) as reducer:
        for step in range(4):
            if step == 2:
                network[0].requires_grad_(True)
            reducer.refresh()
            network.zero_grad()
            with reducer.backward():
                _backward(network(_rows(step, rank)).square().mean())
            seen.append(_gradients(network))
    return seen


def test_unfrozen_parameters_are_averaged_too() -> None:
    for seen in run_ranks(_unfreeze, 2):
        assert [len(gradients) for gradients in seen] == [4, 4, 6, 6]
        for step, gradients in enumerate(seen):
            expected = _mean_of_all(step, 2)[-len(gradients) :]
            torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)


def _checkpointed(rank: int, world_size: int, reentrant: bool, explicit: bool) -> list[Tensor]:
    """One block in two checkpointed segments: its parameters fire twice in one backward."""
    torch.manual_seed(1)
    block, head = nn.Linear(5, 5, dtype=torch.float64), nn.Linear(5, 2, dtype=torch.float64)
    with _reducing(nn.ModuleList([block, head])) as reducer:
        for step in range(3):
            block.zero_grad()
            head.zero_grad()
            with reducer.backward() if explicit else contextlib.nullcontext():
                x = _rows(step, rank).requires_grad_()
                for _ in range(2):
                    x = checkpoint(lambda y: block(y).tanh(), x, use_reentrant=reentrant)
                _backward(head(x).square().mean())
            reducer.flush()
        return _gradients(block) + _gradients(head)


@pytest.mark.parametrize("explicit", [True, False], ids=["strategy", "plain backward"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_block_checkpointed_twice(reentrant: bool, explicit: bool) -> None:
    torch.manual_seed(1)
    block, head = nn.Linear(5, 5, dtype=torch.float64), nn.Linear(5, 2, dtype=torch.float64)
    losses = [head(block(block(_rows(2, rank)).tanh()).tanh()).square().mean() for rank in range(2)]
    _backward(torch.stack(losses).mean())
    expected = _gradients(block) + _gradients(head)
    for gradients in run_ranks(_checkpointed, 2, reentrant, explicit):
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)


def _fires_again(rank: int, world_size: int) -> str:
    block = nn.Linear(5, 5, dtype=torch.float64)
    with _reducing(nn.ModuleDict({"block": block})) as reducer:
        for times in (1, 2):
            x = _rows(0, rank).requires_grad_()
            for _ in range(times):
                x = checkpoint(block, x, use_reentrant=True)
            try:
                with reducer.backward():
                    _backward(x.square().mean())
            except RuntimeError as error:
                return str(error)
    return "no error"


def test_a_parameter_that_fires_once_too_often_is_named() -> None:
    for message in run_ranks(_fires_again, 2):
        assert "'block.bias' received a gradient 2 times" in message or "'block.weight'" in message
        assert "use_reentrant=False" in message


def _double_backward(rank: int, world_size: int) -> tuple[list[Tensor], bool, Tensor]:
    network = _network()
    with _reducing(network) as reducer:
        for step in range(2):
            network.zero_grad()
            with reducer.backward():
                _backward(network(_rows(step, rank)).square().mean(), create_graph=True)
        values = [gradient.detach() for gradient in _gradients(network)]
        weight = next(network.parameters())
        assert weight.grad is not None
        (second,) = torch.autograd.grad(weight.grad.square().sum(), weight)
        return values, weight.grad.requires_grad, second


def test_gradients_with_a_graph_hold_the_mean_and_keep_the_graph() -> None:
    for values, has_graph, second in run_ranks(_double_backward, 2):
        torch.testing.assert_close(values, _mean_of_all(1, 2), rtol=1e-12, atol=1e-12)
        assert has_graph
        assert second.abs().sum() > 0


def _strides(rank: int, world_size: int) -> tuple[tuple[int, ...], bool]:
    network = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with _reducing(network) as reducer:
        for _ in range(2):
            network.zero_grad()
            with reducer.backward():
                _backward(network(torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)).sum())
        grad = network.weight.grad
        assert grad is not None
        return grad.stride(), grad.stride() == network.weight.stride()


def test_gradients_have_the_strides_of_their_parameters() -> None:
    for strides, same in run_ranks(_strides, 2):
        assert same, strides


def _copies(rank: int, world_size: int) -> int:
    network = _network()
    with _reducing(network) as reducer:
        duplicates = [copy.deepcopy(network), pickle.loads(pickle.dumps(network))]
        before = reducer.all_reduces
        for duplicate in duplicates:
            _backward(duplicate(_rows(0, rank)).sum())
        reducer.flush()
        return reducer.all_reduces - before


def test_hooks_do_not_travel_with_copies() -> None:
    assert run_ranks(_copies, 2) == [0, 0]


def _after_close(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    network = _network()
    with _reducing(network) as reducer, reducer.backward():
        _backward(network(_rows(0, rank)).square().mean())
    means = _gradients(network)
    network.zero_grad()
    _backward(network(_rows(0, rank)).square().mean())
    return means, _gradients(network)


def test_gradients_are_private_after_close() -> None:
    (mean, local), (same_mean, other_local) = run_ranks(_after_close, 2)
    assert all(torch.equal(a, b) for a, b in zip(mean, same_mean, strict=True))
    assert not torch.equal(local[0], other_local[0])
    torch.testing.assert_close(mean, _mean_of_all(0, 2), rtol=1e-12, atol=1e-12)
