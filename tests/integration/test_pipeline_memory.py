"""What a stage keeps in memory: its share of the model, and of a batch no more than the schedule needs."""

from __future__ import annotations

import ctypes
import functools
import gc
import weakref
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from ringstrategy.bench.memory import PeakPss
from ringstrategy.pipeline.balance import partition
from tests.helpers.pipelines import Classification, Pipelined, batches, run_alone, run_stages

_FLOAT = torch.float32


class _Layers(Classification):
    """Layers of equal size, each with an activation function that keeps its output for the backward."""

    def __init__(self, layers: int, width: int) -> None:
        parts = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]
        super().__init__(nn.Sequential(*parts), partial(torch.optim.AdamW, lr=0.01))


def _train(place: Pipelined, layers: int, width: int, rows: int, callback: pl.Callback) -> None:
    """Two steps."""
    load = batches(rows, rows, shape=(width,), dtype=_FLOAT)
    place.trainer(callbacks=[callback]).fit(_Layers(layers, width), load)


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """The memory behind the tensors in a structure, by address: views share it, and meta tensors have none."""
    tensors = [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor) and not value.is_meta]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage for storage in storages}


# -- the model ---------------------------------------------------------------------------------------------------------


class _Holdings(pl.Callback):
    """What there is of the model after the second step, in bytes."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        parameters = list(pl_module.parameters())
        held = {
            "parameters": parameters,
            "gradients": [parameter.grad for parameter in parameters],
            "optimizer": list(trainer.optimizers[0].state.values()),
        }
        self.bytes = {
            kind: sum(storage.nbytes() for storage in _storages(values).values()) for kind, values in held.items()
        }


def _hold(place: Pipelined) -> dict[str, int]:
    holdings = _Holdings()
    _train(place, 8, 64, 16, holdings)
    return holdings.bytes


@pytest.mark.parametrize(("world_size", "stages"), [(2, 2), (4, 4), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_stage_holds_its_share_of_parameters_gradients_and_optimizer_state(world_size: int, stages: int) -> None:
    """Symptom: a stage keeps the layers of others, or the optimizer makes moments for them."""
    alone = run_alone(_hold)
    assert alone["parameters"] == alone["gradients"] == 8 * (64 * 64 + 64) * _FLOAT.itemsize
    for rank in run_stages(_hold, world_size, num_stages=stages, balance="size", chunks=4):
        assert rank == pytest.approx({kind: size / stages for kind, size in alone.items()}, rel=0.01)


class _Growth(pl.Callback):
    """By how many MiB this process has grown when a step is done and freed memory is given back."""

    def __init__(self) -> None:
        self._before = _proportional_set_size()
        self.mebibytes = 0.0

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        self.mebibytes = _proportional_set_size() - self._before


def _proportional_set_size() -> float:
    pss = PeakPss()
    pss.start()
    pss.stop()
    return pss.mebibytes


def _grow(place: Pipelined) -> float:
    _train(place, 4, 8, 8, pl.Callback())  # what libraries need for themselves
    growth = _Growth()
    _train(place, 32, 1024, 8, growth)
    return growth.mebibytes


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_a_process_grows_by_its_share_of_the_model(stages: int) -> None:
    """Symptom: the memory of absent layers stays with the process, or somebody still has the tensors."""
    alone = run_alone(_grow)
    assert alone == pytest.approx(4 * 128, rel=0.02), "parameters, gradients and two moments of 128 MiB each"
    grown = run_stages(_grow, stages, balance="size", chunks=4)
    print(f"MiB: {alone:.0f} alone, {', '.join(f'{rank:.0f}' for rank in grown)} in {stages} stages")
    for rank in grown:
        assert rank == pytest.approx(alone / stages, rel=0.1)


# -- a step ------------------------------------------------------------------------------------------------------------


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory that operations have used or made, while it is alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # by address
        self._earlier: set[int] = set()
        self.most = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note((args, kwargs, result))
        self.most = max(self.most, sum(self.sizes().values()))
        return result

    def note(self, values: Any) -> None:
        """Operations use these."""
        self._forget_dead()
        for address, storage in _storages(values).items():
            self._seen.setdefault(address, (weakref.ref(storage), storage.nbytes()))

    def start_over(self) -> None:
        """What is alive now does not count."""
        self._forget_dead()
        self._earlier = set(self._seen)
        self.most = 0

    def sizes(self) -> dict[int, int]:
        """Bytes by address."""
        self._forget_dead()
        return {address: size for address, (_, size) in self._seen.items() if address not in self._earlier}

    def _forget_dead(self) -> None:
        self._seen = {address: seen for address, seen in self._seen.items() if seen[0]() is not None}
        self._earlier &= self._seen.keys()


class _Activations(pl.Callback):
    """What is alive in the second step that was not before it.

    Attributes:
        most: bytes.
        left: bytes of each storage at the end, gradients aside.
    """

    def __init__(self) -> None:
        self.most = 0
        self.left: list[int] = []
        self._alive = _Alive()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, number: int) -> None:
        if number == 0:
            gc.disable()  # what only a collection frees is there for too long
            self._alive.__enter__()  # type: ignore[no-untyped-call]
        else:
            self._alive.note([batch, *pl_module.parameters()])
            self._alive.start_over()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, number: int
    ) -> None:
        if number == 1:
            self._alive.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            gradients = _storages([parameter.grad for parameter in pl_module.parameters()])
            self.left = [size for address, size in self._alive.sizes().items() if address not in gradients]
            self.most = self._alive.most
            gc.enable()


@functools.cache
def _steps(stages: int, schedule: str, checkpoint: str) -> list[tuple[int, list[int]]]:
    return run_stages(_most_and_left, stages, balance="size", chunks=8, schedule=schedule, checkpoint=checkpoint)


def _most_and_left(place: Pipelined) -> tuple[int, list[int]]:
    activations = _Activations()
    _train(place, 24, 16, 8 * 128, activations)
    return activations.most, activations.left


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_computing_activations_again_halves_their_memory(stages: int) -> None:
    """Symptom: what is computed again was kept all the same."""
    never, except_last, always = (
        [most for most, _ in _steps(stages, "gpipe", mode)] for mode in ("never", "except_last", "always")
    )
    one_f_one_b = [most for most, _ in _steps(stages, "1f1b", "never")]
    for what, sizes in (("never", never), ("except_last", except_last), ("always", always), ("1f1b", one_f_one_b)):
        print(f"KiB, {what}: {', '.join(f'{size / 1024:.0f}' for size in sizes)}")
    for stage in range(stages):
        assert one_f_one_b[stage] <= never[stage]
        assert always[stage] <= except_last[stage] <= never[stage]
        assert always[stage] <= never[stage] / 2


@pytest.mark.parametrize(
    ("schedule", "checkpoint"),
    [("gpipe", "never"), ("gpipe", "always"), ("1f1b", "except_last"), ("1f1b", "always"), ("1f1b", "never")],
)
def test_nothing_stays_alive_after_a_step(schedule: str, checkpoint: str) -> None:
    """Symptom: a cycle, or a call that is remembered, keeps activations until somebody collects garbage."""
    for most, left in _steps(2, schedule, checkpoint):
        assert most > 128 * 16 * _FLOAT.itemsize, "an activation of a micro-batch"
        assert all(size <= 8 for size in left), "single numbers, which are logged"


class _InFlight(pl.Callback):
    """The most micro-batches of which a stage keeps something in the second step."""

    def __init__(self, received: bool) -> None:
        self.most = 0
        self._received = received
        self._kept: list[weakref.ref[torch.UntypedStorage]] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        net = pl_module.get_submodule("net")
        first = next(index for index, child in enumerate(net.children()) if _is_held(child))
        if self._received:
            net.get_submodule(str(first)).register_forward_pre_hook(lambda _, args: self._note(args[0]))
        else:
            net.get_submodule(str(first + 1)).register_forward_hook(lambda _, args, output: self._note(output))

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self.most = 0

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        others = [kept for kept in self._kept if kept() is not None and kept() is not storage]
        self._kept = [*others, weakref.ref(storage)]
        self.most = max(self.most, len(self._kept))


def _is_held(layer: nn.Module) -> bool:
    return any(not parameter.is_meta for parameter in layer.parameters())


def _keep(place: Pipelined, received: bool) -> int:
    in_flight = _InFlight(received)
    _train(place, 8, 16, 16, in_flight)
    return in_flight.most


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("stages", "chunks"), [(3, 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 8), (4, 8), (4, 2)])]
)
def test_1f1b_keeps_no_more_micro_batches_than_stages_follow(stages: int, chunks: int, schedule: str) -> None:
    """Symptom: all micro-batches are alive at once, or a backward waits for more forwards than the schedule has."""
    layers = [2 * pairs for pairs in partition([1.0] * 8, stages)]
    keep = partial(run_stages, _keep, stages, balance=layers, chunks=chunks, schedule=schedule)
    expected = [chunks if schedule == "gpipe" else min(chunks, stages - stage) for stage in range(stages)]
    assert keep(False, checkpoint="never") == expected
    # Where activations are computed again, what was received is kept. The first stage's input is the user's batch.
    assert keep(True, checkpoint="always")[1:] == expected[1:]
