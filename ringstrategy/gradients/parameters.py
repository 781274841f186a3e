"""What to know of a module's parameters before their gradients are reduced."""

from __future__ import annotations

from torch import nn

__all__ = ["refuse_uninitialized", "sparse_parameters"]


def refuse_uninitialized(named_parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Raise for parameters of lazy modules, which have no shape yet.

    Raises:
        RuntimeError: with the first of them.
    """
    lazy = [name for name, parameter in named_parameters if isinstance(parameter, nn.parameter.UninitializedParameter)]
    if lazy:
        raise RuntimeError(
            f"Parameter '{lazy[0]}' has no shape yet: a lazy module must see an input before ranks can compare it. Run "
            "one forward pass in `configure_model` or `setup`."
        )


def sparse_parameters(module: nn.Module) -> frozenset[str]:
    """Names of the parameters whose gradients will be sparse, as far as their modules tell."""
    return frozenset(
        f"{name}.weight" if name else "weight"
        for name, child in module.named_modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    )
