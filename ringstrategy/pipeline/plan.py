"""Which layers run on which stage: found, measured and cut before training starts."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ringstrategy.pipeline.balance import check_balance, partition
from ringstrategy.pipeline.calls import Call, Example, flatten_call
from ringstrategy.pipeline.costs import LayerCost, balance_costs, measure, parameter_bytes
from ringstrategy.pipeline.micro_batches import micro_batch_sizes, rows_of, split
from ringstrategy.pipeline.programs import StageProgram, cut
from ringstrategy.pipeline.tracing import Anchor, Layer, Trace, Traces, common_layers

__all__ = ["Balance", "Cut", "PipelinePlan", "choose_cut", "least_rows"]

T = TypeVar("T")

Balance: TypeAlias = Literal["size", "time", "memory"] | Sequence[int] | None


@dataclass(frozen=True)
class Cut:
    """Where a module is cut: small, and the same on all ranks.

    Attributes:
        call: how the module was called when this was decided.
        layers: of each stage, in order.
        costs: of these layers, where they were measured.
    """

    call: Call
    layers: tuple[tuple[Layer, ...], ...]
    costs: tuple[tuple[LayerCost, ...], ...] | None

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        """Of the first layer of every stage but the first."""
        return tuple(layers[0].anchor for layers in self.layers[1:])


def choose_cut(
    module: nn.Module, stages: int, balance: Balance, example: Example | None, chunks: int, recompute: bool = False
) -> Cut:
    """Cut a module into stages, at layers that it has in training and in evaluation.

    Args:
        module: all of it; it is left as it is.
        stages: how many.
        balance: see :class:`~ringstrategy.PipelineStrategy`.
        example: its arguments, for a whole batch. None: its required arguments are taken to be tensors.
        chunks: micro-batches per batch; layers are measured on one.
        recompute: whether micro-batches are computed again in backward.

    Raises:
        ValueError: there are fewer layers than stages, ``balance`` does not fit the layers, or the module cannot be
            traced.
    """
    call = _required_arguments(module) if example is None else example.call
    traces = _in_both_modes(module, call)
    layers = common_layers(traces)
    if balance is None:
        balance = "size" if example is None else "time"
    costs = None if example is None else _measure(module, layers, example, chunks)
    if not isinstance(balance, str):
        try:
            sizes = check_balance(balance, len(layers), stages)
        except ValueError as error:
            raise ValueError(f"{error}. Its layers: {', '.join(layer.name for layer in layers)}") from None
    elif len(layers) < stages:
        raise ValueError(
            f"{type(module).__name__} has {len(layers)} layers, too few for {stages} stages of at least one layer "
            "each. Use fewer stages."
        )
    elif costs is not None:
        weights, send = balance_costs(balance, costs, chunks, recompute)
        sizes = partition(weights, stages, send)
    elif balance == "size":
        sizes = partition([float(parameter_bytes(module, layer)) for layer in layers], stages)
    else:
        raise ValueError(
            f"balance={balance!r} has to measure the layers on an input, and none is known: set "
            "`example_input_array` of the LightningModule, or use balance='size'."
        )
    return Cut(call, _grouped(layers, sizes), None if costs is None else _grouped(costs, sizes))


class PipelinePlan:
    """A cut module.

    Args:
        name: of the pipelined module within the LightningModule; empty for the LightningModule itself.
        module: the pipelined module.
        chosen: where it is cut.
        root: the LightningModule.

    Attributes:
        parameters: of the pipelined module, by each of their names.
        owners: by full name of a parameter or buffer in the LightningModule, the stages that hold it; what is not
            mentioned is held by all.
    """

    def __init__(self, name: str, module: nn.Module, chosen: Cut, root: pl.LightningModule) -> None:
        self.name = name
        self.module = module
        self.cut = chosen
        self._traces = Traces(module, chosen.anchors)
        self._programs: dict[int, tuple[StageProgram, ...]] = {}
        self.parameters: Mapping[str, nn.Parameter] = dict(module.named_parameters(remove_duplicate=False))
        users = self._users()
        prefix = f"{name}." if name else ""
        outside = _outside(root, prefix)
        full = {prefix + inner: stages for inner, stages in users.items()}
        tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}
        self.owners = {
            full_name: stages for full_name, stages in full.items() if id(tensors.get(full_name)) not in outside
        }
        everyone = frozenset(range(len(chosen.layers)))
        self._holders = {
            inner: everyone if prefix + inner not in self.owners else stages
            for inner, stages in users.items()
            if inner in self.parameters
        }

    def programs(self, call: Call) -> tuple[StageProgram, ...]:
        """What each stage runs for a call of the module as it is now.

        Raises:
            ValueError: such a call cannot be traced, or cut where the module is cut; or it needs a parameter on a stage
                that does not hold it.
        """
        trace = self._traces.get(call)
        programs = self._programs.get(id(trace))
        if programs is None:
            programs = cut(trace, self.cut.anchors)
            self._check(programs)
            self._programs[id(trace)] = programs
        return programs

    def shared(self, stage: int) -> dict[frozenset[int], list[nn.Parameter]]:
        """Parameters that ``stage`` and other stages hold, by the stages that hold them."""
        shared: dict[frozenset[int], list[nn.Parameter]] = {}
        for name, stages in self._holders.items():
            if stage in stages and len(stages) > 1:
                shared.setdefault(stages, []).append(self.parameters[name])
        return shared

    def _users(self) -> dict[str, frozenset[int]]:
        """By name within the module, the stages whose layers use a parameter or buffer."""
        users: dict[str, frozenset[int]] = {}
        for stage, layers in enumerate(self.cut.layers):
            for layer in layers:
                for name in (*layer.parameters, *layer.buffers):
                    users[name] = users.get(name, frozenset()) | {stage}
        return users

    def _check(self, programs: Sequence[StageProgram]) -> None:
        for stage, program in enumerate(programs):
            for name in (*program.parameters, *program.buffers):
                holders = self._holders.get(name)
                if holders is not None and stage not in holders:
                    raise ValueError(
                        f"This call of {type(self.module).__name__} uses '{name}' on stage {stage}, but only stage "
                        f"{', '.join(map(str, sorted(holders)))} holds it: another call was known when the module was "
                        "cut. Set `example_input_array` to what it is called with in training."
                    )


def _required_arguments(module: nn.Module) -> Call:
    """A call with a tensor for every argument that has no default."""
    needed = [
        parameter
        for parameter in list(inspect.signature(type(module).forward).parameters.values())[1:]
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    args = [torch.empty(0) for parameter in needed if parameter.kind is not parameter.KEYWORD_ONLY]
    kwargs = {parameter.name: torch.empty(0) for parameter in needed if parameter.kind is parameter.KEYWORD_ONLY}
    return flatten_call(args or [torch.empty(0)], kwargs)[1]


def _in_both_modes(module: nn.Module, call: Call) -> list[Trace]:
    traces = Traces(module)
    result = []
    for training in (True, False):
        with _mode(module, training):
            result.append(traces.get(call))
    return result


def least_rows(module: nn.Module) -> int:
    """Rows that a micro-batch needs in training: a batch norm normalises one by another."""
    return 2 if any(isinstance(child, _BatchNorm) for child in module.modules()) else 1


def _measure(module: nn.Module, layers: Sequence[Layer], example: Example, chunks: int) -> list[LayerCost]:
    least = least_rows(module)
    sizes = micro_batch_sizes(rows_of(example.tensors), chunks, least)
    inputs = [split(tensor, sizes)[0] for tensor in example.tensors]
    if sizes == (1,) and least == 2:  # an example of one row, which a batch norm cannot train on
        inputs = [torch.cat([rows] * 2) if rows.dim() and rows.shape[0] == 1 else rows for rows in inputs]
    with _mode(module, training=True):
        return measure(Traces(module).get(example.call), inputs, layers)


@contextlib.contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    before = [(child, child.training) for child in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for child, flag in before:
            child.training = flag


def _outside(root: nn.Module, prefix: str) -> set[int]:
    """Parameters and buffers that also have a name outside of the pipelined module: all stages run what is there."""
    if not prefix:
        return set()
    named = (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
    return {id(tensor) for name, tensor in named if not name.startswith(prefix)}


def _grouped(values: Sequence[T], sizes: Sequence[int]) -> tuple[tuple[T, ...], ...]:
    rest = iter(values)
    return tuple(tuple(next(rest) for _ in range(size)) for size in sizes)
