"""Calm: a model in training mode in which named modules are in evaluation mode, or nothing is dropped.

To find out what makes two computations differ, one thing at a time is taken away, and nothing else may
change with it: a model in evaluation mode leaves out more than dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


@contextmanager
def calm(model: nn.Module, names: Sequence[str], no_dropout: bool) -> Iterator[None]:
    """The model in training mode, but for the modules named, and dropout if asked for."""
    model.train()
    for name, module in model.named_modules():
        if name in names:
            module.eval()
    with _WithoutDropout() if no_dropout else nullcontext():
        yield


class _WithoutDropout(TorchFunctionMode):
    """While it is entered nothing is dropped, neither by modules nor by functions. Modules stay in
    training mode: attention asks its own mode, not that of the dropout in it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else options["input"]
        if name == "scaled_dot_product_attention":  # the probability is its fifth argument
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            options |= {} if len(args) > 4 else {"dropout_p": 0.0}
        elif name == "multi_head_attention_forward":  # its eleventh
            args = (*args[:10], 0.0, *args[11:])
        return func(*args, **options)
