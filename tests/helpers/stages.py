"""The stages of a module, one after another in one process, compared with the whole module."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ringstrategy.pipeline.calls import flatten_call
from ringstrategy.pipeline.programs import StageProgram, cut
from ringstrategy.pipeline.tracing import Traces

__all__ = ["check_stages"]

Results = tuple[Any, dict[str, Tensor], list[Tensor | None], dict[str, Tensor]]


def run_whole(module: nn.Module, args: Sequence[Any]) -> Results:
    """Output, gradients of parameters and of inputs, and buffers afterwards, of one process."""
    args = pytree.tree_map_only(Tensor, Tensor.clone, args)
    leaves = [leaf.requires_grad_(leaf.is_floating_point()) for leaf in flatten_call(args, {})[0]]
    given = pytree.tree_map_only(Tensor, Tensor.clone, args)
    output = module(*given)
    if results := _differentiable(output):
        torch.autograd.backward(results, [_gradient(value) for value in results])
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return output, gradients, [leaf.grad for leaf in leaves], dict(module.named_buffers())


def run_stages(module: nn.Module, args: Sequence[Any], stages: int) -> tuple[Results, tuple[StageProgram, ...]]:
    """The same of ``stages`` ranks, each with its own copy of the module, of which it holds what its stage uses."""
    args = pytree.tree_map_only(Tensor, Tensor.clone, args)
    tensors, call = flatten_call(args, {})
    leaves = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in tensors]
    ranks = [copy.deepcopy(module) for _ in range(stages)]
    programs = tuple(_program(rank, call, stage, stages) for stage, rank in enumerate(ranks))
    for left, right in itertools.pairwise(programs):
        assert left.sends == right.receives
    values: tuple[Any, ...] = ()
    graphs = []
    for program in programs:
        # As the engine does: nothing that was received shares memory with what was sent.
        received = pytree.tree_map_only(
            Tensor, lambda value: value.detach().clone().requires_grad_(value.requires_grad), values
        )
        inputs = [tensor.clone() if number in program.inputs else None for number, tensor in enumerate(leaves)]
        values = program(pytree.tree_map_only(Tensor, Tensor.clone, received), inputs)
        graphs.append((received, values))
    sent_gradients: list[Tensor | None] | None = None
    for received, sent in reversed(graphs):
        results = _differentiable(sent)
        gradients = sent_gradients if sent_gradients is not None else [_gradient(value) for value in results]
        reached = [place for place, gradient in enumerate(gradients) if gradient is not None]
        if reached:
            torch.autograd.backward([results[place] for place in reached], [gradients[place] for place in reached])
        assert len(gradients) == len(results)
        sent_gradients = [value.grad for value in _tensors(received) if value.requires_grad]
    total: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for rank, program in zip(ranks, programs, strict=True):
        for name, parameter in rank.named_parameters():
            if parameter.grad is not None:
                assert name in program.parameters
                total[name] = total[name] + parameter.grad if name in total else parameter.grad
        buffers |= {name: buffer for name, buffer in rank.named_buffers() if name in program.buffers}
    return (values[0], total, [leaf.grad for leaf in leaves], buffers), programs


def _program(rank: nn.Module, call: Any, stage: int, stages: int) -> StageProgram:
    """The program of one rank; what it does not use is moved to the meta device first."""
    trace = Traces(rank).get(call)
    anchors = [trace.layers[len(trace.layers) * k // stages].anchor for k in range(1, stages)]
    program = cut(trace, anchors)[stage]
    used = {*program.parameters, *program.buffers}
    names = {id(tensor): name for name, tensor in (*rank.named_parameters(), *rank.named_buffers())}
    for child in rank.modules():
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None and names[id(tensor)] not in used:
                meta = tensor.detach().to("meta")
                setattr(child, name, nn.Parameter(meta) if isinstance(tensor, nn.Parameter) else meta)
    return program


def _gradient(value: Tensor) -> Tensor:
    """A gradient that differs from element to element."""
    return torch.linspace(-1.0, 2.0, value.numel(), dtype=value.dtype).reshape(value.shape)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _differentiable(values: Any) -> list[Tensor]:
    return [value for value in _tensors(values) if value.requires_grad]


def _assert_equal(left: Any, right: Any) -> None:
    """Same structure, types and values."""
    left_leaves, left_spec = pytree.tree_flatten(left)
    right_leaves, right_spec = pytree.tree_flatten(right)
    assert left_spec == right_spec
    for one, other in zip(left_leaves, right_leaves, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        else:
            assert one == other


def check_stages(module: nn.Module, *args: Any, stages: Sequence[int] = (1, 2, 3)) -> list[tuple[StageProgram, ...]]:
    """Compare stages with the whole module; return the programs."""
    module.double()
    found = []
    for count in stages:
        torch.manual_seed(3)
        random.seed(3)
        whole = run_whole(copy.deepcopy(module), args)
        torch.manual_seed(3)
        random.seed(3)
        cut_up, programs = run_stages(module, args, count)
        _assert_equal(cut_up[0], whole[0])
        assert cut_up[1].keys() == whole[1].keys()
        for name, gradient in whole[1].items():
            torch.testing.assert_close(cut_up[1][name], gradient, rtol=1e-11, atol=1e-11, msg=name)
        _assert_equal(cut_up[2], whole[2])
        for name, buffer in cut_up[3].items():
            torch.testing.assert_close(buffer, whole[3][name], msg=name)
        found.append(programs)
    return found
