"""Descriptions of samples and of the errors in them, for messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from anybatch.errors import DataError

_SHOWN = 8  # samples listed in a message; the rest are only counted


class Place(NamedTuple):
    """Identifies a sample: its position in the global batch, its epoch, and `sample`, its index in the
    data set (in a stream, its number). In a fetch, which does not know the global batch, positions are
    relative to the request."""

    position: int
    epoch: int
    sample: int

    @property
    def name(self) -> tuple[int, int]:
        """(epoch, index), as used in messages."""
        return self.epoch, self.sample


class Bad(NamedTuple):
    """A sample that cannot be used for training, and the reason."""

    place: Place
    reason: str


@final
class BadSamples(DataError):
    """Raised for samples that cannot be loaded, or cannot be collated even alone. `bad` lists them; the
    message describes the first one."""

    def __init__(self, message: str, bad: Sequence[Bad] = ()) -> None:
        super().__init__(message)
        self.bad: tuple[Bad, ...] = tuple(bad)

    def at(self, positions: Sequence[int]) -> list[Bad]:
        """Returns `bad` with positions in a global batch, given the `positions` of the requested
        samples there."""
        return [
            Bad(bad.place._replace(position=positions[bad.place.position]), bad.reason)
            for bad in self.bad
        ]


def fetched(fetch: Callable[[], Any], positions: Sequence[int]) -> Any:
    """Calls `fetch`, which fetches the samples at `positions` of a global batch, and returns its
    result. Raises `BadSamples` with these positions."""
    try:
        return fetch()
    except BadSamples as error:
        raise BadSamples(str(error), error.at(positions)) from error.__cause__


def described(error: BaseException) -> str:
    """Returns the error's type and text."""
    return f"{type(error).__name__}: {error}"


def refused_shared_memory(error: BaseException) -> DataError | None:
    """Returns the error to raise if `error` says that `/dev/shm` is full, else None."""
    if "unable to allocate shared memory" not in str(error):
        return None
    return DataError(
        f"a worker process that loads samples has no room in /dev/shm for a batch ({error}): make it"
        " larger (docker run --shm-size), or use fewer num_workers, or num_workers=0."
    )


def format_samples(names: Sequence[tuple[int, int]], total: int | None = None) -> str:
    """Formats samples, given as (epoch, index) pairs, for messages; at most eight of `total` are
    listed."""
    total = len(names) if total is None else total
    shown = names[:_SHOWN]
    more = f" and {total - len(shown):,} more" if total > len(shown) else ""
    epochs = sorted({epoch for epoch, _ in shown})
    where = f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs[0]} to {epochs[-1]}"
    listing = ", ".join(str(index) for _, index in shown)
    return f"sample{'s' if total > 1 else ''} {listing}{more} ({where})"


def shape_of(value: Any) -> str:
    """Describes a sample by its types and shapes: `(float32 [3, 5], int)`."""
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
