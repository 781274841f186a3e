from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from networks import build_network, find_head
from torchvision import models
from weights import load_weights


@pytest.mark.parametrize(("name", "channels"), [("small_cnn", 1), ("small_cnn", 3), ("resnet18", 1), ("resnet18", 3)])
def test_a_network_maps_images_to_logits(name: str, channels: int) -> None:
    network = build_network(name, in_channels=channels, num_classes=7)
    assert network(torch.randn(2, channels, 16, 16)).shape == (2, 7)


# One of each family whose head or first layers are called differently.
FAMILIES = {
    "resnet18": "fc",
    "mobilenet_v3_small": "classifier.3",
    "squeezenet1_1": "classifier.1",
    "densenet121": "classifier",
    "shufflenet_v2_x0_5": "fc",
    "googlenet": "fc",
    "efficientnet_b0": "classifier.1",
    "mnasnet0_5": "classifier.1",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_small_images_keep_their_resolution_and_the_head_is_found(name: str) -> None:
    with torch.device("meta"):
        network = build_network(name, in_channels=3, num_classes=7, small_images=True)
        first = next(module for module in network.modules() if isinstance(module, torch.nn.Conv2d))
        seen: list[torch.Size] = []
        first.register_forward_hook(lambda *args: seen.append(args[-1].shape))
        assert network(torch.empty(2, 3, 32, 32)).shape == (2, 7)
    assert seen[0][2:] == (32, 32)
    assert find_head(network, 7) == FAMILIES[name]


def test_a_network_takes_arguments_of_its_builder() -> None:
    with torch.device("meta"):
        network = build_network("vit_b_16", 3, 7, arguments={"image_size": 32})
        assert network(torch.empty(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet19"}, "unknown network 'resnet19': use 'small_cnn' or .*did you mean .*resnet18"),
        ({"name": "fcn_resnet50"}, "unknown network 'fcn_resnet50'"),
        ({"name": "resnet18", "in_channels": 2}, "resnet18 takes images of 1 or 3 channels, got in_channels=2"),
        ({"name": "resnet18", "arguments": {"depth": 3}}, "resnet18 cannot be built with {'depth': 3}: .*'depth'"),
        ({"name": "small_cnn", "arguments": {"depth": 3}}, "small_cnn takes no arguments"),
        ({"name": "swin_t", "small_images": True}, "swin_t cuts images into patches"),
    ],
)
def test_what_cannot_be_built_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        build_network(**{"in_channels": 3, "num_classes": 7} | arguments)


def _published(path: Path) -> dict[str, torch.Tensor]:
    """A file as torchvision publishes it, with other values than a new network has."""
    weights: dict[str, torch.Tensor] = models.mobilenet_v3_small(num_classes=1000).state_dict()
    for number, value in enumerate(weights.values()):
        value.fill_(number)
    torch.save(weights, path)
    return weights


def test_weights_from_a_file_with_a_new_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = _published(tmp_path / "weights.pth")
    network = build_network("mobilenet_v3_small", 3, num_classes=7)
    head = find_head(network, 7)
    before = network.get_submodule(head).weight.clone()  # type: ignore[operator]
    with caplog.at_level("INFO"):
        load_weights(network, str(tmp_path / "weights.pth"), head, "mobilenet_v3_small")
    assert "classifier.3 starts from scratch" in caplog.text
    for key, value in network.state_dict().items():
        if not key.startswith("classifier.3."):
            assert torch.equal(value, weights[key]), key
    assert torch.equal(network.get_submodule(head).weight, before)  # type: ignore[arg-type]


def test_weights_for_as_many_classes_are_taken_whole(tmp_path: Path) -> None:
    weights = _published(tmp_path / "weights.pth")
    network = build_network("mobilenet_v3_small", 3, num_classes=1000)
    load_weights(network, str(tmp_path / "weights.pth"), find_head(network, 1000), "mobilenet_v3_small")
    assert all(torch.equal(value, weights[key]) for key, value in network.state_dict().items())


def test_weights_of_a_run(tmp_path: Path) -> None:
    trained, fresh = (build_network("small_cnn", 1, 10) for _ in range(2))
    state = {f"network.{key}": value for key, value in trained.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "run.ckpt")
    load_weights(fresh, str(tmp_path / "run.ckpt"), find_head(fresh, 10), "small_cnn")
    assert all(torch.equal(value, trained.state_dict()[key]) for key, value in fresh.state_dict().items())


def test_weights_that_are_missing_are_named_with_where_to_get_them(tmp_path: Path) -> None:
    network = build_network("mobilenet_v3_small", 3, num_classes=7)
    url = models.MobileNet_V3_Small_Weights.DEFAULT.url
    with pytest.raises(FileNotFoundError, match=rf"no weights in {tmp_path}/none\.pth; .*by hand: {url}"):
        load_weights(network, str(tmp_path / "none.pth"), "classifier.3", "mobilenet_v3_small")


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    _published(tmp_path / "weights.pth")
    network = build_network("mobilenet_v3_small", 3, num_classes=7, small_images=True)
    network.set_submodule("features.0.0", torch.nn.Conv2d(3, 16, 5))
    with pytest.raises(ValueError, match=r"not those of this network .*features\.0\.0\.bias missing from the file; "):
        load_weights(network, str(tmp_path / "weights.pth"), "classifier.3", "mobilenet_v3_small")


@pytest.mark.parametrize("content", [b"no weights", b""])
def test_a_file_that_holds_no_weights_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(content)
    network = build_network("small_cnn", 1, 10)
    with pytest.raises(ValueError, match=r"weights\.pth cannot be read as weights"):
        load_weights(network, str(tmp_path / "weights.pth"), "13", "small_cnn")
