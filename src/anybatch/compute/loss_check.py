"""Checks that a loss is additive over samples, which accumulation over micro-batches relies on.

Sums and weights are added over micro-batches and divided at the end. The result is the loss of the
whole batch if for any samples A and B

    sum(A and B) = sum(A) + sum(B)        weight(A and B) = weight(A) + weight(B)

and the same for metrics. The check runs once, before the first micro-batch and without gradients: it
compares a few samples with the same samples in two parts (one sample with itself repeated). Noise is
replaced by its mean, dropout is disabled, and BatchNorm uses its running statistics, since these differ
between any two passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from anybatch.compute.averages import warn_of
from anybatch.compute.ghost_norm import batch_norms
from anybatch.compute.held_still import calm
from anybatch.compute.modes import preserved
from anybatch.data.microbatch import doubled, slice_batch
from anybatch.errors import LossError
from anybatch.task import Loss, LossFunction

LOOKED_AT = 16
"""The most samples that the check uses."""

_CLOSE, _CLOSE_IN_HALF = 1e-3, 3e-2
"""Relative differences that rounding explains, in kernels that depend on the size of the batch."""

Evaluate: TypeAlias = Callable[[Any, int], "tuple[Loss, bool]"]
"""(batch, number of samples) -> (loss, whether the function returned a plain number)."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """The loss of some samples. `metrics`: sum and weight by name."""

    num_samples: int
    total: float
    weight: float
    metrics: Mapping[str, tuple[float, float]]
    is_plain: bool

    @property
    def returned(self) -> float:
        """The number that the function returned: the mean if it returned a plain number."""
        return self.total / self.weight if self.is_plain and self.weight else self.total


def check_adds_up(
    function: LossFunction,
    evaluate: Evaluate,
    explained: Callable[[Any, int], bool],
    batch: Any,
    num_samples: int,
    coarse: bool,
) -> bool:
    """Check the first of the `num_samples` samples of `batch`; return whether a warning was issued.

    Warns of a loss that compares the samples of a batch, of a penalty in a sum, and of metrics that are
    not additive. Errors of `evaluate` are ignored: the step itself meets what is wrong with the batch.

    Args:
        function: the user's.
        explained: warns if the autograd graph of the loss shows why it is not additive, and returns
            whether it did.
        coarse: the loss is computed in less than float32.

    Raises `LossError` for a sum that is returned as a mean, a mean that is returned as a sum, and a
    weight that does not add up.
    """
    size = min(num_samples, LOOKED_AT)
    cut = max(1, size // 3)  # of equal parts any mean of two means would be right
    close = _CLOSE_IN_HALF if coarse else _CLOSE

    def sums(piece: Any, count: int) -> _Sums:
        with _not_for_few_samples():
            return _sums(*evaluate(piece, count), count)

    try:
        some = _first(batch, size)
        if size == 1:
            some = doubled(some)
            first = sums(slice_batch(some, 0, 1), 1)
            parts = _Parts(sums(some, 2), first, first, close)
        else:
            first = sums(slice_batch(some, 0, cut), cut)
            second = sums(slice_batch(some, cut, size), size - cut)
            parts = _Parts(sums(some, size), first, second, close)
        if not parts.is_finite:
            return False
        count = parts.together.num_samples
        twice = parts.together if parts.adds_up else sums(doubled(some), 2 * count)
        if fault := parts.fault(twice):
            raise LossError(fault)
        warnings = [parts.metric(name) for name in parts.together.metrics]
        known = False
        if not parts.adds_up:
            with _not_for_few_samples():
                known = explained(some, count)
            warnings.append(None if known else parts.doubt(twice))
    except _NotForFew:
        return False
    for sentence in filter(None, warnings):
        warn_of(function, sentence)
    return known or any(warnings)


class _NotForFew(Exception):
    """The loss raised an error for a few samples."""


@contextmanager
def _not_for_few_samples() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _NotForFew from error


def _first(batch: Any, size: int) -> Any:
    with _not_for_few_samples():
        return slice_batch(batch, 0, size)


@contextmanager
def comparable(model: nn.Module) -> Iterator[bool]:
    """`model` in training mode without randomness, so that passes over different samples compare.
    Yields whether they do, which needs running statistics in each BatchNorm."""
    norms = batch_norms(model)
    with preserved(model), calm(model, list(norms), still=True):
        yield all(norm.running_mean is not None for norm in norms.values())


def is_coarse(model: nn.Module, device: torch.device) -> bool:
    """Whether `model` computes in less than float32."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return torch.is_autocast_enabled(device.type) or any(torch.finfo(d).eps > 1e-5 for d in dtypes)


def _sums(loss: Loss, is_plain: bool, num_samples: int) -> _Sums:
    weight = float(loss.weight)
    metrics: dict[str, tuple[float, float]] = {}
    for name, value in loss.metrics.items():
        metrics[name] = (
            (float(value[0]), float(value[1]))
            if isinstance(value, tuple)
            else (float(value), weight)
        )
    return _Sums(num_samples, float(loss.sum), weight, metrics, is_plain)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The samples `together`, and the same in two parts. `close`: relative tolerance."""

    together: _Sums
    first: _Sums
    second: _Sums
    close: float

    @property
    def is_finite(self) -> bool:
        """Whether the sums can be compared."""
        return math.isfinite(self.together.total) and math.isfinite(self.together.weight)

    @property
    def adds_up(self) -> bool:
        """Whether the sums are additive."""
        return self._equal(self.together.total, self.first.total, self.second.total)

    def fault(self, twice: _Sums) -> str | None:
        """A sentence on what is certainly wrong, or None. `twice`: the samples together, repeated."""
        a, b, both = self.first, self.second, self.together
        if not self._equal(both.weight, a.weight, b.weight):
            return (
                f"the weight of the loss does not add up: it is {a.weight:.6g} for"
                f" {_count(a)} and {b.weight:.6g} for {b.num_samples} more, but {both.weight:.6g} for"
                " all of them together. The gradient is divided by it, so it would depend on how the"
                " batch is cut: return anybatch.Loss(sum, weight) with the number of samples (or"
                " tokens) of the sum. To train by the sum itself, see 'My loss is a sum, and shall"
                " stay one' in the guide."
            )
        if self.adds_up:
            return None
        if both.is_plain:
            grows = self._equal(twice.returned, both.returned, both.returned)
            if grows and self._equal(both.returned, a.returned, b.returned):
                return (
                    f"the loss is a sum over the samples: it is {_shown(a)} for {_count(a)} and"
                    f" {_shown(b)} for {b.num_samples} more, and {_shown(both)} for all of them"
                    " together, but a plain number is taken for the mean, so the gradient would depend"
                    " on how the batch is cut. Return anybatch.Loss(sum, weight=number of samples). To"
                    " train by the sum itself, see 'My loss is a sum, and shall stay one' in the guide."
                )
            return None
        stays = self._equal(twice.total, both.total, 0.0)
        if stays and self._is_mean(both.total, a.total, b.total):
            return (
                f"the sum of the loss is a mean: it is {a.total:.6g} for {_count(a)},"
                f" {b.total:.6g} for {b.num_samples} more, and {both.total:.6g} for all of them"
                " together, so the gradient would depend on how the batch is cut. Return"
                " anybatch.Loss(mean * n, weight=n) with the number n of samples, or the mean alone."
            )
        return None

    def doubt(self, twice: _Sums) -> str:
        """Why sums that do not add up make a step that is cut inexact. `twice`: see `fault`."""
        a, b, both = self.first, self.second, self.together
        surplus = a.total + b.total - both.total
        missing = 2 * both.total - twice.total
        if not both.is_plain and abs(surplus - missing) <= 0.01 * abs(surplus):
            return (
                f"adds a term to its sum that does not depend on the samples ({surplus:.6g}: a penalty"
                " on the parameters, say). It is added once for each micro-batch, so its share of the"
                " gradient depends on how the step is cut. Multiply it by the weight:"
                " anybatch.Loss(sum + penalty * n, weight=n)."
            )
        return (
            f"does not add up over samples: {_shown(a)} for {_count(a)}, {_shown(b)} for"
            f" {b.num_samples} more, {_shown(both)} for all of them together. So the update depends"
            " on how the step is cut. If it is a mean over something else than samples (tokens, pixels"
            " that count), return anybatch.Loss(sum, weight). If it compares samples with each other"
            " (contrastive losses, correlation, dice over the batch, the root of a mean), it is exact"
            " in one piece (micro_batch), or as anybatch.JointLoss(encode, compare)."
        )

    def metric(self, name: str) -> str | None:
        """A sentence on a metric that is not additive, or None."""
        three = [one.metrics.get(name) for one in (self.together, self.first, self.second)]
        both, a, b = three
        if both is None or a is None or b is None:
            return None
        (total, first, second), weights = zip(both, a, b, strict=True)
        if not all(map(math.isfinite, (total, first, second, *weights))):
            return None
        if self._equal(total, first, second) and self._equal(*weights):
            return None
        what = "is a mean" if self._is_mean(total, first, second) else "does not add up"
        return (
            f"gives a metric {name!r} that {what}: {first:.6g} for {_count(self.first)}, {second:.6g}"
            f" for {self.second.num_samples} more, {total:.6g} for all of them together. Metrics are"
            " sums, which are added up over micro-batches and divided by the weight: give a sum, or a"
            " pair (sum, weight)."
        )

    def _equal(self, together: float, first: float, second: float) -> bool:
        scale = max(abs(together), abs(first) + abs(second))
        return abs(together - first - second) <= self.close * scale

    def _is_mean(self, together: float, first: float, second: float) -> bool:
        size, a, b = (one.num_samples for one in (self.together, self.first, self.second))
        return self._equal(together * size, first * a, second * b)


def _shown(sums: _Sums) -> str:
    return f"{sums.returned:.6g}"


def _count(sums: _Sums) -> str:
    return f"{sums.num_samples} sample{'s' if sums.num_samples > 1 else ''}"
