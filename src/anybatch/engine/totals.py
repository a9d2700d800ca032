"""Totals: sums over the micro-batches of a step, kept on the device until the step ends.

Reading a number from a GPU waits for all work queued before it. So losses, weights and metrics are only
collected here, and are read together, once, when the ranks agree. On CPU there is nothing to wait for,
so numbers are read and added up immediately.

Ranks add up their metrics by position. So metrics are sorted by name, an order that is the same in
every process (the order of a set of strings is not), and a checksum of the names, their mark, is
exchanged too.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anybatch.errors import LossError
from anybatch.parallel import NUM_FIXED, Agreed, Group
from anybatch.task import Loss

_CHUNK = 256

_MARKS = NUM_FIXED - 2  # position of the marks in the totals


class Totals:
    """Sums of one rank over one step or one evaluation."""

    def __init__(self, device: torch.device, num_parts: int = 1) -> None:
        self._device = device
        self._num_parts = num_parts
        self._losses = _Series(device, num_parts)
        self._weights = _Series(device, num_parts)
        self._metrics: dict[str, tuple[_Series, _Series]] | None = None
        self._part: tuple[Tensor, Tensor | float, int] | None = None

    def add_part(self, norm: Tensor, part: int = 0) -> None:
        """Record `norm`, the 2-norm of the summed gradient of all micro-batches so far, which belong to
        `part`. Called once."""
        self._part = norm, self._weights.totals()[part], part

    def add(self, loss: Loss, extra: Mapping[str, Any] | None = None, part: int = 0) -> None:
        """Add one micro-batch of `part`. `extra` holds further metrics: name to (sum, weight)."""
        self._losses.add(loss.sum, part)
        self._weights.add(loss.weight, part)
        for metrics in (loss.metrics, extra):
            if metrics is not None and not isinstance(metrics, Mapping):
                raise LossError(
                    f"the metrics are a value of type {type(metrics).__name__}: return a dict from"
                    " their names to sums, or to pairs (sum, weight)."
                )
        if loss.metrics or extra or self._metrics:
            pairs = {n: _pair(n, v, loss.weight) for n, v in loss.metrics.items()}
            pairs.update((n, _pair(n, v, loss.weight)) for n, v in (extra or {}).items())
            self._add_metrics(pairs, part)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the metrics, in the order in which the loss returns them."""
        return tuple(self._metrics or ())

    def tensor(self) -> Tensor:
        """Returns a float64 tensor `[(NUM_FIXED + 2 * num_metrics) * num_parts]`: loss sum, weight,
        number of negative weights, statistics of first micro-batches (see `_first`), checksums that
        show whether ranks have the same metrics (see `_marks`), and the sum and weight of each metric,
        sorted by name. Each of these is given for all parts in turn."""
        metrics = self._metrics or {}
        pairs = [series for name in _in_order(metrics) for series in metrics[name]]
        negative = self._weights.num_negative()
        sums = [*self._losses.totals(), *self._weights.totals(), *negative]
        for series in pairs:
            sums += series.totals()
        at = 3 * self._num_parts
        sums[at:at] = [*self._first(any(isinstance(one, Tensor) for one in sums)), *self._marks()]
        if not any(isinstance(one, Tensor) for one in sums):
            return torch.tensor(sums, dtype=torch.float64, device=self._device)
        return torch.stack([self._placed(one) for one in sums])

    def not_finite(self) -> list[int]:
        """Returns the numbers of micro-batches whose loss or weight is not finite. Waits for the
        device."""
        return sorted({*self._losses.not_finite(), *self._weights.not_finite()})

    def _first(self, on_device: bool) -> list[Tensor | float]:
        """Returns, for the gradient passed to `add_part`, its squared norm divided by its weight, the
        weight, and 1; zeros if there is none or its weight is zero. Weighted means follow from the sums
        of these over ranks."""
        sums: list[Tensor | float] = [0.0] * (3 * self._num_parts)
        if self._part is None:
            return sums
        norm, weight, part = self._part
        if on_device or norm.device.type != "cpu":
            heavy = self._placed(weight)
            counts = heavy > 0
            square = torch.where(counts, self._placed(norm).square() / heavy, 0.0)
            found: Sequence[Tensor | float] = square, heavy, counts
        else:
            heavy = float(weight)
            found = (float(norm) ** 2 / heavy, heavy, 1.0) if heavy > 0 else (0.0, 0.0, 0.0)
        sums[part :: self._num_parts] = found
        return sums

    def _marks(self) -> list[float]:
        """Returns the mark of the metric names and its square, once instead of by part. If `n` ranks
        have metrics, `n` times the sum of the squares equals the square of the sum exactly if all marks
        are the same (Cauchy-Schwarz), and all ranks see it."""
        mark = float(_mark(self.names))
        others = [0.0] * (self._num_parts - 1)
        return [mark, *others, mark**2, *others]

    def _placed(self, value: Tensor | float) -> Tensor:
        """Returns `value` on the device. Does not wait for the device, as copying a number would."""
        if isinstance(value, Tensor):
            return value.to(self._device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self._device)

    def _add_metrics(self, pairs: dict[str, tuple[Any, Any]], part: int) -> None:
        if self._metrics is None:
            self._metrics = {n: (self._series(), self._series()) for n in pairs}
        if self._metrics.keys() != pairs.keys():
            raise LossError(
                f"the metrics {sorted(pairs)} of this micro-batch are not the metrics"
                f" {sorted(self._metrics)} of the one before: return the same names each time."
            )
        for name, (value, weight) in pairs.items():
            self._metrics[name][0].add(value, part)
            self._metrics[name][1].add(weight, part)

    def _series(self) -> _Series:
        return _Series(self._device, self._num_parts)


def over_parts(agreed: Agreed, num_parts: int) -> Agreed:
    """Returns `agreed`, whose totals have `num_parts` parts each, with the totals over all parts. These
    sums are exact, so they do not depend on the order."""
    if num_parts == 1:
        return agreed
    totals = agreed.totals
    sums = [math.fsum(totals[at : at + num_parts]) for at in range(0, len(totals), num_parts)]
    return replace(agreed, totals=sums, lengths=tuple(n // num_parts for n in agreed.lengths))


class Names:
    """The names of the metrics on all ranks; a rank without samples does not know them by itself."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._known: tuple[float, tuple[str, ...]] | None = None  # (mark, names)

    def common(self, own: tuple[str, ...], agreed: Agreed) -> tuple[str, ...]:
        """Returns the names that go with `agreed.totals`. Ranks communicate only if one of them lacks
        names that it has not received yet; all ranks see the same totals, so all of them know when.

        Raises `LossError`, on all ranks, if they have metrics of different names.
        """
        having = sum(length > NUM_FIXED for length in agreed.lengths)
        if not having:
            return ()
        marks, squares = agreed.totals[_MARKS:NUM_FIXED]
        if having * int(squares) != int(marks) ** 2:
            raise LossError(_differing(self._group.exchange(own)))
        if having == len(agreed.lengths):
            return own
        if self._known is None or self._known[0] != marks / having:
            self._known = marks / having, max(self._group.exchange(own), key=len)
        return self._known[1]


class Means:
    """Values read from the totals of all ranks: what `Totals.tensor` holds after the ranks agreed."""

    def __init__(self, values: list[float], names: tuple[str, ...]) -> None:
        self.loss_sum: float = values[0]
        self.weight: float = values[1]
        self.num_negative: float = values[2]
        self._squares, self._part_weights, self._num_parts = values[3:_MARKS]
        pairs = zip(values[NUM_FIXED::2], values[NUM_FIXED + 1 :: 2], strict=True)
        found = dict(zip(_in_order(names), pairs, strict=True))
        self._pairs = {name: found[name] for name in names}

    @property
    def loss(self) -> float:
        """Mean loss; NaN if the total weight is zero."""
        return self.loss_sum / self.weight if self.weight else float("nan")

    @property
    def part_weight(self) -> float | None:
        """See `StepDone`. Also None if the only part is the whole step."""
        weight = self._part_weights / self._num_parts if self._num_parts else 0.0
        return weight if 0 < weight < self.weight else None

    @property
    def part_grad_norm(self) -> float | None:
        if self.part_weight is None:
            return None
        return math.sqrt(self._squares / self._part_weights)

    @property
    def metrics(self) -> dict[str, float]:
        return {n: s / w if w else float("nan") for n, (s, w) in self._pairs.items()}


class _Series:
    """Numbers, one per micro-batch: those on the host are added up at once, those on a device later.
    Micro-batches of one part are consecutive."""

    def __init__(self, device: torch.device, num_parts: int) -> None:
        self._device = device
        self._plain = [0.0] * num_parts
        self._plain_count = 0
        self._plain_negative = [0] * num_parts
        self._plain_not_finite: list[int] = []  # numbers
        self._part = 0
        self._tensors: list[Tensor] = []  # of the current part
        self._chunks: list[tuple[int, Tensor]] = []  # with their parts

    def add(self, value: Tensor | float, part: int) -> None:
        if isinstance(value, Tensor):
            if value.device.type != "cpu":
                self._gather(value.detach(), part)
                return
            value = value.item()
        if not math.isfinite(value):
            self._plain_not_finite.append(self._plain_count)
        self._plain[part] += value
        self._plain_count += 1
        self._plain_negative[part] += value < 0

    def totals(self) -> list[Tensor | float]:
        """By part."""
        sums: list[Tensor | float] = [*self._plain]
        for part, chunk in self._all_chunks():
            sums[part] = sums[part] + chunk.sum(dtype=torch.float64)
        return sums

    def num_negative(self) -> list[Tensor | float]:
        """By part."""
        counts: list[Tensor | float] = [*self._plain_negative]
        for part, chunk in self._all_chunks():
            counts[part] = counts[part] + (chunk < 0).sum(dtype=torch.float64)
        return counts

    def not_finite(self) -> list[int]:
        chunks = [chunk for _, chunk in self._all_chunks()]
        if not chunks:
            return self._plain_not_finite
        return torch.cat(chunks).isfinite().logical_not().nonzero().flatten().tolist()

    def _gather(self, value: Tensor, part: int) -> None:
        # A scalar tensor takes some hundred bytes, and a long step would hold many of them.
        if part != self._part or len(self._tensors) == _CHUNK:
            self._chunks = self._all_chunks()
            self._tensors.clear()
        self._part = part
        self._tensors.append(value)

    def _all_chunks(self) -> list[tuple[int, Tensor]]:
        if not self._tensors:
            return self._chunks
        joined = torch.stack([t.to(self._device).reshape(()) for t in self._tensors])
        return [*self._chunks, (self._part, joined)]


def _in_order(names: Iterable[str]) -> list[str]:
    """Returns the names in the order that metrics have in the totals."""
    return sorted(names, key=str)  # names may be of any type: they have not been checked


def _mark(names: Iterable[str]) -> int:
    """Returns a checksum of these names, independent of their order. It has 20 bits, so that the sum of
    its squares is exact over thousands of ranks."""
    return zlib.crc32("\0".join(map(str, _in_order(names))).encode()) >> 12


def _differing(everyone: Sequence[tuple[str, ...]]) -> str:
    """Returns the error message for ranks that have metrics of different names."""
    (one, first), *others = [(rank, _in_order(n)) for rank, n in enumerate(everyone) if n]
    other, second = next(found for found in others if found[1] != first)
    return (
        f"the metrics {first} of rank {one} are not the metrics {second} of rank {other}: return the"
        " same names on every rank, with (0, 0) for what has nothing to count there."
    )


def _pair(name: str, value: Any, weight: Any) -> tuple[Any, Any]:
    if isinstance(value, tuple) and len(value) == 2:
        return value
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0):
        return value, weight
    raise LossError(
        f"the metric {name!r} is of type {type(value).__name__}: give a sum (a number or a scalar"
        " tensor), or a pair (sum, weight)."
    )
