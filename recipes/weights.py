"""Weights from a file that is there already: torchvision's, or those of a run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torchvision
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

__all__ = ["load_weights"]

_PREFIX = "network."  # of the network's weights in a checkpoint of a run
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # heads that recipes build no network with


def load_weights(network: nn.Module, path: str, head: str, name: str) -> None:
    """Fill a network; a head for another number of classes stays as it was initialised, which is said in the log.

    Args:
        network: what to fill, before anything is put around it.
        path: a state dict of the network, as torchvision publishes it, or a checkpoint of a run with that network.
        head: name of the layer that makes the logits.
        name: of the network in torchvision, to tell where its weights can be had.

    Raises:
        FileNotFoundError: there is no such file; the message says where to get one.
        ValueError: the file holds no weights, or those of another network.
    """
    weights = _read(path, name)
    own = network.state_dict()
    weights = {key: value for key, value in weights.items() if not key.startswith(_AUXILIARY)}
    replaced = [key for key in own if key.startswith(f"{head}.") and _shape(weights, key) not in (None, own[key].shape)]
    problems = {
        "missing from the file": own.keys() - weights.keys(),
        "not in the network": weights.keys() - own.keys(),
        "of another shape": {key for key in own if _shape(weights, key) not in (None, own[key].shape)} - {*replaced},
    }
    told = [f"{_some(keys)} {what}" for what, keys in problems.items() if keys]
    if told:
        raise ValueError(
            f"the weights in {os.path.abspath(path)} are not those of this network ({name}): {'; '.join(told)}. "
            "Network, its arguments and small_images must be those with which the weights were trained."
        )
    network.load_state_dict({key: own[key] if key in replaced else weights[key] for key in own})
    if replaced:
        rank_zero_info(f"{head} starts from scratch: {path} has it for another number of classes")


def _read(path: str, name: str) -> Mapping[str, Tensor]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"there are no weights in {os.path.abspath(path)}{_where_to_get(name)}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{os.path.abspath(path)} cannot be read as weights: {error}") from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        own = content["state_dict"]
        return {key.removeprefix(_PREFIX): value for key, value in own.items() if key.startswith(_PREFIX)}
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{os.path.abspath(path)} holds no weights: expected a state dict or a checkpoint of a run")
    return content


def _where_to_get(name: str) -> str:
    if name not in torchvision.models.list_models(module=torchvision.models):
        return ""
    url = torchvision.models.get_model_weights(name).DEFAULT.url
    return f"; torchvision publishes some for {name}, to be downloaded by hand: {url}"


def _shape(weights: Mapping[str, Tensor], key: str) -> torch.Size | None:
    return weights[key].shape if key in weights else None


def _some(keys: Iterable[str]) -> str:
    ordered = sorted(keys)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
