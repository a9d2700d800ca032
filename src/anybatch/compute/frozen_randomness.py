"""A model in training mode in which named modules are in evaluation mode, or no chance is left.

To find out what makes two computations differ, one thing at a time is taken away, and nothing else may
change with it: a model in evaluation mode leaves out more than dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybatch.compute.modes import into_training


@contextmanager
def calm(model: nn.Module, names: Sequence[str], still: bool) -> Iterator[None]:
    """The model in training mode, as far as its user left it in that, but for the modules named;
    `still`: with random draws held still."""
    into_training(model)
    for name, module in model.named_modules():
        if name in names:
            module.eval()
    with ExitStack() as left:
        if still:
            for module in model.modules():
                if isinstance(module, nn.RNNBase):  # whose kernels are told, and drop by themselves
                    left.callback(partial(setattr, module, "dropout", module.dropout))
                    module.dropout = 0.0
            left.enter_context(_Still())
        yield


class _Still(TorchFunctionMode):
    """While it is entered nothing is dropped, neither by modules nor by functions, and whatever is
    drawn is the mean of what it is drawn from, which no cut changes. Modules stay in training mode:
    attention asks its own mode, not that of the dropout in it."""

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
        drawn = func(*args, **options)
        if name in _MEANS and isinstance(drawn, Tensor):
            with torch.no_grad():
                _MEANS[name](drawn, args, options)
        return drawn


def _constant(value: float, drawn: Tensor, _args: Any, _options: Any) -> None:
    drawn.fill_(value)


def _normal(drawn: Tensor, args: Any, options: Any) -> None:
    """Of `normal(mean, std)` and `tensor.normal_(mean, std)`."""
    rest = args[1:] if args and args[0] is drawn else args
    mean = options.get("mean", rest[0] if rest else 0.0)
    drawn.copy_(mean) if isinstance(mean, Tensor) else drawn.fill_(mean)


def _uniform(drawn: Tensor, args: Any, options: Any) -> None:
    low = options.get("from", args[1] if len(args) > 1 else 0.0)
    high = options.get("to", args[2] if len(args) > 2 else 1.0)
    drawn.fill_((low + high) / 2)


def _bernoulli(drawn: Tensor, args: Any, options: Any) -> None:
    """Of `bernoulli(p)` and `tensor.bernoulli_(p)`."""
    chance = options.get("p", args[1] if len(args) > 1 else None)
    if chance is None:
        chance = 0.5 if args[0] is drawn else args[0]
    drawn.copy_(chance) if isinstance(chance, Tensor) else drawn.fill_(chance)


_MEANS = {
    "rand": partial(_constant, 0.5),
    "rand_like": partial(_constant, 0.5),
    "randn": partial(_constant, 0.0),
    "randn_like": partial(_constant, 0.0),
    "normal": _normal,
    "normal_": _normal,
    "uniform_": _uniform,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli,
    "exponential_": partial(_constant, 1.0),
}
"""How what is drawn becomes its mean. Orders and whole numbers (`randperm`, `randint`) have none."""
