"""Weights, buffers and optimizer state of all stages, put together; one tensor at a time.

Of the stages that hold a tensor, the lowest sends it to those that need it and do not hold it. All stages go through
the same list in the same order, so that they never wait for each other in a circle; and a sender goes on when its
receiver has the tensor, so that no more than one is on its way:

    stage 0  ◀── net.4.weight ── stage 1
             ─── received ─────▶
             ◀── net.4.bias ──── stage 1
             ─── received ─────▶
             ◀── net.6.weight ── stage 2
             ─── received ─────▶

Every function here that takes channels is collective over the stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer

from ringstrategy.pipeline.channels import Channel
from ringstrategy.pipeline.placement import Part, Placement
from ringstrategy.process_group import RankGroup

__all__ = [
    "drop_absent_state",
    "find_absent",
    "gather_optimizer_state",
    "gather_state_dict",
    "keep_own_optimizer_state",
    "make_optimizer_whole",
    "make_whole",
    "take_from_first",
]

_CPU = torch.device("cpu")


def gather_state_dict(
    placement: Placement,
    channels: Mapping[int, Channel],
    *,
    to: int | None = 0,
    device: torch.device = _CPU,
    read: Callable[[], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The state dict of the whole module. Collective.

    The module is whole while its ``state_dict()`` runs, so that overridden ones and hooks see what they would see in
    one process. Its parameters are not touched.

    Args:
        placement: of the module.
        channels: to the other stages.
        to: the stage that gets everything; None for all stages.
        device: where received tensors go; this stage's own are shared with the module, as ever.
        read: the module's ``state_dict``, where that of the instance calls this function.

    Returns:
        On stage ``to`` the ordinary state dict of the whole module: keys, order and values. Elsewhere the module's
        own, with meta tensors for what is absent.
    """
    values = list(_receive_parts(placement, channels, to, device))
    extra = list(_receive_extra_states(placement, channels, to))
    with _lent(values):
        state: dict[str, Any] = placement.module.state_dict() if read is None else read()
    for prefix, _, value in extra:
        key = f"{prefix}.{_EXTRA_STATE}" if prefix else _EXTRA_STATE
        if key in state:
            state[key] = value
    return state


@torch.inference_mode(mode=False)
def make_whole(
    placement: Placement, channels: Mapping[int, Channel], *, to: int | None = None, device: torch.device = _CPU
) -> None:
    """Give absent parameters and buffers their values: the end of :meth:`Placement.leave`. Collective.

    Parameters keep their identity.

    Args:
        placement: of the module.
        channels: to the other stages.
        to: the only stage whose module becomes whole; None for all stages.
        device: where received tensors go.
    """
    for part, value in _receive_parts(placement, channels, to, device):
        part.fill(value)
    for _, module, value in _receive_extra_states(placement, channels, to):
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            module.set_extra_state(value)


@torch.inference_mode(mode=False)
def take_from_first(module: nn.Module, group: RankGroup) -> None:
    """Give rank 0's values to what has none elsewhere, after only rank 0's module was made whole. Collective.

    What has no values on rank 0 either stays as it is: `configure_model` may be about to give it some.

    Args:
        module: the whole module.
        group: all ranks.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    first, *others = group.exchange([name for name, tensor in named if tensor.is_meta])
    owners = {name: frozenset({0}) for names in others for name in names if name not in first}
    parts = Placement(module, owners, group.rank).parts
    for part in parts:
        if part.tensor is not None and part.tensor.is_meta:
            part.fill(torch.empty_like(part.tensor, device=_CPU))
    group.broadcast_tensors(part.tensor for part in parts if part.tensor is not None)


def gather_optimizer_state(
    optimizer: Optimizer,
    placement: Placement,
    channels: Mapping[int, Channel],
    *,
    to: int | None = 0,
    device: torch.device = _CPU,
) -> dict[str, Any]:
    """The state of an optimizer over the whole module. Collective.

    Args:
        optimizer: has the parameters of all stages, in the same order on all of them.
        placement: of the module that is trained.
        channels: to the other stages.
        to: the stage that gets everything; None for all stages.
        device: where received tensors go that lie beside their parameter; others (step counts, mostly) go to the host.

    Returns:
        On stage ``to`` the ordinary state dict of the optimizer, with the state of all parameters in the order of
        their indices. Elsewhere the optimizer's own.
    """
    received = list(_receive_optimizer_states(optimizer, placement, channels, to, device))
    before = {parameter: optimizer.state[parameter] for parameter, _ in received if parameter in optimizer.state}
    try:
        _set_states(optimizer, received)
        state: dict[str, Any] = optimizer.state_dict()
    finally:
        _set_states(optimizer, [(parameter, before.get(parameter)) for parameter, _ in received])
    if isinstance(entries := state.get("state"), dict):
        indices = sorted(key for key in entries if isinstance(key, int))
        others = [key for key in entries if not isinstance(key, int)]
        state["state"] = {key: entries[key] for key in (*indices, *others)}
    return state


@torch.inference_mode(mode=False)
def make_optimizer_whole(
    optimizer: Optimizer,
    placement: Placement,
    channels: Mapping[int, Channel],
    *,
    to: int | None = None,
    device: torch.device = _CPU,
) -> None:
    """Give an optimizer the state of absent parameters. Collective; comes after :func:`make_whole`.

    Args:
        optimizer: has the parameters of all stages, in the same order on all of them.
        placement: of the module that was trained.
        channels: to the other stages.
        to: the only stage that becomes whole; None for all stages.
        device: where received tensors go that lie beside their parameter.
    """
    _set_states(optimizer, list(_receive_optimizer_states(optimizer, placement, channels, to, device)))


def keep_own_optimizer_state(state_dict: dict[str, Any], optimizer: Optimizer, placement: Placement) -> dict[str, Any]:
    """What this stage's optimizer may load of a whole state: without the state of absent parameters.

    Args:
        state_dict: of an optimizer over the whole module; it stays as it is.
        optimizer: will load it.
        placement: of the module that is trained.
    """
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    absent = {
        index
        for index, parameter in zip(saved, _parameters(optimizer), strict=False)  # load_state_dict() compares lengths
        if placement.is_absent(parameter)
    }
    return {**state_dict, "state": {key: value for key, value in state_dict["state"].items() if key not in absent}}


def drop_absent_state(optimizer: Optimizer, placement: Placement) -> None:
    """Let go of state that an optimizer has made for absent parameters beforehand, as Adagrad does."""
    for parameter in _parameters(optimizer):
        if placement.is_absent(parameter):
            optimizer.state.pop(parameter, None)


def find_absent(checkpoint: Mapping[str, Any]) -> str | None:
    """Where in a checkpoint there is a tensor without values, if there is one."""
    for path, value in pytree.tree_flatten_with_path(dict(checkpoint))[0]:
        if isinstance(value, Tensor) and value.is_meta:
            return f"checkpoint{pytree.keystr(path)}"
    return None


# -- what is sent ----------------------------------------------------------------------------------------------------

_EXTRA_STATE = "_extra_state"  # torch's name for what get_extra_state() returns, in state dicts


def _receive_parts(
    placement: Placement, channels: Mapping[int, Channel], to: int | None, device: torch.device
) -> Iterator[tuple[Part, Tensor | None]]:
    """Send what others need; yields what this stage gets."""
    for part in placement.parts:
        mine = part.tensor if part.sender == placement.stage else None
        values = [None if mine is None else mine.detach()]
        for value in _hand_over(values, part.name, part.stages, placement.stage, channels, to):
            yield part, None if value is None else value.to(device)


def _receive_extra_states(
    placement: Placement, channels: Mapping[int, Channel], to: int | None
) -> Iterator[tuple[str, nn.Module, Any]]:
    """The same for what modules keep besides tensors; it lives where their tensors live."""
    for prefix, module in placement.module.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        inside = set(module.modules())
        stages = [part.stages for part in placement.parts if not inside.isdisjoint(part.modules)]
        if not stages:
            continue
        holders = frozenset[int]().union(*stages)
        mine = module.get_extra_state() if min(holders) == placement.stage else None
        for value in _hand_over([mine], f"extra state of {prefix}", holders, placement.stage, channels, to):
            yield prefix, module, value


def _receive_optimizer_states(
    optimizer: Optimizer, placement: Placement, channels: Mapping[int, Channel], to: int | None, device: torch.device
) -> Iterator[tuple[Tensor, dict[Any, Any] | None]]:
    """The same for optimizer state; None for a parameter that has none."""
    for parameter in _parameters(optimizer):
        part = placement.part_of(parameter)
        if part is None:
            continue

        def hand_over(values: list[Any], what: str, part: Part = part) -> list[Any]:
            what = f"{what} of {part.name}"
            return _hand_over(values, what, part.stages, placement.stage, channels, to)

        if part.sender == placement.stage:
            mine = optimizer.state.get(parameter)
            hand_over([None if mine is None else list(mine)], "optimizer state")
            for key, value in (mine or {}).items():
                beside = isinstance(value, Tensor) and value.device == parameter.device
                hand_over([value, beside], f"{key}")
        else:
            for keys in hand_over([], "optimizer state"):
                state = {}
                for key in keys or ():
                    value, beside = hand_over([], f"{key}")
                    state[key] = value.to(device if beside else _CPU) if isinstance(value, Tensor) else value
                yield parameter, None if keys is None else state


def _hand_over(
    values: list[Any], what: str, holders: frozenset[int], stage: int, channels: Mapping[int, Channel], to: int | None
) -> list[Any]:
    """Send values from the lowest stage that holds them to those that do not and need them.

    Returns:
        On a stage that needs them the values, else nothing.
    """
    needed_by = sorted(({stage, *channels} if to is None else {to}) - holders)
    sender = min(holders)
    if stage == sender:
        for receiver in needed_by:
            channels[receiver].send(values, what)
            channels[receiver].receive(f"received {what}")
    elif stage in needed_by:
        received = channels[sender].receive(what)
        channels[sender].send([], f"received {what}")
        return received
    return []


# -- where it is put -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _lent(values: Iterable[tuple[Part, Tensor | None]]) -> Iterator[None]:
    """The module with other tensors in place of some; those keep out of sight, and are not touched."""
    originals: list[tuple[Part, Tensor | None]] = []
    try:
        for part, value in values:
            tensor = part.tensor
            originals.append((part, tensor))
            if isinstance(tensor, nn.Parameter) and value is not None:
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            part.register(value)
        yield
    finally:
        for part, tensor in originals:
            part.register(tensor)


def _set_states(optimizer: Optimizer, states: Iterable[tuple[Tensor, dict[Any, Any] | None]]) -> None:
    for parameter, state in states:
        if state is not None:
            optimizer.state[parameter] = state
        else:
            optimizer.state.pop(parameter, None)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
