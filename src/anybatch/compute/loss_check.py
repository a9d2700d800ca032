"""Checks that a loss is additive over samples, which accumulation over micro-batches relies on.

Sums and weights are added over micro-batches and divided at the end. The result is the loss of the
whole batch if for any samples A and B

    sum(A and B) = sum(A) + sum(B)        weight(A and B) = weight(A) + weight(B)

and the same for metrics. The check runs before the first micro-batch of some steps, without gradients:
it compares a few samples with the same samples in two parts (one sample with itself repeated). Noise is
replaced by its mean, dropout is disabled, and BatchNorm uses its running statistics, since these differ
between any two passes. Other random numbers are the same in each pass, unless their number depends on
the number of samples. If it does, and the loss depends on them, the check says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.compute.frozen_randomness import calm
from anybatch.compute.ghost_norm import batch_norms, is_spectral_norm
from anybatch.compute.joint import tensors_in
from anybatch.compute.loss_reduction_check import warn_of
from anybatch.compute.modes import preserved
from anybatch.data.batch_copies import copied
from anybatch.data.batch_slices import batch_size, doubled, slice_batch
from anybatch.data.generators import seed_by, seed_each, states_of
from anybatch.errors import LossError
from anybatch.side_effects import generators_in
from anybatch.task import JointLoss, Loss, LossFunction, MetricFunction

LOOKED_AT = 16
"""Maximum number of samples that the check uses."""

_FINE = 1e-12
"""Machine epsilon that only float64 is below."""

_CLOSE = 1e-4
"""Relative tolerance for losses in float32."""

_COARSE = 3e-2
"""Relative tolerance for losses in a lower precision."""

Evaluate: TypeAlias = Callable[[Any, int], "tuple[Loss, bool]"]
"""(batch, number of samples) -> (loss, whether the function returned a plain number)."""


_ANOTHER = (
    "gives another loss when the same samples pass a second time, before anything is trained: it, or"
    " the model, keeps something from one pass to the next (a counter, a running mean, a hidden state),"
    " or draws random numbers from a generator of its own. So the update depends on how the step is"
    " cut. Let a counter change between two steps. A state of the samples belongs into the batch, and"
    " its next value into anybatch.Loss(..., outputs=...)."
)


@dataclass(frozen=True, slots=True)
class Sums:
    """The loss of some samples. `metrics` maps names to (sum, weight)."""

    num_samples: int
    total: float
    weight: float
    metrics: Mapping[str, tuple[float, float]]
    is_plain: bool

    @property
    def returned(self) -> float:
        """The number that the loss function returned: the mean if it returned a plain number."""
        return self.total / self.weight if self.is_plain and self.weight else self.total

    @property
    def is_finite(self) -> bool:
        """Whether loss and weight are finite."""
        return math.isfinite(self.total) and math.isfinite(self.weight)

    def is_same(self, other: Sums, close: float) -> bool:
        """Whether the loss is the same as in `other`, within the relative tolerance `close`."""
        return abs(self.total - other.total) <= close * max(abs(self.total), abs(other.total))


def check_adds_up(
    function: LossFunction,
    evaluate: Evaluate,
    explained: Callable[[], bool],
    take: Callable[[int, int], Any],
    num_samples: int,
    cut: int,
    close: float,
) -> bool | None:
    """Compare the loss of some samples with that of the first `cut` of them and of the rest.

    Returns whether a warning was issued, or None if the values show nothing: the loss raises an error
    for few samples, depends on random numbers, is zero or is not finite.

    Warns about a loss that compares the samples of a batch, a penalty in a sum, and metrics that are
    not additive. Errors in `evaluate` are ignored: the step itself reports errors in the batch.

    Args:
        function: the user's loss function.
        explained: warns if the autograd graph of the loss shows why it is not additive, and returns
            whether it did.
        take: `take(start, stop)` returns these samples as a batch.
        num_samples: number of samples available. A single sample is repeated; the values show
            nothing if it is not in dim 0.
        cut: number of samples in the first part. It must not be half of `num_samples`: with equal
            parts, any mean of two means would be correct.
        close: relative tolerance for rounding errors; see `rounding`.

    Raises `LossError` for a sum that is returned as a mean, a mean that is returned as a sum, and a
    weight that is not additive.
    """

    own_generators = generators_in(function)

    def sums(piece: Any, count: int, key: int = 0) -> Sums:
        nonlocal close
        _seed(own_generators, key)
        with _not_for_few_samples():
            loss, is_plain = evaluate(piece, count)
        if isinstance(loss.sum, Tensor) and torch.finfo(loss.sum.dtype).eps > _FINE:
            close = max(close, _CLOSE)  # models of transformers compute losses in float32
        with _not_for_few_samples():
            return sums_of(loss, is_plain, count)

    try:
        with _not_for_few_samples():
            some = take(0, num_samples)
        if num_samples == 1:
            some = _repeated(some, 1)
            if some is None:
                return None
            pieces = [slice_batch(some, 0, 1)] * 2
            cut, num_samples = 1, 2
        else:
            with _not_for_few_samples():
                pieces = [take(0, cut), take(cut, num_samples)]
        first = sums(pieces[0], cut)
        states = [states_of(own_generators)]
        if first.is_finite and not first.is_same(sums(pieces[0], cut), close):
            warn_of(function, _ANOTHER)
            return True
        second = sums(pieces[1], num_samples - cut)
        states.append(states_of(own_generators))
        parts = Parts(sums(some, num_samples), first, second, close)
        are_as_many = states == [states_of(own_generators)] * 2  # of random numbers
        if not parts.together.is_finite or (first.is_finite and not second.is_finite):
            return None  # the step itself reports a mean over nothing
        if not parts.adds_up:
            close = max(close, rounding_inside(lambda: sums(some, num_samples)))
            parts = replace(parts, close=close)
        is_known = parts.adds_up or are_as_many
        others = (sums(some, num_samples, key) for key in (1, 2, 3))  # one may be close by chance
        if not is_known and any(parts.together.total != other.total for other in others):
            return None  # it depends on random numbers of the samples
        count = num_samples
        twice = parts.together
        if not parts.adds_up:
            twice = None
            if (double := _repeated(some, count)) is not None:
                with suppress(_NotForFew):  # twice the samples may not fit in memory
                    twice = sums(double, 2 * count)
        if fault := parts.fault(twice):
            raise LossError(fault)
        warnings = [parts.metric(name) for name in parts.together.metrics]
        known = False
        if not parts.adds_up:
            with _not_for_few_samples():
                known = explained()
            warnings.append(None if known else parts.doubt(twice))
    except _NotForFew:
        return None
    for sentence in filter(None, warnings):
        warn_of(function, sentence)
    if parts.is_zero and not any(warnings):
        return None
    return known or any(warnings)


def check_encode(
    function: JointLoss,
    encode: Callable[[Any, int], Any],
    compare: Callable[[Any, int], float],
    take: Callable[[int, int], Any],
    num_samples: int,
    cut: int,
    close: float,
) -> bool | None:
    """Compare the encodings of some samples with those of the first `cut` of them and of the rest.

    Returns whether a warning was issued, or None if the loss raises an error for few samples or depends
    on random numbers.

    Warns if the encoding of a sample depends on the other samples of its pass, and if the comparison
    depends on which samples were encoded last. Errors are ignored: the step itself reports them.

    Args:
        function: the user's loss.
        encode: maps a batch of a number of samples to their encodings.
        compare: maps the encodings of a number of samples to their loss.
        take, num_samples, cut, close: as for `check_adds_up`.
    """
    own_generators = generators_in(function.encode, function.compare)

    def encoded(start: int, stop: int, key: int = 0) -> Any:
        _seed(own_generators, key)
        return encode(take(start, stop), stop - start)

    def compared(encodings: Any) -> float:
        _seed(own_generators, key=0)
        return compare(encodings, num_samples)

    def are_close(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        return all(
            torch.allclose(a, b, rtol=0.0, atol=100 * close * float(a.abs().max()), equal_nan=True)
            for a, b in zip(some, others, strict=True)
            if a.is_floating_point() and a.numel()
        )

    try:
        together = encoded(0, num_samples)
        before = compared(together)
        parts = [tensors_in(encoded(0, cut)), tensors_in(encoded(cut, num_samples))]
        after = compared(together)
        rows = tensors_in(together)
        if not are_close(rows, [torch.cat(pair) for pair in zip(*parts, strict=True)]):
            if not are_close(rows, tensors_in(encoded(0, num_samples, key=1))):
                return None
            sentence = (
                "gives a sample another encoding if the pass contains other samples (statistics over"
                " dim 0, say), so the update depends on how the step is cut. Move what looks across"
                " samples into compare, which sees all of them at once."
            )
        elif not math.isclose(before, after, rel_tol=max(close, 1e-6)):
            sentence = (
                "leaves something on the model that compare reads (an auxiliary loss, say), and"
                " compare sees only that of the last micro-batch, without a gradient. Return it from"
                " encode, with one row for each sample."
            )
        else:
            return False
    except Exception:
        return None
    warn_of(function.encode, sentence, "encode")
    return True


def check_metrics(
    function: MetricFunction, model: nn.Module, batch: Any, num_samples: int, close: float
) -> None:
    """Warn about metrics of `function` that are single numbers and are not additive over the samples of
    `batch`: means, perhaps. Says nothing if its `num_samples` samples are not in dim 0. Errors are
    ignored: the evaluation itself reports them."""
    with suppress(Exception):
        few = min(LOOKED_AT, num_samples)
        cut = max(1, few // 3)
        if few < 2 or batch_size(batch) != num_samples:
            return
        found: list[Sums] = []
        for start, stop in ((0, few), (0, cut), (cut, few)):
            values = function(model, copied(slice_batch(batch, start, stop)))
            size = stop - start
            metrics = {
                name: (float(value), float(size))
                for name, value in values.items()
                if not isinstance(value, tuple)
            }
            found.append(Sums(size, 0.0, float(size), metrics, is_plain=False))
        parts = Parts(found[0], found[1], found[2], close)
        for name in parts.together.metrics:
            if fault := parts.metric(name):
                warn_of(function, fault, "metric")


def _seed(own_generators: Sequence[Any], key: int) -> None:
    """Seed all generators that a pass may draw from, with those of the loss itself."""
    seed_by(key)
    seed_each(own_generators, key)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(key)


def _repeated(batch: Any, num_samples: int) -> Any:
    """Return `batch` with its samples repeated once; None if they are not in dim 0 (the user cuts or
    packs such a batch), or cannot be repeated."""
    with suppress(Exception):  # torch.cat does not support every layout
        if batch_size(batch) == num_samples:
            return doubled(batch)
    return None


class _NotForFew(Exception):
    """The loss raised an error for a few samples."""


@contextmanager
def _not_for_few_samples() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _NotForFew from error


@contextmanager
def comparable(model: nn.Module) -> Iterator[bool]:
    """Context manager that puts `model` in training mode without randomness, to make passes over
    different samples comparable. Yields whether they are: each BatchNorm needs running statistics."""
    norms = batch_norms(model)
    spectral = (name for name, module in model.named_modules() if is_spectral_norm(module))
    with preserved(model), calm(model, [*norms, *spectral], still=True):
        yield all(norm.running_mean is not None for norm in norms.values())


def is_coarse(model: nn.Module, device: torch.device) -> bool:
    """Whether `model` computes in a precision lower than float32."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return torch.is_autocast_enabled(device.type) or any(torch.finfo(d).eps > 1e-5 for d in dtypes)


def rounding(model: nn.Module, device: torch.device) -> float:
    """Maximum relative difference between losses of the same samples that is due to rounding, since
    kernels are chosen by the size of the batch."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point() or p.is_complex()}
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes), default=1.0)
    if is_coarse(model, device):
        return _COARSE
    if coarsest < _FINE:
        return 1e-8
    return _CLOSE if device.type == "cpu" else 1e-3  # TF32 may be on


def rounding_inside(run: Callable[[], object]) -> float:
    """Relative tolerance for the coarsest floating point dtype that `run()` computes in, since a loss
    may convert what a finer model gives it; 0 if `run` raises an error."""
    noted = _Dtypes()
    with suppress(Exception), noted:
        run()
    coarsest = max((torch.finfo(dtype).eps for dtype in noted.dtypes), default=0.0)
    return 0.0 if coarsest < _FINE else _COARSE if coarsest > 1e-5 else _CLOSE


class _Dtypes(TorchDispatchMode):
    """Records the floating point dtypes of results."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for one in results if isinstance(results, tuple | list) else [results]:
            if isinstance(one, Tensor) and one.is_floating_point():
                self.dtypes.add(one.dtype)
        return results


def sums_of(loss: Loss, is_plain: bool, num_samples: int) -> Sums:
    """Read the values of `loss`. `is_plain`: whether the loss function returned a plain number."""
    weight = float(loss.weight)
    metrics: dict[str, tuple[float, float]] = {}
    for name, value in loss.metrics.items():
        metrics[name] = (
            (float(value[0]), float(value[1]))
            if isinstance(value, tuple)
            else (float(value), weight)
        )
    return Sums(num_samples, float(loss.sum), weight, metrics, is_plain)


@dataclass(frozen=True, slots=True)
class Parts:
    """The loss of some samples `together`, and of the same samples in two parts. `close` is the
    relative tolerance."""

    together: Sums
    first: Sums
    second: Sums
    close: float

    @property
    def adds_up(self) -> bool:
        return self._equal(self.together.total, self.first.total, self.second.total)

    @property
    def is_zero(self) -> bool:
        return not (self.together.total or self.first.total or self.second.total)

    def fault(self, twice: Sums | None) -> str | None:
        """Return an error message if the loss is certainly wrong, else None. `twice` is the loss of all
        samples repeated once, or None if it is unknown."""
        a, b, both = self.first, self.second, self.together
        if not self._equal(both.weight, a.weight, b.weight):
            return (
                f"the weight of the loss does not add up: it is {a.weight:.6g} for"
                f" {_count(a)} and {b.weight:.6g} for {b.num_samples} more, but {both.weight:.6g} for"
                " all of them together. The gradient is divided by it, so it would depend on how the"
                " batch is cut: return anybatch.Loss(sum, weight) with the number of samples (or"
                " tokens) of the sum. To train by the sum itself, see 'Keeping a loss that is a"
                " sum' in the guide."
            )
        if self.adds_up or twice is None:
            return None
        if both.is_plain:
            grows = self._equal(twice.returned, both.returned, both.returned)
            if grows and self._equal(both.returned, a.returned, b.returned):
                return (
                    f"the loss is a sum over the samples: it is {_shown(a)} for {_count(a)} and"
                    f" {_shown(b)} for {b.num_samples} more, and {_shown(both)} for all of them"
                    " together, but a plain number is taken for the mean, so the gradient would depend"
                    " on how the batch is cut. Return anybatch.Loss(sum, weight=number of samples). To"
                    " train by the sum itself, see 'Keeping a loss that is a sum' in the guide."
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

    def doubt(self, twice: Sums | None) -> str:
        """Return the warning for sums that are not additive, which make a step that is cut into
        micro-batches inexact. `twice`: see `fault`."""
        a, b, both = self.first, self.second, self.together
        surplus = a.total + b.total - both.total
        missing = math.nan if twice is None else 2 * both.total - twice.total
        if not both.is_plain and abs(surplus - missing) <= 0.01 * surplus:
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
            " that count), return anybatch.Loss(sum, weight), as anybatch.model_loss does for models"
            " of transformers. If it compares samples with each other (contrastive losses, correlation,"
            " dice over the batch, the root of a mean), it is exact in one piece (micro_batch), or as"
            " anybatch.JointLoss(encode, compare)."
        )

    def metric(self, name: str) -> str | None:
        """Return a warning if the metric `name` is not additive, else None."""
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


def _shown(sums: Sums) -> str:
    return f"{sums.returned:.6g}"


def _count(sums: Sums) -> str:
    return f"{sums.num_samples} sample{'s' if sums.num_samples > 1 else ''}"
