"""Every family of torchvision's classifiers, cut into stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ringstrategy.pipeline.balance import partition
from ringstrategy.pipeline.calls import flatten_call
from ringstrategy.pipeline.costs import parameter_bytes
from ringstrategy.pipeline.programs import StageProgram, cut
from ringstrategy.pipeline.tracing import Traces, common_layers

# By name: side of the images, and arguments.
_FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "alexnet": (64, {}),
    "convnext_tiny": (32, {}),
    "densenet121": (32, {}),
    "efficientnet_b0": (32, {}),
    "googlenet": (32, {"init_weights": False}),
    "inception_v3": (299, {"init_weights": False}),
    "maxvit_t": (224, {}),
    "mnasnet0_5": (32, {}),
    "mobilenet_v2": (32, {}),
    "mobilenet_v3_small": (32, {}),
    "regnet_y_400mf": (32, {}),
    "resnet18": (32, {}),
    "resnext50_32x4d": (32, {}),
    "shufflenet_v2_x0_5": (32, {}),
    "squeezenet1_1": (32, {}),
    "swin_t": (32, {}),
    "vgg11_bn": (32, {}),
    "vit_b_16": (32, {"image_size": 32}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _FAMILIES)
def test_a_classifier_in_stages_is_the_classifier(name: str) -> None:
    side, arguments = _FAMILIES[name]
    torch.manual_seed(0)
    module = torchvision.models.get_model(name, num_classes=10, **arguments).double()
    inputs, call = flatten_call((torch.randn(2, 3, side, side, dtype=torch.float64),), {})
    traces = Traces(module)
    found = [(training, module.train(training) and traces.get(call)) for training in (True, False)]
    layers = common_layers([trace for _, trace in found])
    assert {name for layer in layers for name in layer.parameters} == {name for name, _ in module.named_parameters()}
    before = [buffer.clone() for buffer in module.buffers()]
    for training, trace in found:
        module.train(training)
        torch.manual_seed(1)
        with torch.no_grad():
            expected = module(*inputs)
        after = [buffer.clone() for buffer in module.buffers()]
        for stages in (2, 3, 4):
            sizes = partition([float(parameter_bytes(module, layer)) for layer in layers], stages)
            anchors = [layers[sum(sizes[:stage])].anchor for stage in range(1, stages)]
            _restore(module, before)
            torch.manual_seed(1)
            _assert_equal(_run(cut(trace, anchors), inputs), expected)
            _assert_equal(list(module.buffers()), after)
        _restore(module, before)


def _run(programs: tuple[StageProgram, ...], inputs: list[Tensor]) -> Any:
    """The output of the last stage."""
    values: tuple[Any, ...] = ()
    with torch.no_grad():
        for program in programs:
            values = program(pytree.tree_map_only(Tensor, Tensor.clone, values), inputs)
    return values[0]


def _restore(module: nn.Module, buffers: list[Tensor]) -> None:
    for buffer, value in zip(module.buffers(), buffers, strict=True):
        buffer.copy_(value)


def _assert_equal(left: Any, right: Any) -> None:
    """Same structure, and values that are equal up to rounding."""
    assert type(left) is type(right)
    left, right = (dict(enumerate(pytree.tree_leaves(side))) for side in (left, right))
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
