"""What went wrong with which samples, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from anybatch.errors import DataError

_SHOWN = 8  # samples that a message names; the rest are counted


class Place(NamedTuple):
    """Which sample: its position in the global batch, its epoch, and `sample`, its index in the data
    set (in a stream, its number). A fetch, which knows no global batch, counts positions in what it was
    asked for."""

    position: int
    epoch: int
    sample: int

    @property
    def name(self) -> tuple[int, int]:
        """(epoch, index), as messages take it."""
        return self.epoch, self.sample


class Bad(NamedTuple):
    """A sample that cannot be learned from, and why."""

    place: Place
    reason: str


@final
class BadSamples(DataError):
    """Samples that cannot be loaded, or not even one by one be put into a batch: `bad`. The message
    speaks of the first."""

    def __init__(self, message: str, bad: Sequence[Bad] = ()) -> None:
        super().__init__(message)
        self.bad: tuple[Bad, ...] = tuple(bad)

    def at(self, positions: Sequence[int]) -> list[Bad]:
        """`bad`, where what was asked for lies at `positions` of a global batch."""
        return [
            Bad(bad.place._replace(position=positions[bad.place.position]), bad.reason)
            for bad in self.bad
        ]


def fetched(fetch: Callable[[], Any], positions: Sequence[int]) -> Any:
    """What `fetch` gives for the samples at `positions` of a global batch. Raises `BadSamples` with
    these positions."""
    try:
        return fetch()
    except BadSamples as error:
        raise BadSamples(str(error), error.at(positions)) from error.__cause__


def told(error: BaseException) -> str:
    """The error's type and text."""
    return f"{type(error).__name__}: {error}"


def told_samples(names: Sequence[tuple[int, int]], total: int | None = None) -> str:
    """Samples for people, from (epoch, index) each: at most eight are shown of `total`."""
    total = len(names) if total is None else total
    shown = names[:_SHOWN]
    more = f" and {total - len(shown):,} more" if total > len(shown) else ""
    epochs = sorted({epoch for epoch, _ in shown})
    where = f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs[0]} to {epochs[-1]}"
    listing = ", ".join(str(index) for _, index in shown)
    return f"sample{'s' if total > 1 else ''} {listing}{more} ({where})"


def shape_of(value: Any) -> str:
    """A sample as its types and shapes: `(float32 [3, 5], int)`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {shape_of(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple | list):
        if len(value) > 4:
            return f"{type(value).__name__} of {len(value)}"
        inner = ", ".join(map(shape_of, value))
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    return type(value).__name__
