"""Runs a computation in float64, even where its code specifies narrower dtypes.

A model and a batch in float64 still meet float32 constants (class weights, for example) and casts to
float32 (`logits.float()`). In float64 rounding errors are negligible, so that two computations can be
compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_NARROWER = (torch.float32, torch.float16, torch.bfloat16)

_CASTS = ("float", "half", "bfloat16")

_ADDS = frozenset(
    (
        "sum",
        "nansum",
        "mean",
        "nanmean",
        "cumsum",
        "prod",
        "logsumexp",
        "norm",
        "vector_norm",
        "dot",
    )
)


class InDoubles(TorchFunctionMode):
    """Function mode that replaces narrower floating-point dtypes by float64. Tensors that are combined
    with a float64 tensor, or summed, are cast to float64 first. A tensor that is written in place keeps
    its dtype, and the values written are cast to that dtype."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _CASTS:
            return args[0].double()
        if name == "view" or "out" in options:  # `view(dtype)` reinterprets bits
            return func(*args, **options)
        if _writes(name) and args and isinstance(args[0], Tensor):
            to = args[0].dtype if args[0].is_floating_point() else None
            rest = tree_map(lambda value: _cast(value, to), (args[1:], options))
            return func(args[0], *rest[0], **rest[1])
        wide = name in _ADDS  # in low precision a sum depends on where it is split
        wide = wide or any(
            _is_float(value, (torch.float64,)) for value in tree_leaves((args, options))
        )
        to = torch.float64 if wide else None
        args, options = tree_map(lambda value: _cast(value, to), (args, options))
        return func(*args, **options)


def _writes(name: str) -> bool:
    """Whether the function or method with this name writes to its first argument."""
    if name.startswith("__"):
        return name.startswith(("__set", "__i"))
    return name.endswith("_")


def _cast(value: Any, to: torch.dtype | None) -> Any:
    """Replace a dtype that is too narrow by float64, and cast a floating-point tensor to `to`."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROWER else value
    if to is not None and _is_float(value, (*_NARROWER, torch.float64)):
        return value.to(to)
    return value


def _is_float(value: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    return isinstance(value, Tensor) and value.dtype in dtypes
