"""Reads the value returned by a user's loss function, with a specific error for each invalid form.

Only shapes and types are checked, never values: reading a value would synchronize with the device once
per micro-batch. Values (not finite, negative weight) are checked once, at the end of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from anybatch.errors import LossError
from anybatch.task import Loss, LossFunction

_REMEDY = (
    "return anybatch.Loss(sum, weight), a pair (sum, weight), or a scalar tensor that is the mean over"
    " the samples"
)


def read_loss(returned: Any, num_samples: Callable[[], int], training: bool = True) -> Loss:
    """Convert `returned` to a `Loss`. A plain mean is multiplied by `num_samples()` to get a sum.

    Raises `LossError` if `returned` is not a valid loss.
    """
    if isinstance(returned, Tensor):
        _check_sum(returned, training)
        weight = num_samples()
        return Loss(widened(returned) * weight, weight)
    if isinstance(returned, tuple) and not isinstance(returned, Loss) and len(returned) == 2:
        returned = Loss(*returned)
    if not isinstance(returned, Loss):
        raise LossError(f"the loss function returned {_kind(returned)}: {_REMEDY}.")
    _check_sum(returned.sum, training)
    _check_weight(returned.weight)
    return returned


def widened(values: Tensor) -> Tensor:
    """Cast `values` to float32 if their dtype is narrower, so that sums and scaling do not overflow."""
    return values.float() if values.dtype.itemsize < 4 else values


@contextmanager
def explained_as(said: str, sentence: str) -> Iterator[None]:
    """Context manager that replaces a `RuntimeError` whose message contains `said` with a `LossError`
    whose message is `sentence`."""
    try:
        yield
    except RuntimeError as error:
        if said not in str(error):
            raise
        raise LossError(sentence) from error


def naming_lost_graphs() -> AbstractContextManager[None]:
    """Context manager around a pass (forward and backward) that explains errors about a freed graph:
    torch reports that the graph was freed, but not what used it.

    Raises `LossError` in place of torch's error.
    """
    return explained_as(
        "backward through the graph a second time",
        "the graph of the loss was used before its backward: the loss function calls backward()"
        " itself, which anybatch does (return the loss alone), or the model keeps a result of an"
        " earlier pass, such as a hidden state, without .detach().",
    )


def leaving_gradients_alone(loss: LossFunction, parameters: Sequence[nn.Parameter]) -> LossFunction:
    """Wrap `loss` to detect changes to the gradients, which are summed over passes. A loss function
    that clears them, as the body of a training loop does, would leave only those of the last pass,
    without any other symptom. The same is true of gradients scaled by a GradScaler in the script.

    The wrapper raises `LossError` if `loss` clears the gradients, adds to them, or scales the loss.
    """

    def watched(model: nn.Module, batch: Any) -> Any:
        # Checking one gradient is enough: code that clears one clears all.
        found = next(((p, p.grad, p.grad._version) for p in parameters if p.grad is not None), None)
        with _scaling_refused():
            returned = loss(model, batch)
        if found is not None:
            param, gradient, version = found
            if param.grad is not gradient or gradient._version != version:
                raise LossError(
                    "the loss function changes the gradients, which are added up over all"
                    " micro-batches: it clears them (zero_grad()), or calls backward() itself, which"
                    " anybatch does: return the loss alone."
                )
        return returned

    return watched


@contextmanager
def _scaling_refused() -> Iterator[None]:
    """Context manager around a loss function call in which `GradScaler.scale` raises an error."""
    before = GradScaler.scale
    GradScaler.scale = _refuse_scaling
    try:
        yield
    finally:
        GradScaler.scale = before


def _refuse_scaling(self: GradScaler, outputs: Any) -> Any:
    del self, outputs
    raise LossError(
        "the loss function scales the loss by a GradScaler, and nothing divides the gradient by that"
        " again: return the loss as it is. With precision='fp16' anybatch scales and unscales."
    )


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
        if value.requires_grad:
            raise LossError(
                "the weight of the loss requires a gradient, so it is no count, but another loss:"
                " return the sum of the two, or anybatch.Loss(sum, weight) with weight.detach()."
            )
    elif isinstance(value, Mapping):
        raise LossError(
            "the loss function returned a pair whose second member, the weight, is a dict: if it holds"
            " metrics, return anybatch.Loss(sum, weight, metrics={...}), each of them a sum."
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
