"""Parameters without memory: how they lose it and get it back, and what happens if somebody computes with them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["AbsentParameter", "check_exchangeable", "exchange", "give_memory", "take_memory"]


class AbsentParameter(nn.Parameter):
    """A parameter that other stages hold: it has a shape, a dtype and a place in the optimizer, but no values.

    To compute with it is an error, which must not go unseen: torch multiplies and convolves with meta tensors without
    complaint, and returns whatever is in memory. What asks for no values (sizes, ``.grad``, optimizers, ``deepcopy``,
    averages of absent parameters) works.

    Attributes:
        absence: where its values are.
    """

    absence: str = "A parameter is held by other stages"

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentParameter:
        copy = memo[id(self)] = _absent(self.data.clone(), self.requires_grad, self.absence)
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # torch would make it a plain parameter on the meta device.
        return _absent, (self.data, self.requires_grad, self.absence)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse to mix absent with real tensors, and to extend a graph of autograd."""
        kwargs = kwargs or {}
        if func is Tensor.copy_ and args[0].is_meta:
            return args[0]  # load_state_dict() and weight averages copy into all parameters; here is no room for it
        if func in (torch.equal, Tensor.equal) and all(isinstance(arg, nn.Parameter) for arg in args):
            return args[0] is args[1]  # how Lightning's BaseFinetuning looks for a parameter in an optimizer
        mixed = False
        if len(args) != 1 or kwargs or not isinstance(args[0], cls):
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            mixed = not all(tensor.is_meta for tensor in tensors)
        if not mixed:
            result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            results = result if isinstance(result, (tuple, list)) else [result]
            if not any(isinstance(one, Tensor) and one.grad_fn is not None for one in results):
                return result
        absent = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise RuntimeError(
            f"{absent.absence}, and {getattr(func, '__name__', func)}() needs its values. Layers of other stages run "
            "where the pipelined module is called as a whole; do not call them, or use their parameters, by themselves."
        )


def _absent(value: Tensor, requires_grad: bool, absence: str) -> AbsentParameter:
    parameter = AbsentParameter(value, requires_grad)
    parameter.absence = absence
    return parameter


def check_exchangeable(parameter: nn.Parameter, name: str) -> None:
    """Refuse parameters that have no shape, or more to them than one tensor.

    Raises:
        TypeError: names the parameter.
    """
    if is_lazy(parameter):
        raise TypeError(f"'{name}' has no shape yet: call the module once before training starts.")
    if not issubclass(type(parameter), nn.Parameter):
        raise TypeError(
            f"'{name}' is a {type(parameter).__name__}, of which a stage cannot let go; only plain tensors and "
            "subclasses of torch.nn.Parameter can be spread over stages."
        )


def take_memory(parameter: nn.Parameter, modules: Sequence[nn.Module], absence: str) -> nn.Parameter:
    """Leave a parameter without memory, but with its identity, attributes, hooks and ``requires_grad``.

    Its class stays if it is a subclass of Parameter, else it becomes :class:`AbsentParameter`.

    Args:
        parameter: loses its values and its gradient.
        modules: that register it.
        absence: says whose parameter it is, for errors.

    Returns:
        What has the values now; :func:`exchange` gives them back.

    Raises:
        RuntimeError: somebody else uses the memory.
    """
    plain = type(parameter) is nn.Parameter
    empty = torch.empty_like(parameter.detach(), device="meta")
    other = _alike(parameter, empty, AbsentParameter if plain else type(parameter))
    if plain:
        vars(other)["absence"] = absence
    for module in modules:
        # What hooks like torch.nn.utils.weight_norm's make of parameters before every forward.
        made = {key: value for key, value in vars(module).items() if isinstance(value, Tensor) and value.grad_fn}
        vars(module).update({key: value.detach().to("meta") for key, value in made.items()})
        del made
    try:
        _exchange_patiently(parameter, other, modules)
    except RuntimeError as error:
        why = "a tensor that was computed from it (an output, a loss, a view) is still alive"
        if "weakref" in str(error):
            why = "somebody keeps a weak reference to it"
        problem = f"{absence}, but cannot let go of it: {why}. Delete that before training starts."
        raise RuntimeError(problem) from error
    return other


def give_memory(parameter: nn.Parameter, modules: Sequence[nn.Module], value: Tensor) -> None:
    """Undo :func:`take_memory`: ``value`` becomes the parameter's memory."""
    kind = nn.Parameter if isinstance(parameter, AbsentParameter) else type(parameter)
    other = _alike(parameter, value, kind)
    vars(other).pop("absence", None)
    _exchange_patiently(parameter, other, modules)


def exchange(parameter: Tensor, other: Tensor, modules: Sequence[nn.Module]) -> None:
    """Exchange all of two parameters but their identity.

    Args:
        parameter: keeps its hooks.
        other: another parameter.
        modules: that register the first.
    """
    # Recurrent layers keep weak references to their weights, which torch takes for a danger.
    recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    try:
        torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    finally:
        for module in recurrent:
            module._init_flat_weights()  # also lays the weights out for cuDNN, once they are all there
    # The dictionaries of hooks keep their place, but autograd has to be told of them again.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, hooks) is not None:
            setattr(parameter, hooks, getattr(parameter, hooks))


def _exchange_patiently(parameter: Tensor, other: Tensor, modules: Sequence[nn.Module]) -> None:
    """Exchange two parameters; what uses the first may be in a cycle that nobody reaches any more."""
    try:
        exchange(parameter, other, modules)
    except RuntimeError:
        gc.collect()
        exchange(parameter, other, modules)


def _alike(parameter: nn.Parameter, value: Tensor, kind: type[nn.Parameter]) -> nn.Parameter:
    """A parameter with another value and class, but the same attributes."""
    other: nn.Parameter = torch.Tensor._make_subclass(kind, value, parameter.requires_grad)
    vars(other).update(vars(parameter))
    return other
