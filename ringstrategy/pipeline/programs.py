"""A trace cut into stages, each a program of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ringstrategy.pipeline.in_place import changed_inputs
from ringstrategy.pipeline.tracer import CONTEXTS
from ringstrategy.pipeline.tracing import Anchor, Trace, find_attribute, split_layers, used_state

__all__ = ["StageProgram", "cut"]


class Step(NamedTuple):
    """One operation: ``values[result] = run(*positional, **keywords)``, with arguments taken from ``values``.

    Attributes:
        run: what is called.
        positional: places of positional arguments.
        keywords: names and places of keyword arguments.
        result: place of the result.
        last_uses: places that nobody reads after this step.
        name: for people.
    """

    run: Callable[..., Any]
    positional: tuple[int, ...]
    keywords: tuple[tuple[str, int], ...]
    result: int
    last_uses: tuple[int, ...]
    name: str


@dataclass(frozen=True, slots=True)
class StageProgram:
    """What one stage runs.

    All values of a run lie in one list; a step knows the places of its arguments, and constants lie in theirs from the
    start. So a step costs little more than its operation.

    Attributes:
        receives: names of the values that the stage before sends, in order; none for the first stage.
        sends: names of the values that the next stage receives; the last stage's result is one value, the module's
            output.
        inputs: numbers of the tensors of the call that the stage reads.
        parameters: names within the module of the parameters in use, tied ones by their first name.
        buffers: the same for buffers.
        modules: names of the submodules that are called.
    """

    receives: tuple[str, ...]
    sends: tuple[str, ...]
    inputs: tuple[int, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    modules: tuple[str, ...]
    _steps: tuple[Step, ...] = field(repr=False)
    _memory: tuple[Any, ...] = field(repr=False)
    _input_places: tuple[int, ...] = field(repr=False)
    _device_places: tuple[int, ...] = field(repr=False)
    _results: tuple[int, ...] = field(repr=False)

    def __call__(self, received: Sequence[Any], inputs: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Run the stage on one micro-batch.

        Args:
            received: the values of ``receives``. An operation in place changes them.
            inputs: the tensors of the call; those that are not in ``self.inputs`` may be ``None``.

        Returns:
            The values of ``sends``; for the last stage one value, the output of the module.

        Raises:
            ValueError: another number of values was received.
        """
        if len(received) != len(self.receives):
            raise ValueError(
                f"the stage takes {len(self.receives)} values ({', '.join(self.receives)}), not {len(received)}"
            )
        values = list(self._memory)
        values[: len(received)] = received
        for place, number in zip(self._input_places, self.inputs, strict=True):
            values[place] = inputs[number]
        for place in self._device_places:
            values[place] = _own_device([*received, *inputs], values[place])
        name = ""
        try:
            for run, positional, keywords, result, last_uses, name in self._steps:  # noqa: B007  (used in the note)
                arguments = [values[place] for place in positional]
                if keywords:
                    values[result] = run(*arguments, **{key: values[place] for key, place in keywords})
                else:
                    values[result] = run(*arguments)
                del arguments
                for place in last_uses:
                    values[place] = None
        except Exception as error:
            error.add_note(f"while {name!r} of the pipelined module ran")
            raise
        return tuple(values[place] for place in self._results)


def cut(trace: Trace, anchors: Sequence[Anchor]) -> tuple[StageProgram, ...]:
    """Cut a module into stages.

    A value that lives across a cut travels with every cut that it crosses. The tensors of the call do not travel, since
    every stage has them; unless an operation in place may have changed one::

        stage 0           stage 1           stage 2
        a, b = f(x) --a,b-> c = g(a) --b,c-> h(b, c, x)

    Args:
        trace: the traced module.
        anchors: of the first layer of every stage but the first, in order.

    Returns:
        One program per stage.

    Raises:
        ValueError: an anchor does not occur in the trace, or not in this order.
    """
    parts = split_layers(trace, anchors)
    operations = [[node for layer in part for node in trace.nodes[layer]] for part in parts]
    made = {node: stage for stage, nodes in enumerate(operations) for node in nodes}
    last_stage = len(parts) - 1
    # By value: the last stage that reads it.
    needed: dict[fx.Node, int] = {}
    for node in (*made, trace.output):
        for argument in node.all_input_nodes:
            needed[argument] = max(needed.get(argument, 0), made.get(node, last_stage))
    changed = changed_inputs(trace, made)
    crossing = [
        [node for node in (*changed, *made) if changed.get(node, made.get(node, 0)) < stage <= needed.get(node, 0)]
        for stage in range(1, len(parts))
    ]
    programs = []
    for stage, nodes in enumerate(operations):
        receives = crossing[stage - 1] if stage else []
        sends = crossing[stage] if stage < last_stage else None
        programs.append(_Assembler(trace, receives).assemble(nodes, sends))
    return tuple(programs)


class _Assembler:
    """Turns operations of a trace into the program of a stage.

    Args:
        trace: the traced module.
        receives: the values that the stage is sent.
    """

    def __init__(self, trace: Trace, receives: Sequence[fx.Node]) -> None:
        self._trace = trace
        self._receives = receives
        self._places = {node: place for place, node in enumerate(receives)}
        self._memory: list[Any] = [None] * len(receives)
        self._steps: list[Step] = []
        self._numbers = {node: number for number, node in enumerate(trace.inputs)}
        self._inputs: dict[int, int] = {}

    def assemble(self, nodes: Sequence[fx.Node], sends: Sequence[fx.Node] | None) -> StageProgram:
        """The program that runs ``nodes`` and ends with ``sends``; with ``None`` it ends with the module's output."""
        for node in nodes:
            name = str(node.target) if node.op == "call_module" else node.name
            self._places[node] = self._step(name, _runner(self._trace.module, node), node.args, node.kwargs)
        results = list(sends) if sends is not None else [self._trace.output.args[0]]
        places = tuple(self._place(result) for result in results)
        parameters, buffers = used_state(
            self._trace.module, nodes if sends is not None else [*nodes, self._trace.output]
        )
        return StageProgram(
            receives=tuple(node.name for node in self._receives),
            sends=tuple(node.name for node in sends) if sends is not None else ("output",),
            inputs=tuple(self._inputs),
            parameters=parameters,
            buffers=buffers,
            modules=tuple(dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module")),
            _steps=_with_last_uses(self._steps, places),
            _memory=tuple(self._memory),
            _input_places=tuple(self._inputs.values()),
            _device_places=tuple(place for place, node in enumerate(self._receives) if _is_device(node)),
            _results=places,
        )

    def _place(self, value: Any) -> int:
        """Where an argument lies when the program runs; adds what makes it."""
        if isinstance(value, fx.Node):
            if value not in self._places:
                self._places[value] = self._fetch(value)
            return self._places[value]
        if isinstance(value, list):
            return self._step("list", _list, value)
        if isinstance(value, dict):
            return self._step("dict", functools.partial(_dict, tuple(value)), tuple(value.values()))
        if isinstance(value, tuple) and _holds_nodes(value):
            return self._step("tuple", _tuple, value)
        if isinstance(value, slice) and _holds_nodes(value):
            return self._step("slice", slice, (value.start, value.stop, value.step))
        return self._new_place(value)

    def _fetch(self, node: fx.Node) -> int:
        """Where a tensor of the call, or of the module, lies."""
        if node.op == "placeholder":
            place = self._inputs[self._numbers[node]] = self._new_place(None)
            return place
        target = str(node.target)
        if target in self._trace.constants:
            # A copy for each run: an operation in place would change it for the next.
            return self._step(node.name, self._trace.constants[target].clone, ())
        owner, _, name = target.rpartition(".")
        # Looked up at each run, since moving a module may replace its parameters.
        return self._step(node.name, functools.partial(getattr, find_attribute(self._trace.module, owner), name), ())

    def _step(
        self, name: str, run: Callable[..., Any], positional: Sequence[Any], keywords: Mapping[str, Any] | None = None
    ) -> int:
        """Add a step; return where its result lies."""
        places = tuple(self._place(value) for value in positional)
        named = tuple((key, self._place(value)) for key, value in (keywords or {}).items())
        result = self._new_place(None)
        self._steps.append(Step(run, places, named, result, (), name))
        return result

    def _new_place(self, value: Any) -> int:
        """A place that holds ``value`` when a run begins."""
        self._memory.append(value)
        return len(self._memory) - 1


def _runner(module: nn.Module, node: fx.Node) -> Callable[..., Any]:
    """What to call for an operation."""
    run: Callable[..., Any]
    if node.op == "call_module":
        run = find_attribute(module, str(node.target))
    elif node.op == "call_method":
        run = functools.partial(_call_method, str(node.target))
    else:
        assert callable(node.target)
        run = node.target
    contexts = node.meta.get(CONTEXTS, ())
    return functools.partial(_run_within, contexts, run) if contexts else run


def _call_method(name: str, value: Any, /, *args: Any, **kwargs: Any) -> Any:
    return getattr(value, name)(*args, **kwargs)


def _run_within(contexts: Sequence[Callable[[], Any]], run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for make in contexts:
            stack.enter_context(make())
        return run(*args, **kwargs)


def _list(*values: Any) -> list[Any]:
    return list(values)


def _tuple(*values: Any) -> tuple[Any, ...]:
    return values


def _dict(keys: Sequence[Any], /, *values: Any) -> dict[Any, Any]:
    return dict(zip(keys, values, strict=True))


def _holds_nodes(value: Any) -> bool:
    """Whether a tuple or slice has values of the run in it, or lists and dicts, which are made anew for each."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, tuple):
        return any(map(_holds_nodes, value))
    return isinstance(value, (fx.Node, list, dict))


def _with_last_uses(steps: Sequence[Step], keep: Iterable[int]) -> tuple[Step, ...]:
    """Let every step name the places that nobody reads after it, ``keep`` aside."""
    seen = set(keep)
    finished = []
    for step in reversed(steps):
        places = {*step.positional, *(place for _, place in step.keywords), step.result} - seen
        seen |= places
        finished.append(step._replace(last_uses=tuple(sorted(places))))
    return tuple(reversed(finished))


def _is_device(node: fx.Node) -> bool:
    """Whether a value is the device of a tensor."""
    return node.target is getattr and bool(node.args[1] == "device")


def _own_device(values: Iterable[Any], default: torch.device) -> torch.device:
    """The device of the first tensor among ``values``."""
    return next((value.device for value in values if isinstance(value, Tensor)), default)
