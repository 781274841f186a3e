"""A module's forward as a graph of operations: torch.fx, and care for what it passes over in silence."""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction
from torch import Tensor, fx, nn
from torch.fx.node import Argument, Node, Target
from torch.fx.proxy import Proxy, TraceError
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree

from ringstrategy.pipeline.calls import Call
from ringstrategy.pipeline.recording import record_assignments, record_contexts, record_functions
from ringstrategy.pipeline.side_effects import SideEffects
from ringstrategy.pipeline.traced_values import Assertion, Input, Rebuild, Value, is_assertion, is_value
from ringstrategy.pipeline.transformers import FORWARDS

__all__ = ["CONTEXTS", "LeafTracer", "UntraceableError", "is_hooked"]

# Where a node keeps the contexts (`torch.no_grad()`, `torch.autocast(...)`) that were open when it was recorded.
CONTEXTS = "contexts"
# Modules of these packages are not looked into, containers aside.
_LIBRARIES = ("torch.nn.", "torch.ao.", "torch.jit.", "torch._dynamo.")
# Functions that do not look for traced values among their arguments, and are recorded if there is one.
_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randint),
    *(torch.randn, torch.randperm, torch.tensor, torch.zeros),
    *(rnn.pack_padded_sequence, rnn.pack_sequence, rnn.pad_packed_sequence, rnn.pad_sequence),
)
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, "backward")
_ADVICE = (
    "Move that part into a submodule of its own, which then stays whole on one stage; or pipeline another module, "
    'e.g. module="net".'
)


class UntraceableError(ValueError):
    """The module's own forward cannot be traced; the message says where, why and what to do."""


def is_hooked(module: nn.Module) -> bool:
    """Whether hooks run when ``module`` is called, for which it has to stay whole."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(not _labels_times(hook) for registered in hooks for hook in registered.values())


class LeafTracer(fx.Tracer):
    """Traces a module, and keeps whole what cannot be looked into.

    A submodule stays whole (a leaf: one node, which calls it) if

    - it belongs to torch and is no container, or has no children: there is nothing to cut;
    - it has hooks, which only run when it is called;
    - tracing it fails: control flow on values, a type of its own among arguments, and the like;
    - tracing it draws random numbers or sets attributes: that would happen once, instead of at each call.

    What such an attempt leaves behind (nodes, attributes, states of random generators) is undone.

    Args:
        module: the module; the ``forward`` of its class is traced, whatever that of the instance was replaced by.
        call: how it is called.
        cut_at: submodules before which the module is cut already. They stay whole, what they lie in does not, whatever
            hooks came or went since then.

    Attributes:
        constants: tensors that the forward makes from nothing, or has from elsewhere; by target of ``get_attr``.
    """

    def __init__(self, module: nn.Module, call: Call, cut_at: Iterable[str] = ()) -> None:
        super().__init__(autowrap_functions=_FUNCTIONS)
        self._autowrap_search += [torch, rnn]
        self.proxy_buffer_attributes = True
        self.constants: dict[str, Tensor] = {}
        self._module = module
        self._call = call
        self._cut_at = frozenset(cut_at)
        self._cut = {name[:end] for name in self._cut_at for end, letter in enumerate(name) if letter == "."}
        self._names: dict[nn.Module | int, str] = {child: name for name, child in module.named_modules()}
        for name, child in module.named_modules():
            for attribute, value in vars(child).items():
                if isinstance(value, Tensor):
                    self._names[id(value)] = f"{name}.{attribute}" if name else attribute
        # Tied parameters have several names; the first is the one that `named_parameters` knows.
        self._names |= {id(buffer): name for name, buffer in module.named_buffers()}
        self._names |= {id(parameter): name for name, parameter in module.named_parameters()}
        self._contexts: list[Callable[[], Any]] = []
        self._grad_enabled = True

    def run(self) -> fx.Graph:
        """Trace.

        Returns:
            The graph: a placeholder per tensor of the call, operations, and an output.

        Raises:
            UntraceableError: the module's own forward cannot be traced.
        """
        effects = SideEffects(self._module)
        try:
            with (
                torch.inference_mode(False),
                record_functions(self),
                record_contexts(self._contexts),
                record_assignments(self._names),
            ):
                self._grad_enabled = torch.is_grad_enabled()
                graph = self.trace(self._module)
        except Exception as error:
            raise UntraceableError(f"{_place(error, self._module)}: {_first_line(error)}. {_ADVICE}") from error
        finally:
            found = effects.undo()
        if found:
            name = type(self._module).__name__
            raise UntraceableError(f"{name}.forward {found} at each call, which its parts alone do not do. {_ADVICE}")
        for node in reversed(graph.nodes):
            if node.op == "get_attr" and not node.users:
                graph.erase_node(node)
        return graph

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """One placeholder per tensor; everything else is as in the call."""
        inputs = [self.create_proxy("placeholder", f"input_{i}", (), {}) for i in range(self._call.tensors)]
        args, kwargs = self._call.restore(inputs)
        forward = FORWARDS.get(root_fn, root_fn)
        return lambda: forward(self._module, *args, **kwargs), []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether to call ``m`` without looking into it."""
        if module_qualified_name in self._cut_at:
            return True
        if is_hooked(m) or m._compiled_call_impl is not None:
            if module_qualified_name not in self._cut:
                return True
            if is_hooked(m):
                rank_zero_warn(
                    f"Hooks on '{module_qualified_name}' of {type(self._module).__name__} do not run: they came after "
                    "it was cut into stages. Register them before training starts, or on its layers."
                )
        if isinstance(m, nn.Sequential) or _forward_of(m) in FORWARDS:
            return False
        return type(m).__module__.startswith(_LIBRARIES) or next(m.children(), None) is None

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Look into ``m`` if that works, else record that it is called."""
        target = self._names.get(m)
        if target is None:  # made on the fly, e.g. `nn.Softmax(dim=1)(x)`
            return forward(*args, **kwargs)
        if not self.is_leaf_module(m, target):
            own = FORWARDS.get(_forward_of(m))
            forward = m.forward if own is None else functools.partial(own, m)  # without hooks
            nodes = len(self.graph.nodes)
            effects = SideEffects(m)
            with contextlib.suppress(Exception):
                result = forward(*args, **kwargs)
                if not effects.undo():
                    return result
            effects.undo()
            for node in reversed(list(self.graph.nodes)[nodes:]):
                self.graph.erase_node(node)
        return self.create_proxy("call_module", target, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        """Parameters and buffers are looked up at each run."""
        if isinstance(attr_val, Tensor) and (name := self._names.get(id(attr_val))) is not None:
            return self.create_proxy("get_attr", name, (), {})
        return attr_val

    def create_arg(self, a: Any) -> Argument:
        """The form in which a node keeps an argument."""
        kind = type(a)
        if is_value(a):
            return a.node  # type: ignore[no-any-return]
        if issubclass(kind, Tensor):
            return self._tensor(a)
        if issubclass(kind, nn.Module):
            if a not in self._names:
                raise TraceError(f"{kind.__name__} is not a submodule")
            return self.create_node("get_attr", self._names[a], (), {})
        if kind is torch.device and a.type == "meta" and self._call.tensors:
            # Found out by asking a parameter that another stage holds. The tensors of the call are where it would be.
            first = next(iter(self.graph.nodes))
            return self.create_node("call_function", getattr, (first, "device"), {})
        if kind in pytree.SUPPORTED_NODES and not issubclass(kind, (tuple, list)) and kind is not dict:
            leaves, spec = pytree.tree_flatten(a, is_leaf=lambda value: value is not a)
            return self.create_node("call_function", Rebuild(spec), tuple(map(self.create_arg, leaves)), {})
        return super().create_arg(a)

    def create_node(
        self,
        kind: str,
        target: Target,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        name: str | None = None,
        type_expr: Any | None = None,
    ) -> Node:
        """Remember the contexts that are open."""
        if kind.startswith("call") and kind != "call_module" and target in _GRADIENTS:
            raise TraceError("gradients are computed within the forward")
        if not self._contexts and torch.is_grad_enabled() != self._grad_enabled:
            raise TraceError("gradients are switched on or off by a statement; use `with torch.no_grad():`")
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        if self._contexts:
            node.meta[CONTEXTS] = tuple(self._contexts)
        return node

    def proxy(self, node: Node) -> Proxy:
        """The value of ``node`` while tracing."""
        return (Input if node.op == "placeholder" else Value)(node, self)

    def to_bool(self, obj: Proxy) -> bool:
        """An assertion is checked at each run; other control flow on values cannot be traced."""
        frame = sys._getframe(2)
        if not is_assertion(frame):
            return super().to_bool(obj)
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        self.create_proxy("call_function", Assertion(line), (obj,), {})
        return True

    def _tensor(self, tensor: Tensor) -> Node:
        """A node for a tensor that exists already."""
        name = self._names.get(id(tensor))
        if name is None:
            if tensor.requires_grad:
                raise TraceError("a tensor is computed from parameters that do not belong to the module")
            if tensor.is_meta:
                raise TraceError(
                    "a tensor is made on the device of a parameter that another stage holds; use that of an input"
                )
            name = f"_constant_{len(self.constants)}"
            self.constants[name] = tensor
            self._names[id(tensor)] = name
        return self.create_node("get_attr", name, (), {})


def _labels_times(hook: Callable[..., Any]) -> bool:
    """Whether a hook is the PyTorchProfiler's: a module would be cut elsewhere while its time is taken."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    return isinstance(getattr(function, "__self__", None), RegisterRecordFunction)


def _forward_of(module: nn.Module) -> Any:
    """The forward of a module's class, if that can be had; scripted modules have none."""
    return getattr(type(module), "forward", None)


def _place(error: Exception, module: nn.Module) -> str:
    """The line of the user's code at which tracing failed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    name = f"{type(module).__name__}.forward cannot be traced"
    return f"{name} at {frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else name


def _is_machinery(filename: str) -> bool:
    """Whether a file belongs to torch or to this package."""
    return filename.startswith((torch.__path__[0], __file__.rpartition("/")[0]))


def _first_line(error: Exception) -> str:
    """An error in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
