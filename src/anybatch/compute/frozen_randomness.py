"""Runs a model in training mode with some modules in evaluation mode, or with random draws held fixed.

To find the reason why two computations differ, one factor at a time is removed, and nothing else may
change with it: evaluation mode of the whole model disables more than dropout.
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
from anybatch.errors import LossError

MOST_DRAWS = 100_000
"""Maximum number of draws that are held fixed in one block."""


@contextmanager
def calm(model: nn.Module, names: Sequence[str], still: bool) -> Iterator[None]:
    """Context manager that puts `model` into training mode (see `into_training`), except for the
    modules `names`, which are put into evaluation mode. If `still`, random draws are held fixed.

    Raises `LossError`, in the block, after `MOST_DRAWS` draws: a loop that draws until a condition
    holds would not end.
    """
    into_training(model)
    for name, module in model.named_modules():
        if name in names:
            module.eval()
    with ExitStack() as left:
        if still:
            for module in model.modules():
                if isinstance(module, nn.RNNBase):  # its kernels apply dropout internally
                    left.callback(partial(setattr, module, "dropout", module.dropout))
                    module.dropout = 0.0
            left.enter_context(_Still())
        yield


class _Still(TorchFunctionMode):
    """Function mode that disables dropout, in modules and functions, and replaces random draws by the
    mean of their distribution, which does not depend on how a batch is split. Modules stay in training
    mode: attention checks its own mode, not that of its dropout module."""

    def __init__(self) -> None:
        super().__init__()
        self._num_draws = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else options["input"]
        if name == "gumbel_softmax":
            return _gumbel_softmax(*args, **options)
        if name == "scaled_dot_product_attention":  # dropout_p is its fifth argument
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            options |= {} if len(args) > 4 else {"dropout_p": 0.0}
        elif name == "multi_head_attention_forward":  # dropout_p is its eleventh argument
            args = (*args[:10], 0.0, *args[11:])
        elif name in ("rrelu", "rrelu_"):  # training is its fourth argument
            args = (*args[:3], False, *args[4:]) if len(args) > 3 else args
            options |= {} if len(args) > 3 else {"training": False}
        drawn = func(*args, **options)
        if name in _MEANS and isinstance(drawn, Tensor):
            self._num_draws += 1
            if self._num_draws > MOST_DRAWS:
                raise LossError(
                    f"the loss has called {name} until it was stopped after {MOST_DRAWS:,} draws, which"
                    " were held at their mean to compare passes: a loop that draws until a condition"
                    " holds does not end then. Draw in collate or the data set, or in one call."
                )
            with torch.no_grad():
                _MEANS[name](drawn, args, options)
        return drawn


def _constant(value: float, drawn: Tensor, _args: Any, _options: Any) -> None:
    drawn.fill_(value)


def _normal(drawn: Tensor, args: Any, options: Any) -> None:
    """Fill with the mean of `normal(mean, std)` or `tensor.normal_(mean, std)`."""
    rest = args[1:] if args and args[0] is drawn else args
    mean = options.get("mean", rest[0] if rest else 0.0)
    drawn.copy_(mean) if isinstance(mean, Tensor) else drawn.fill_(mean)


def _uniform(drawn: Tensor, args: Any, options: Any) -> None:
    low = options.get("from", args[1] if len(args) > 1 else 0.0)
    high = options.get("to", args[2] if len(args) > 2 else 1.0)
    drawn.fill_((low + high) / 2)


def _bernoulli(drawn: Tensor, args: Any, options: Any) -> None:
    """Fill with the mean of `bernoulli(p)` or `tensor.bernoulli_(p)`."""
    chance = options.get("p", args[1] if len(args) > 1 else None)
    if chance is None:
        chance = 0.5 if args[0] is drawn else args[0]
    drawn.copy_(chance) if isinstance(chance, Tensor) else drawn.fill_(chance)


def _first(drawn: Tensor, args: Any, _options: Any) -> None:
    """Fill with the first argument, the mean of `poisson(rate)` and the like."""
    drawn.copy_(args[0])


def _integer(drawn: Tensor, args: Any, options: Any) -> None:
    """Fill with the middle of `randint(low, high, size)`, `randint_like(tensor, low, high)` or
    `tensor.random_(low, high)`."""
    numbers = [n for n in args if isinstance(n, int)]
    numbers += [
        options[key] for key in ("low", "from", "high", "to") if options.get(key) is not None
    ]
    if numbers:
        low, high = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
        drawn.fill_((low + high - 1) // 2)


def _counted(drawn: Tensor, _args: Any, _options: Any) -> None:
    """Fill with 0, 1, 2, ... along the last dim, since indices may be drawn without replacement."""
    drawn.copy_(torch.arange(drawn.size(-1), device=drawn.device))


def _gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """Softmax without noise; if `hard`, one-hot with the gradient of the softmax."""
    soft = (logits / tau).softmax(dim)
    if not hard:
        return soft
    highest = torch.zeros_like(soft).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return highest - soft.detach() + soft


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
    "poisson": _first,
    "_standard_gamma": _first,
    "randint": _integer,
    "randint_like": _integer,
    "random_": _integer,
    "multinomial": _counted,
}
"""Functions that replace a draw by its mean, or by a value that is the same for each sample. `randperm`
has no such value: the order of the samples depends on how a batch is split."""
