"""However a module is cut into stages, they compute together what it computes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ringstrategy.pipeline.balance import partition
from ringstrategy.pipeline.calls import Example, flatten_call
from ringstrategy.pipeline.plan import Balance, choose_cut
from tests.helpers.models import plain_sgd
from tests.helpers.pipelines import (
    SCHEDULES,
    Classification,
    assert_like_one_process,
    batches,
    fit_alone,
    fit_stages,
    layered,
    listed,
    record_messages,
)

_LOAD = partial(batches, 12, 12, 3)


@pytest.mark.parametrize("balance", [None, "size", "time", "memory"])
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_an_automatic_cut_has_every_layer_once_and_no_empty_stage(stages: int, balance: Balance) -> None:
    """Symptom: layers are silently dropped, or a stage has none."""
    example = Example(*flatten_call((torch.randn(8, 8, dtype=torch.float64),), {}))
    chosen = choose_cut(layered(), stages, balance, example, chunks=4)
    assert [layer.name for stage in chosen.layers for layer in stage] == ["0", "1", "2", "3", "4"]
    assert len(chosen.layers) == stages
    assert all(chosen.layers)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_batch_norm_is_measured_on_an_example_of_few_rows(rows: int) -> None:
    """Symptom: `example_input_array` with fewer rows than twice the chunks ends the run before it starts."""
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    statistics = {name: buffer.clone() for name, buffer in network.named_buffers()}
    chosen = choose_cut(network, 2, "time", Example(*flatten_call((torch.randn(rows, 4),), {})), chunks=8)
    assert chosen.costs is not None
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in network.named_buffers())


def test_seventy_equal_layers_over_twelve_stages() -> None:
    """Symptom: a partition that rounds the layers per stage covers 60 of 70."""
    sizes = partition([1.0] * 70, 12)
    assert sum(sizes) == 70
    assert set(sizes) == {5, 6}


class _MostlyActivations(Classification):
    """With balance [2, 2, 3] the middle stage has no parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*layered()[:2], nn.ReLU(), nn.Identity(), *layered()[2:]))


class _Frozen(Classification):
    """With balance [2, 2, 1] the stages start with layers 0, 2 and 4, of which one is frozen.

    Args:
        layer: that is frozen.
        filtered: whether the optimizer gets only what trains, and a scheduler.
    """

    def __init__(self, layer: int, filtered: bool) -> None:
        super().__init__()
        self.net.get_submodule(str(layer)).requires_grad_(False)
        self._filtered = filtered

    def configure_optimizers(self) -> Any:
        if not self._filtered:
            return plain_sgd(self.parameters())
        optimizer = plain_sgd(parameter for parameter in self.parameters() if parameter.requires_grad)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def on_train_start(self) -> None:
        self.records["sent"] = record_messages(self)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_without_parameters(schedule: str) -> None:
    """Symptom: the optimizer of the rank that holds only activations cannot be made."""
    ranks = fit_stages(3, _MostlyActivations, _LOAD, chunks=4, balance=[2, 2, 3], schedule=schedule)
    assert_like_one_process(ranks, fit_alone(_MostlyActivations, _LOAD))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("layer", "filtered"), [(0, False), (2, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in
    [(0, True), (2, False), (4, False), (4, True)])]
)  # fmt: skip
def test_a_frozen_stage(layer: int, filtered: bool, schedule: str) -> None:
    """Symptom: a frozen layer trains, its stage's optimizer is empty, or the stages before it get no gradient."""
    build = partial(_Frozen, layer, filtered)
    options = {"max_epochs": 2}
    ranks = fit_stages(3, build, _LOAD, options=options, chunks=4, balance=[2, 2, 1], schedule=schedule)
    assert_like_one_process(ranks, fit_alone(build, _LOAD, options=options))
    for name in ("weight", "bias"):
        assert torch.equal(ranks[0].state[f"net.{layer}.{name}"], layered().get_parameter(f"{layer}.{name}"))
    backwards = Counter(to for to, tag in ranks[1].records["sent"] if tag.startswith("call") and ", B" in tag)
    micro_batches = 2 * (4 + 4 + 3)
    # With a frozen first stage nobody needs the gradient of what it sent.
    assert backwards == ({} if layer == 0 else {0: micro_batches})


class _Skip(nn.Module):
    """A value of the first layer is needed by the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = layered()[0], layered(2)[0], layered(3)[0], layered()[4]

    def forward(self, inputs: Tensor) -> Tensor:
        h1 = self.a(inputs)
        h2 = torch.tanh(self.b(h1))
        h3 = torch.tanh(self.c(h2))
        output: Tensor = self.d(h3 + h1)
        return output


class _TwoReaders(_Skip):
    """A value is read by two later layers, and the input by the last one."""

    def forward(self, inputs: Tensor) -> Tensor:
        h1 = self.a(inputs)
        gate = torch.sigmoid(h1)
        h2 = self.b(h1) * gate
        h3 = torch.tanh(self.c(h2)) * gate
        output: Tensor = self.d(h3 + inputs)
        return output


def _cut(net: type[nn.Module]) -> Classification:
    return Classification(net())


_CUTS = [[1, 3], [2, 2], [3, 1], [1, 1, 2], [1, 2, 1], [2, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("net", "balance"),
    [
        pytest.param(
            net, cut, marks=() if (net, cut) in [(_Skip, [1, 3]), (_TwoReaders, [1, 1, 1, 1])] else pytest.mark.slow
        )
        for net, cut in itertools.product([_Skip, _TwoReaders], _CUTS)
    ],
)
def test_values_that_skip_stages(net: type[nn.Module], balance: list[int], schedule: str) -> None:
    """Symptom: a residual that starts in one stage and ends two stages later is lost."""
    build = partial(_cut, net)
    ranks = fit_stages(len(balance), build, _LOAD, chunks=2, balance=balance, schedule=schedule)
    assert_like_one_process(ranks, fit_alone(build, _LOAD))


class _Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(out), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample = (
            nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride > 1
            else nn.Identity()
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(inputs)))))
        hidden += self.downsample(inputs)
        output: Tensor = self.relu(hidden)
        return output


class _ResidualImages(Classification):
    """A small ResNet.

    Args:
        statistics: whether batch norms train; if not, batches can be split without changing the result.
    """

    def __init__(self, statistics: bool) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            net = nn.Sequential(
                nn.Conv2d(3, 4, 3, padding=1), _Block(4, 4, 1), _Block(4, 6, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                nn.Linear(6, 4),
            )  # fmt: skip
        super().__init__(net.double())
        self._statistics = statistics

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for child in self.modules():
            if isinstance(child, nn.BatchNorm2d):
                child.train(self._statistics)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("stages", "chunks"),
    [(2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(3, 2), (3, 1), (4, 1), (2, 4)])],
)
def test_residual_blocks_with_batch_norm(stages: int, chunks: int, schedule: str) -> None:
    """Symptom: the branch around a block is lost where a stage begins within the block."""
    build = partial(_ResidualImages, statistics=chunks == 1)
    load = partial(batches, 6, 6, 4, shape=(3, 8, 8))
    ranks = fit_stages(stages, build, load, chunks=chunks, schedule=schedule, balance="size")
    assert_like_one_process(ranks, fit_alone(build, load))


class _InPlace(Classification):
    """The second stage begins with an operation in place; a hook of the user's keeps what the first one returned."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(layered()[0], nn.ReLU(inplace=True), *layered()[2:]))
        self.kept: list[tuple[Tensor, Tensor]] = []

    def on_train_start(self) -> None:
        self.net.get_submodule("0").register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.kept.append((output, output.detach().clone()))

    def on_train_end(self) -> None:
        self.record("kept", len(self.kept))
        self.record("altered", sum(not torch.equal(now, before) for now, before in self.kept))
        self.kept.clear()


@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_stage_that_begins_with_an_operation_in_place(checkpoint: str, schedule: str) -> None:
    """Symptom: "a leaf Variable that requires grad is being used in an in-place operation"."""
    ranks = fit_stages(
        2, _InPlace, _LOAD, chunks=4, balance=[1, 4], schedule=schedule, checkpoint=checkpoint
    )  # fmt: skip
    assert_like_one_process(ranks, fit_alone(_InPlace, _LOAD))
    assert ranks[0].records["kept"][0] >= 4 + 4 + 3
    assert ranks[0].records["altered"] == [0]


class _Outputs(nn.Module):
    """Hands on integers, booleans, floats that nobody reads, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layered()[0], layered(2)[0]
        self.last, self.embedding = layered()[4], nn.Embedding(2, 8, dtype=torch.float64)
        nn.init.constant_(self.embedding.weight, 0.5)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
        nn.init.constant_(self.attention.in_proj_weight, 0.1)
        nn.init.constant_(self.attention.out_proj.weight, 0.2)

    def forward(self, batch: dict[str, Tensor], scale: int, shift: Tensor) -> dict[str, Any]:
        inputs, flags = batch["x"], batch["flags"]
        hidden = torch.tanh(self.first(inputs))
        positive = (inputs[:, 0] > 0).long()
        ignored = hidden.square() * 2
        rows = hidden.shape[0]
        hidden = self.second(hidden).masked_fill(flags, 0.25) + shift
        hidden = hidden + self.embedding(positive) * scale
        hidden, weights = self.attention(*[hidden.view(rows, 1, 8)] * 3, need_weights=False)
        return {"logits": self.last(hidden.reshape(rows, -1)), "ignored": ignored, "weights": weights, "scale": scale}


class _Mixed(Classification):
    def __init__(self) -> None:
        super().__init__(_Outputs())
        self.net.get_submodule("embedding").register_forward_pre_hook(self._note)

    def _note(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.record("dtype", args[0].dtype)

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        output = self.net(inputs, 3, shift=torch.tensor(0.125, dtype=torch.float64))
        assert output["weights"] is None
        assert output["scale"] == 3
        assert output["ignored"].shape == (len(labels), 8)
        return F.cross_entropy(output["logits"], labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[1]))


def _with_flags() -> DataLoader[Any]:
    pairs: Iterable[tuple[Tensor, Tensor]] = batches(12, 12, 3)
    return listed([({"x": inputs, "flags": inputs > 0.5}, labels) for inputs, labels in pairs])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "balance",
    [[1, 1, 3], *(pytest.param(b, marks=pytest.mark.slow) for b in [[1, 4], [2, 3], [3, 2], [4, 1], [1, 1, 1, 2]])],
)
def test_integers_booleans_none_and_unused_values_cross_stages(balance: Sequence[int], schedule: str) -> None:
    """Symptom: a mask handed from stage to stage fails in backward, or arrives as another dtype."""
    ranks = fit_stages(len(balance), _Mixed, _with_flags, chunks=2, balance=balance, schedule=schedule)
    assert_like_one_process(ranks, fit_alone(_Mixed, _with_flags))
    assert {dtype for rank in ranks for dtype in rank.records.get("dtype", [])} == {torch.int64}
