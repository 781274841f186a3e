"""Every family of torchvision's classifiers, cut automatically into stages, trains as it does in one process.

A batch norm normalises each micro-batch by itself, so with several of them a pipeline and one process that sees whole
batches compute different things. The oracle of that case is one process that takes every micro-batch through the
network by itself, and puts the outputs together for the loss. Its running statistics are those of the mini-batch: every
batch norm moves them once, by the concatenation of what it saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from torchvision.models import MaxVit, VisionTransformer, get_model
from torchvision.models.inception import BasicConv2d, InceptionA, InceptionAux, InceptionB, InceptionC, InceptionD
from torchvision.models.inception import InceptionE
from torchvision.ops import StochasticDepth

from tests.helpers.models import plain_sgd
from tests.helpers.pipelines import Batch, Classification, Pipelined, batches, run_alone, run_stages

_ROWS, _CLASSES = 8, 10


def _with_small_head(name: str) -> nn.Module:
    """A network whose classifier has 64 hidden features instead of 4096, which are nearly all of its parameters."""
    net = get_model(name, num_classes=_CLASSES)
    first, second, last = (layer for layer in net.classifier if isinstance(layer, nn.Linear))
    for layer, inputs, outputs in ((first, first.in_features, 64), (second, 64, 64), (last, 64, _CLASSES)):
        index = next(index for index, child in enumerate(net.classifier) if child is layer)
        net.classifier[index] = nn.Linear(inputs, outputs)
    return net


class _SmallAux(InceptionAux):
    """The auxiliary classifier of Inception, which needs images of 299 x 299, for smaller ones."""

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.conv1(self.conv0(F.adaptive_avg_pool2d(inputs, 5)))
        return self.fc(F.adaptive_avg_pool2d(features, 1).flatten(1))


_INCEPTION = [BasicConv2d, InceptionA, InceptionB, InceptionC, InceptionD, InceptionE, _SmallAux]
_VIT = {"image_size": 32, "patch_size": 8, "num_layers": 12, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}
_MAXVIT = {"input_size": (64, 64), "stem_channels": 16, "partition_size": 2, "block_channels": [16, 24, 32, 48],
           "block_layers": [2, 2, 5, 2], "head_dim": 8, "stochastic_depth_prob": 0.2}  # fmt: skip

# By name: side of the images, and what builds the network.
_FAMILIES: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    **{
        name: (32, partial(get_model, name, num_classes=_CLASSES))
        for name in ("convnext_tiny", "densenet121", "efficientnet_b0", "mnasnet0_5", "mobilenet_v2",
                     "mobilenet_v3_small", "regnet_y_400mf", "resnet18", "resnext50_32x4d", "shufflenet_v2_x0_5",
                     "squeezenet1_1", "swin_t")
    },
    "alexnet": (64, partial(_with_small_head, "alexnet")),
    "googlenet": (64, partial(get_model, "googlenet", num_classes=_CLASSES, init_weights=False)),
    "inception_v3": (
        107,
        partial(get_model, "inception_v3", num_classes=_CLASSES, init_weights=False, inception_blocks=_INCEPTION),
    ),
    "maxvit_t": (64, partial(MaxVit, num_classes=_CLASSES, **_MAXVIT)),
    "vgg11_bn": (32, partial(_with_small_head, "vgg11_bn")),
    "vit_b_16": (32, partial(VisionTransformer, num_classes=_CLASSES, **_VIT)),
}  # fmt: skip


def _network(name: str) -> nn.Module:
    """One of the family, in double precision, that draws no random numbers: stages draw others than one process."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = _FAMILIES[name][1]().double()
    for child in net.modules():
        if isinstance(child, (nn.Dropout, StochasticDepth)):
            child.p = 0.0
    return net


def _images(name: str, count: int) -> DataLoader[Any]:
    side = _FAMILIES[name][0]
    return batches(*[_ROWS] * count, shape=(3, side, side), classes=_CLASSES)


class _Images(Classification):
    """Trains one of the family, with the losses of its auxiliary classifiers."""

    def __init__(self, name: str) -> None:
        super().__init__(_network(name), partial(torch.optim.SGD, lr=1e-3))

    def predict(self, images: Tensor) -> Any:
        return self.net(images)

    def loss(self, batch: Batch) -> Tensor:
        outputs = self.predict(batch[0])
        if isinstance(outputs, Tensor):
            return F.cross_entropy(outputs, batch[1])
        main, *auxiliary = (F.cross_entropy(output, batch[1]) for output in (outputs.logits, *_auxiliary(outputs)))
        return main + 0.3 * torch.stack(auxiliary).sum()

    def on_train_start(self) -> None:
        self.record("held", sum(not parameter.is_meta for parameter in self.parameters()))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        output = self.net(batch[0])
        self.record("output", output)
        self.log("val_loss", F.cross_entropy(output, batch[1]), batch_size=len(output))


def _auxiliary(outputs: Any) -> list[Tensor]:
    return [value for field, value in outputs._asdict().items() if field.startswith("aux")]


class _ImagesInMicroBatches(_Images):
    """The oracle: what a pipeline of ``chunks`` micro-batches computes, in one process."""

    def __init__(self, name: str, chunks: int) -> None:
        super().__init__(name)
        self.chunks = chunks

    def predict(self, images: Tensor) -> Any:
        norms = {child: _Seen(child) for child in self.net.modules() if isinstance(child, _BatchNorm)}
        outputs = [self.net(part) for part in torch.chunk(images, self.chunks)]
        for seen in norms.values():
            seen.move_once()
        return pytree.tree_map(lambda *parts: torch.cat(parts), *outputs)


class _Seen:
    """What a batch norm sees of a mini-batch."""

    def __init__(self, norm: _BatchNorm) -> None:
        self._norm = norm
        self._before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        self._inputs: list[Tensor] = []
        self._hook = norm.register_forward_pre_hook(lambda _, inputs: self._inputs.append(inputs[0].detach()))

    def move_once(self) -> None:
        """Take back how each micro-batch has moved the running statistics, and move them by all of it."""
        self._hook.remove()
        for name, buffer in self._before.items():
            setattr(self._norm, name, buffer)  # the graph may need the old one as it is
        with torch.no_grad():
            self._norm(torch.cat(self._inputs))


def _train(place: Pipelined, module: _Images, name: str) -> dict[str, Any]:
    trainer = place.trainer()
    trainer.fit(module, _images(name, 2), _images(name, 1))
    return {
        "state": module.state_dict(),
        "metrics": dict(trainer.callback_metrics),
        "output": module.records["output"],
        "steps": trainer.global_step,
    }


def _train_alone(place: Pipelined, name: str, chunks: int, path: str) -> None:
    module = _ImagesInMicroBatches(name, chunks) if chunks > 1 else _Images(name)
    torch.save(_train(place, module, name), path)


def _train_in_stages(place: Pipelined, name: str, runs: list[tuple[str, int, str]]) -> list[int]:
    held = 0
    import time
    for schedule, chunks, path in runs:
        module = _Images(name)
        t = time.time()
        found = _train(replace(place, arguments={"schedule": schedule, "chunks": chunks}), module, name)
        expected = torch.load(path, mmap=True, weights_only=True)
        worst = max((a-b).abs().max().item() for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True) if isinstance(a, Tensor))
        print(place.rank, schedule, chunks, module.records["held"], time.time() - t, worst)
        if worst > 1e-9:
            print(sorted(((found["state"][k]-v).abs().max().item(),k) for k,v in expected["state"].items())[-10:])
            print({k: v-expected["metrics"][k] for k,v in found["metrics"].items()})
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-9)
    return held


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], str]]:
    folder = tmp_path_factory.mktemp("oracles")

    def path_of(name: str, chunks: int) -> str:
        path = folder / f"{name}.{chunks}"
        if not path.exists():
            for other in folder.iterdir():
                if other.stem != name:
                    other.unlink()
            run_alone(_train_alone, name, chunks, str(path), timeout=100)
        return str(path)

    return path_of


_QUICK = [("resnet18", 2), ("googlenet", 2)]


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        pytest.param(name, stages, marks=() if (name, stages) in _QUICK else pytest.mark.slow)
        for name in sorted(_FAMILIES)
        for stages in (2, 3, 4)
    ],
)
@pytest.mark.timeout(300)
def test_a_classifier_in_stages_trains_like_one_process(
    name: str, stages: int, oracle: Callable[[str, int], str]
) -> None:
    """Symptom: a value that skips a stage is lost, an auxiliary output is missing, or a statistic moves twice."""
    runs = [(schedule, chunks, oracle(name, chunks)) for schedule, chunks in (("gpipe", 1), ("gpipe", 4), ("1f1b", 4))]
    run_stages(_train_in_stages, stages, name, runs, timeout=240)
