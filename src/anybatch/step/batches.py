"""Batches: counts the samples of the batches that `Step` is given, and cuts them into micro-batches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from anybatch.data import (
    BatchCopies,
    batch_size,
    ghosts,
    micro_batches,
    num_samples_of,
    split,
    to_device,
)
from anybatch.data import slice_batch as slice_samples
from anybatch.data.batch_slices import may_be_parts, may_be_samples
from anybatch.data.evaluation import MOST_WITHOUT_LENGTH, check_ends
from anybatch.engine import MicroBatch
from anybatch.engine.source import Source
from anybatch.errors import AnybatchError, DataError, InputError
from anybatch.plans import Choice
from anybatch.step.checks import warn


@dataclass(frozen=True, slots=True)
class Cutting:
    """How batches are cut: functions to count the samples of a batch, and to slice it from start to
    stop."""

    count: Callable[[Any], int]
    cut: Callable[[Any, int, int], Any]

    @classmethod
    def by(
        cls,
        count_samples: Callable[[Any], int] | None,
        slice_batch: Callable[[Any, int, int], Any] | None,
    ) -> Cutting:
        """With the user's functions, or along dim 0. Raises `InputError` as `check_cutting` does."""
        check_cutting(count_samples, slice_batch)
        count = batch_size if count_samples is None else partial(_counted_by, count_samples)
        return cls(count, slice_batch or slice_samples)

    @property
    def is_along_rows(self) -> bool:
        """Whether samples are counted and cut along dim 0, not by the user's functions."""
        return self.cut is slice_samples


def check_cutting(
    count_samples: Callable[[Any], int] | None, slice_batch: Callable[[Any, int, int], Any] | None
) -> None:
    """Raises `InputError` if only one of the arguments is given, or one is not a function."""
    if (count_samples is None) != (slice_batch is None):
        raise InputError(
            "count_samples and slice_batch go together: give both, or neither for batches with the"
            " samples in dim 0."
        )
    for name, function in (("count_samples", count_samples), ("slice_batch", slice_batch)):
        if function is not None and not callable(function):
            raise InputError(f"{name} is {function!r}: give a function of a batch.")


def _counted_by(count_samples: Callable[[Any], Any], batch: Any) -> int:
    """The number of samples in `batch` by the user's function. Raises `DataError` if it returns
    something else."""
    number = count_samples(batch)
    try:
        found = operator.index(number)  # integral tensors and NumPy's integers too
    except TypeError:
        found = -1
    if found < 0:
        raise DataError(
            f"count_samples returned {number!r}, of type {type(number).__name__}: return the number of"
            " samples in the batch, a whole number."
        )
    return found


class Pieces(Source):
    """This rank's part of a global batch, collated, as the samples of one step."""

    def __init__(
        self,
        batch: Any,
        device: torch.device,
        ghost: int | None,
        is_whole: bool,
        check: Callable[[], None],
        copies: BatchCopies,
        cutting: Cutting,
        is_synchronised: bool,
    ) -> None:
        copies.forget()
        self._is_synchronised = is_synchronised
        self._cutting = cutting
        self._copies = copies
        self._batch = batch
        self._device = device
        self._ghost = ghost
        self._is_whole = is_whole
        self._check = check  # raises if this rank cannot run the step
        self.ranges: Sequence[range] = ()

    @cached_property
    def size(self) -> int:
        """Number of samples; 0 if they cannot be counted, in which case the step itself raises the
        error."""
        with suppress(DataError):
            return self._count
        return 0

    @cached_property
    def _count(self) -> int:
        return 0 if self._batch is None else self._cutting.count(self._batch)

    def micro_batches(self, choice: Choice, keep: bool = False) -> Iterator[MicroBatch]:
        """See `engine.Source`."""
        self._check()
        ghost = self._ghost
        whole = self._count
        least = max(1, whole if self._is_whole else min(ghost or 1, whole))
        # Ranks whose norms are synchronised meet for one ghost batch in each pass.
        size = least if self._is_synchronised else max(choice.micro_batch, least)
        if ghost and size % ghost and size < whole:
            size = max(ghost, size // ghost * ghost)
        self.ranges = micro_batches(range(whole), size, ghost, whole)
        yield from self.once_more()

    @property
    def own_samples(self) -> int:
        """See `engine.Source`."""
        return sum(map(len, self.ranges))

    def once_more(self) -> Iterator[MicroBatch]:
        """See `engine.Source`. The batch belongs to the script and is kept; changes that earlier passes
        made to it are undone."""
        self._copies.put_back()
        self._copies.forget()
        ghost, last = self._ghost, len(self.ranges) - 1
        for number, (part, piece) in enumerate(zip(self.ranges, self._pieces(), strict=True)):
            self._copies.keep(piece)
            piece = to_device(piece, self._device, non_blocking=True)
            is_one = self._is_synchronised
            cut = [len(part)] if is_one else ghosts(len(part), ghost) if ghost else ()
            yield MicroBatch(piece, len(part), cut, last=number == last)
            del piece
            self._copies.passed()

    def _pieces(self) -> Iterable[Any]:
        """The samples of each range; views of the batch, unless the user cuts it."""
        if len(self.ranges) < 2:
            return [self._batch] * len(self.ranges)
        if self._cutting.is_along_rows:
            return split(self._batch, [*map(len, self.ranges)])
        return (self._cutting.cut(self._batch, part.start, part.stop) for part in self.ranges)

    def first_samples(self, most: int, batch: Any) -> tuple[Callable[[int, int], Any], int]:
        """See `engine.Source`."""

        def take(start: int, stop: int) -> Any:
            return to_device(self._cutting.cut(self._batch, start, stop), self._device)

        return take, min(most, self.size)

    def put_back(self) -> None:
        """Undo the changes that passes have made to the batch."""
        self._copies.put_back()

    @contextmanager
    def untouched_by_errors(self) -> Iterator[None]:
        """Context manager for the step that restores the batch if an error ends it."""
        try:
            yield
        except BaseException:
            self._copies.put_back()
            raise
        finally:
            self._copies.forget()

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Context manager for passes: errors of the loss tell that it was given a part of the batch."""
        try:
            yield
        except Exception as error:
            is_cut = len(self.ranges) > 1 and self._cutting.is_along_rows
            if is_cut and not isinstance(error, AnybatchError):
                error.add_note(
                    f"Passes are over parts of the batch: its {self.size} samples are cut along dim 0."
                    " If it is one piece (a graph) or has them elsewhere, give Step count_samples and"
                    " slice_batch."
                )
            raise

    def describe(self, number: int) -> str:
        """See `engine.Source`."""
        part = self.ranges[number]
        return f"samples {part.start} to {part.stop - 1} of the batch"


def cut_batches(
    batches: Iterable[Any], device: torch.device, cutting: Cutting, size: int
) -> Iterator[tuple[Any, int]]:
    """Yield `batches` on the device, in pieces of at most `size` samples, each with its number of
    samples."""
    length, total = num_samples_of(batches), 0
    for batch in batches:
        whole = cutting.count(batch)
        total += whole
        check_ends(type(batches).__name__, total, MOST_WITHOUT_LENGTH if length is None else None)
        for start in range(0, whole, size):
            stop = min(start + size, whole)
            piece = batch if stop - start == whole else cutting.cut(batch, start, stop)
            yield to_device(piece, device), stop - start


def warn_of_readings(batch: Any) -> None:
    """Warn of a list of tensors that can be taken as samples as well as as parts of a batch."""
    if may_be_parts(batch):
        rows = " and ".join(str(len(part)) for part in batch)
        warn(
            f"the batch is a {type(batch).__name__} of {len(batch)} tensors of {rows} rows, which"
            f" are taken as {len(batch)} samples of unequal length. If they are parts of a batch,"
            " give count_samples and slice_batch, which tell how it is cut."
        )
    elif may_be_samples(batch):
        shape, size = tuple(batch[0].shape), batch_size(batch)
        warn(
            f"the batch is a {type(batch).__name__} of {len(batch)} tensors of shape {shape}, which"
            f" are taken as parts of {size} sample{'s' if size > 1 else ''}. If each is a sample,"
            " stack them, or give count_samples=len and slice_batch=lambda batch, start, stop:"
            " batch[start:stop]."
        )
