"""Reading what a user's loss function returned, with a sentence for each thing it should not be.

Only shapes and types are looked at, never values: reading a value would wait for the device, once per
micro-batch. Values (not finite, negative weight) are looked at once, at the end of the step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from anybatch.errors import LossError
from anybatch.task import Loss, LossFunction

_MEAN, _SUM = 1, 2  # what torch calls its reductions in the graph

_REMEDY = (
    "return anybatch.Loss(sum, weight), a pair (sum, weight), or a scalar tensor that is the mean over"
    " the samples"
)


def read_loss(returned: Any, num_samples: Callable[[], int], training: bool = True) -> Loss:
    """`returned` as a `Loss`. A plain mean becomes a sum by `num_samples()`.

    Raises `LossError` if it is nothing that a loss can be.
    """
    if isinstance(returned, Tensor):
        _check_sum(returned, training)
        weight = num_samples()
        return Loss(returned * weight, weight)
    if isinstance(returned, tuple) and not isinstance(returned, Loss) and len(returned) == 2:
        returned = Loss(*returned)
    if not isinstance(returned, Loss):
        raise LossError(f"the loss function returned {_kind(returned)}: {_REMEDY}.")
    _check_sum(returned.sum, training)
    _check_weight(returned.weight)
    return returned


def warn_of_reduction(function: LossFunction, returned: Any, num_samples: int) -> None:
    """Warn, once for each loss function, of a sum that is taken for a mean, and the other way round.

    Only what one of torch's loss functions returned as it is shows its reduction; a loss that is worked
    on further (a term is added, say) does not, and is left to `verify`. Of one sample, mean and sum may
    well be the same.
    """
    if num_samples < 2:
        return
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if isinstance(returned, Tensor):
        if _reduction_of(returned) == _SUM:
            _warn(
                f"the loss function {name!r} returns a sum (reduction='sum') by itself, which is taken"
                " as the mean over the samples: the update is too large by a factor of about the"
                " micro-batch, and depends on it. Return anybatch.Loss(sum, weight) with the number of"
                " samples, or the mean.",
                *_place_of(function),
            )
        return
    total = returned.sum if isinstance(returned, Loss) else next(iter(_pair(returned)), None)
    if _reduction_of(total) == _MEAN:
        _warn(
            f"the loss function {name!r} returns a mean (reduction='mean') as its sum: means of"
            " micro-batches are added up and divided by the weight, so the update depends on how the"
            " step is cut. Return anybatch.Loss(sum, weight) with reduction='sum', or the mean by"
            " itself where it is one over the samples.",
            *_place_of(function),
        )


def _pair(returned: Any) -> tuple[Any, ...]:
    return returned if isinstance(returned, tuple) and len(returned) == 2 else ()


def _reduction_of(value: Any) -> int | None:
    """That of the loss function of torch whose result `value` is."""
    return getattr(getattr(value, "grad_fn", None), "_saved_reduction", None)


def _place_of(function: Any) -> tuple[str, int]:
    """File and line of `function`; of one that is not written in Python, this file."""
    code = getattr(function, "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else (__file__, 1)


@cache  # a plan is made of many passes, and each step takes some
def _warn(sentence: str, file: str, line: int) -> None:
    warnings.warn_explicit(sentence, UserWarning, file, line)


def _check_sum(value: Any, training: bool) -> None:
    if not isinstance(value, Tensor):
        raise LossError(f"the sum of the loss is {_kind(value)}: {_REMEDY}.")
    if value.dim() != 0:
        raise LossError(
            f"the loss has the shape {tuple(value.shape)}, not that of a single number: {_REMEDY}"
            " (reduction='sum' and the number of samples, say)."
        )
    if not value.is_floating_point():
        raise LossError(f"the loss has the dtype {value.dtype}, which has no gradient: {_REMEDY}.")
    if training and not value.requires_grad:
        raise LossError(
            "the loss does not depend on any parameter that requires a gradient: look for .detach(),"
            " .item() or torch.no_grad() in the loss function, or for layers that are all frozen."
        )


def _check_weight(value: Any) -> None:
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise LossError(
                f"the weight of the loss has the shape {tuple(value.shape)}: return its sum, a single"
                " number."
            )
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise LossError(f"the weight of the loss is {_kind(value)}: {_REMEDY}.")
    elif not 0 <= value < math.inf:
        raise LossError(
            f"the weight of the loss is {value!r}: weights are counts or importances, so they are"
            " finite, and not below zero."
        )


def _kind(value: Any) -> str:
    if value is None:
        return "None (is a return statement missing?)"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a value of type {type(value).__name__}"
