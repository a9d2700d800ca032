"""A computation in float64, whatever narrower dtypes are written into it.

A model and its batch in float64 still meet constants of float32 (weights of classes, say) and casts
to it (`logits.float()`). In float64 rounding is out of the way, so that two computations can be
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
    """While it is entered, whoever asks for a narrower floating-point dtype is given float64, and what
    meets a tensor of float64, or is added up, is cast to it first. What is written to keeps its dtype,
    and what is written is cast to that."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _CASTS:
            return args[0].double()
        if name == "view" or "out" in options:  # `view(dtype)` is about bits
            return func(*args, **options)
        if _writes(name) and args and isinstance(args[0], Tensor):
            to = args[0].dtype if args[0].is_floating_point() else None
            rest = _mapped((args[1:], options), lambda value: _cast(value, to))
            return func(args[0], *rest[0], **rest[1])
        wide = name in _ADDS  # in few digits a sum depends on where it is cut
        wide = wide or any(_is_float(value, (torch.float64,)) for value in _leaves((args, options)))
        to = torch.float64 if wide else None
        args, options = _mapped((args, options), lambda value: _cast(value, to))
        return func(*args, **options)


def _writes(name: str) -> bool:
    """Whether the function or method of this name writes to its first argument."""
    if name.startswith("__"):
        return name.startswith(("__set", "__i"))
    return name.endswith("_")


def _cast(value: Any, to: torch.dtype | None) -> Any:
    """A dtype that is too narrow, made float64; a floating-point tensor, in the dtype `to`."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROWER else value
    if to is not None and _is_float(value, (*_NARROWER, torch.float64)):
        return value.to(to)
    return value


def _is_float(value: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    return isinstance(value, Tensor) and value.dtype in dtypes


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with `function` applied to what its lists, tuples and dicts hold."""
    if type(value) in (list, tuple):
        return type(value)(_mapped(one, function) for one in value)
    if type(value) is dict:
        return {key: _mapped(one, function) for key, one in value.items()}
    return function(value)


def _leaves(value: Any) -> Iterator[Any]:
    """What lists, tuples and dicts hold."""
    if type(value) in (list, tuple, dict):
        for one in value.values() if type(value) is dict else value:
            yield from _leaves(one)
    else:
        yield value
