"""Every family of torchvision's classifiers, cut automatically into stages, trains as it does in one process.

A batch norm normalises each micro-batch by itself, so that outputs and gradients of several micro-batches are not those
of the whole batch. The oracle of that case is one process that takes the micro-batches through the network one after
another and computes the loss on all outputs together, while running statistics are those of the mini-batch: each batch
norm moves them once, by all that it saw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader
from torchvision.models import ConvNeXt, MaxVit, ResNet, SwinTransformer, VisionTransformer, get_model, inception
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.resnet import Bottleneck
from torchvision.ops import StochasticDepth

from tests.helpers.pipelines import Batch, Classification, Pipelined, batches, run_alone, run_stages

_ROWS = 8
_CLASSES = 10


def _with_small_head(name: str) -> nn.Module:
    """A network with a classifier of 64 hidden features in place of 4096, which are nearly all of its parameters."""
    net: nn.Module = get_model(name, num_classes=_CLASSES)
    head = net.get_submodule("classifier")
    assert isinstance(head, nn.Sequential)
    linear = [(index, layer.in_features) for index, layer in enumerate(head) if isinstance(layer, nn.Linear)]
    widths = [linear[0][1], 64, 64, _CLASSES]
    for (index, _), inputs, outputs in zip(linear, widths[:-1], widths[1:], strict=True):
        head[index] = nn.Linear(inputs, outputs)
    return net


class _SmallAux(inception.InceptionAux):  # type: ignore[misc]
    """The auxiliary classifier of Inception, which takes images of 299 x 299, for smaller ones."""

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.conv1(self.conv0(F.adaptive_avg_pool2d(inputs, 5)))
        scores: Tensor = self.fc(F.adaptive_avg_pool2d(features, 1).flatten(1))
        return scores


_INCEPTION_BLOCKS = [
    inception.BasicConv2d,
    inception.InceptionA,
    inception.InceptionB,
    inception.InceptionC,
    inception.InceptionD,
    inception.InceptionE,
    _SmallAux,
]
_CONVNEXT = [CNBlockConfig(16, 24, 3), CNBlockConfig(24, 32, 3), CNBlockConfig(32, 48, 9), CNBlockConfig(48, None, 3)]
_SWIN = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24],
         "window_size": [7, 7], "stochastic_depth_prob": 0.2}  # fmt: skip
_MAXVIT = {"input_size": (64, 64), "stem_channels": 16, "partition_size": 2, "block_channels": [16, 24, 32, 48],
           "block_layers": [1, 1, 2, 1], "head_dim": 8, "stochastic_depth_prob": 0.2}  # fmt: skip
_VIT = {"image_size": 32, "patch_size": 8, "num_layers": 12, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}

# By name: side of the images, and what builds the network. Where batch norms normalise micro-batches of two images, the
# last layers still see four values of each: by two values alone, a norm is too steep to compare anything behind it.
_FAMILIES: dict[str, tuple[int, Callable[..., nn.Module]]] = {
    "alexnet": (64, partial(_with_small_head, "alexnet")),
    "convnext_tiny": (32, partial(ConvNeXt, _CONVNEXT, num_classes=_CLASSES)),
    "densenet121": (64, partial(get_model, "densenet121", num_classes=_CLASSES)),
    "efficientnet_b0": (64, partial(get_model, "efficientnet_b0", num_classes=_CLASSES)),
    "googlenet": (64, partial(get_model, "googlenet", num_classes=_CLASSES, init_weights=False)),
    "inception_v3": (
        107,
        partial(
            get_model, "inception_v3", num_classes=_CLASSES, init_weights=False, inception_blocks=_INCEPTION_BLOCKS
        ),
    ),
    "maxvit_t": (64, partial(MaxVit, num_classes=_CLASSES, **_MAXVIT)),
    "mnasnet0_5": (64, partial(get_model, "mnasnet0_5", num_classes=_CLASSES)),
    "mobilenet_v2": (64, partial(get_model, "mobilenet_v2", num_classes=_CLASSES)),
    "mobilenet_v3_small": (64, partial(get_model, "mobilenet_v3_small", num_classes=_CLASSES)),
    "regnet_y_400mf": (64, partial(get_model, "regnet_y_400mf", num_classes=_CLASSES)),
    "resnet18": (64, partial(get_model, "resnet18", num_classes=_CLASSES)),
    "resnext50_32x4d": (
        64,
        partial(ResNet, Bottleneck, [2, 2, 2, 2], num_classes=_CLASSES, groups=32, width_per_group=4),
    ),
    "shufflenet_v2_x0_5": (64, partial(get_model, "shufflenet_v2_x0_5", num_classes=_CLASSES)),
    "squeezenet1_1": (32, partial(get_model, "squeezenet1_1", num_classes=_CLASSES)),
    "swin_t": (32, partial(SwinTransformer, num_classes=_CLASSES, **_SWIN)),
    "vgg11_bn": (64, partial(_with_small_head, "vgg11_bn")),
    "vit_b_16": (32, partial(VisionTransformer, num_classes=_CLASSES, **_VIT)),
}

_AUXILIARY = {"googlenet": 2, "inception_v3": 1}  # classifiers beside the main one, in training


def _network(name: str) -> nn.Module:
    """One of the family, in double precision. It draws no random numbers, since a stage draws others than a process."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = _FAMILIES[name][1]().double()
    for layer in net.modules():
        if isinstance(layer, (nn.Dropout, StochasticDepth)):
            layer.p = 0.0
    return net


def _images(name: str, count: int) -> DataLoader[Any]:
    side = _FAMILIES[name][0]
    return batches(*[_ROWS] * count, shape=(3, side, side), classes=_CLASSES)


def _batch_norms(module: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


class _Images(Classification):
    """Trains one of the family. Auxiliary classifiers add to the loss."""

    def __init__(self, name: str) -> None:
        super().__init__(_network(name), partial(torch.optim.SGD, lr=0.01))
        self._auxiliary = _AUXILIARY.get(name, 0)

    def loss(self, batch: Batch) -> Tensor:
        outputs = self._outputs(batch[0])
        first, *others = (F.cross_entropy(scores, batch[1]) for scores in pytree.tree_leaves(outputs))
        assert len(others) == self._auxiliary
        return first + 0.3 * torch.stack(others).sum() if others else first

    def _outputs(self, images: Tensor) -> Any:
        return self.net(images)

    def on_train_start(self) -> None:
        self.records["held"] = [name for name, parameter in self.named_parameters() if not parameter.is_meta]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.record("output", self.net(batch[0]))


class _InMicroBatches(_Images):
    """The same in one process that takes micro-batches through the network one after another."""

    def __init__(self, name: str, chunks: int) -> None:
        super().__init__(name)
        self._chunks = chunks

    def _outputs(self, images: Tensor) -> Any:
        norms = [_Mindful(norm) for norm in _batch_norms(self.net)]
        outputs = [self.net(part) for part in torch.chunk(images, self._chunks)]
        for norm in norms:
            norm.move_once()
        return pytree.tree_map(lambda *parts: torch.cat(parts), *outputs)


class _Mindful:
    """Keeps what a batch norm sees of a mini-batch."""

    def __init__(self, norm: _BatchNorm) -> None:
        self._norm = norm
        self._before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        self._seen: list[Tensor] = []
        self._hook = norm.register_forward_pre_hook(lambda _, inputs: self._seen.append(inputs[0].detach()))

    def move_once(self) -> None:
        """Move the running statistics by all of the mini-batch, and not as its parts have moved them."""
        self._hook.remove()
        for name, buffer in self._before.items():
            setattr(self._norm, name, buffer)
        with torch.no_grad():
            self._norm(torch.cat(self._seen))


def _train(place: Pipelined, module: _Images, name: str) -> dict[str, Any]:
    """Two steps, then one batch of evaluation."""
    trainer = place.trainer()
    trainer.fit(module, _images(name, 2), _images(name, 1))
    assert trainer.global_step == 2
    return {
        "state": dict(module.state_dict()),
        "metrics": dict(trainer.callback_metrics),
        "output": module.records["output"],
    }


def _train_alone(place: Pipelined, name: str, chunks: int, path: Path) -> None:
    module = _Images(name)
    if chunks > 1 and _batch_norms(module):
        module = _InMicroBatches(name, chunks)
    torch.save(_train(place, module, name), path)


def _train_in_stages(place: Pipelined, name: str, runs: Sequence[tuple[str, int, Path]]) -> list[list[str]]:
    """Train, and compare with one process. Returns which parameters this stage held, by run."""
    held = []
    for schedule, chunks, path in runs:
        module = _Images(name)
        found = _train(replace(place, arguments={"schedule": schedule, "chunks": chunks}), module, name)
        expected = torch.load(path, mmap=True, weights_only=True)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-9)
        held.append(module.records["held"])
    return held


Oracle = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def train_alone(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Trains a network in one process, given the micro-batches; returns the file that has the results."""
    folder = tmp_path_factory.mktemp("alone")

    def train(name: str, chunks: int) -> Path:
        path = folder / f"{name}-{chunks}"
        if not path.exists():
            for other in folder.iterdir():
                if not other.name.startswith(f"{name}-"):
                    other.unlink()
            run_alone(_train_alone, name, chunks, path, timeout=120)
        return path

    return train


_QUICK = [("squeezenet1_1", 2)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        pytest.param(name, stages, marks=() if (name, stages) in _QUICK else pytest.mark.slow)
        for name in _FAMILIES
        for stages in (2, 3, 4)
    ],
)
def test_a_classifier_in_stages_trains_like_one_process(name: str, stages: int, train_alone: Oracle) -> None:
    """Symptom: a value that skips a stage, or an auxiliary output, is lost; statistics move by micro-batches."""
    runs = [("gpipe", 1), ("gpipe", 4), *([("1f1b", 4)] if stages == 3 else [])]
    with_results = [(schedule, chunks, train_alone(name, chunks)) for schedule, chunks in runs]
    ranks = run_stages(_train_in_stages, stages, name, with_results, timeout=240)
    names = [f"net.{parameter}" for parameter, _ in _network(name).named_parameters()]
    for stages_of_run in zip(*ranks, strict=True):
        assert all(len(held) < len(names) for held in stages_of_run), "a stage holds the whole network"
        assert sorted(held for stage in stages_of_run for held in stage) == sorted(names)
