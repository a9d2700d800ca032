"""Evaluation on held-out data: yields each sample once, in order, divided among the ranks, and joins
the outputs.

Data with a length is cut into one contiguous part per rank, in proportion to the ranks' shares. A
stream is read entirely by every rank, which keeps its own blocks; ranks with a share take turns:

    by index   rank 0: 0 1 2 3 | rank 1: 4 5 6         7 samples, 2 ranks, equal shares
    stream     0 1 | 2 3 | 4 5 | 6                     blocks of 2: ranks 0, 1, 0, 1

No sample is padded, dropped or repeated, so a rank may get none. Bad samples may be left out (`gaps`);
the above then applies to the remaining samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from anybatch.data.batch_slices import is_samples, parts_of, rebuilt
from anybatch.data.collation import Collate, collated
from anybatch.data.failure import Place, described, fetched
from anybatch.data.generators import Borrowed
from anybatch.data.lengths import Extent, micro_batches_by_length
from anybatch.data.loader import Loader
from anybatch.data.schedule import Steps
from anybatch.data.stream import Reading, check_readable
from anybatch.errors import DataError, InputError
from anybatch.oom import is_memory_error
from anybatch.task import is_map_style, num_samples_of

MOST_WITHOUT_LENGTH = 100_000
"""The most samples that a held-out stream without a length may yield, unless the whole training has
more."""


def check_ends(name: str, num_samples: int, most: int | None) -> None:
    """Raises `DataError` if held-out data of unknown length has more than `most` samples (None: no
    limit)."""
    if most is not None and num_samples > most:
        raise DataError(
            f"the held-out stream {name} has given {most:,} samples and goes on, so it may have no end:"
            " give it a length (__len__), or end it (itertools.islice)."
        )


def evaluation_batches(
    dataset: Any,
    collate: Collate | None,
    batch: int,
    *,
    first: int = 0,
    rank: int = 0,
    shares: Sequence[float] = (1.0,),
    seed: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
    lockstep: bool = False,
    gaps: Sequence[int] = (),
    lengths: Tensor | None = None,
    most: int = 0,
    endless: int | None = None,
    unit: int = 1,
) -> Iterator[tuple[Any, int]]:
    """Yields (collated batch, number of samples) over this rank's part of `dataset`, with at most
    `batch` samples each.

    Random augmentation, if any, is the same every time, for any `batch` and any number of ranks.

    Args:
        first: sample of the rank's part (for a stream, of the whole stream) to begin with.
        shares: shares of the ranks; only their ratios count, and zero is allowed.
        lockstep: every rank yields the same number of batches; a rank with fewer batches ends with
            filler batches, which are reported as having 0 samples.
        gaps: indices of samples to leave out (for a stream, their numbers), sorted.
        lengths: lengths of the samples of map-style data. If given, the ranks' parts are measured by
            total length, and a batch has a padded size of at most `most` instead of `batch` samples.
        endless: a stream without a length is considered endless if it yields more samples than this;
            None: no limit. A stream with a length is read up to its length.
        unit: map-style data without `lengths` is divided in multiples of it, so that batches of this
            size hold the same samples on any number of ranks.

    Raises `InputError` for a stream that can be read only once, `DataError` as
    `Loader` does.
    """
    if not is_map_style(dataset):
        stream = partial(_Stream, dataset, collate or default_collate, seed, gaps, endless)
        return _of_stream(stream, batch, first, rank, shares, lockstep)
    ranks = range(len(shares)) if lockstep else (rank,)
    kept = None if lengths is None else np.delete(lengths.numpy(), list(gaps))
    extent = Extent(len(dataset) - len(gaps), kept)
    parts = [extent.share(shares, each, unit)[first:] for each in ranks]
    cuts = [
        _pieces(part, batch) if kept is None else micro_batches_by_length(kept, part, most, None)
        for part in parts
    ]
    pieces = cuts[rank] if lockstep else cuts[0]
    missing = max(map(len, cuts)) - len(pieces)
    counts = [len(piece) for piece in pieces] + [0] * missing
    pieces += [range(1)] * missing
    if not pieces:
        return iter(())
    loader = Loader(
        dataset,
        Steps(len(dataset), len(dataset), epochs=1),
        collate=collate,
        seed=seed,
        shuffle=False,
        num_workers=num_workers,
        pin_memory=pin_memory,
    )
    return _by_index(loader, pieces, counts, gaps)


def _pieces(part: range, batch: int) -> list[range]:
    return [part[start : start + batch] for start in range(0, len(part), batch)]


def _by_index(
    loader: Loader, pieces: list[range], counts: list[int], gaps: Sequence[int]
) -> Iterator[tuple[Any, int]]:
    loader.begin(0, lambda extent: pieces)
    data = loader.next_step(gaps)  # all samples form one step
    assert data is not None
    try:
        yield from zip(data.micro_batches, counts, strict=True)
    finally:
        loader.close()


def _of_stream(
    begin: Callable[[], _Stream],
    batch: int,
    first: int,
    rank: int,
    shares: Sequence[float],
    lockstep: bool,
) -> Iterator[tuple[Any, int]]:
    stream = begin()
    given = len(stream.read(first))
    counts = [0] * len(shares)  # blocks, by rank
    last: list[tuple[int, Any]] = []  # a sample for filler batches
    for owner in turns(shares):
        samples = stream.read(batch)
        if not samples:
            break
        if owner == rank:
            places = [number for number, _ in samples]
            yield fetched(partial(stream.batch_of, samples), places), len(samples)
        given += len(samples)
        counts[owner] += 1
        last = samples[-1:]
    if given == 0:
        raise DataError(f"the stream {stream.name} gave no sample at all: give at least one.")
    for _ in range(max(counts) - counts[rank] if lockstep and last else 0):
        yield stream.batch_of(last), 0


def turns(shares: Sequence[float]) -> Iterator[int]:
    """Yields the rank of each block of a stream, without end: ranks with a share take turns."""
    return cycle([rank for rank, share in enumerate(shares) if share])


@final
class _Stream:
    """One pass over a stream from its beginning. See `evaluation_batches` for `gaps` and `endless`."""

    def __init__(
        self, dataset: Any, collate: Collate, seed: int, gaps: Sequence[int], endless: int | None
    ) -> None:
        self.name: str = type(dataset).__name__
        if isinstance(dataset, Iterator):
            raise InputError(
                f"the stream is an iterator (of type {self.name}), which can be read only once, and"
                " evaluation may have to begin again: give an object whose __iter__ starts anew, or a"
                " list."
            )
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._length = num_samples_of(dataset)
        self._endless = endless
        self._gaps = frozenset(gaps)
        try:
            self._reading = Reading(dataset, seed, 0)
        except Exception as error:
            if is_memory_error(error):
                raise
            raise DataError(
                f"the stream {self.name} cannot be begun: {described(error)}; mend its __iter__."
            ) from error

    def read(self, count: int) -> list[tuple[int, Any]]:
        """Returns the next samples, each with its number; fewer at the end. Raises `DataError` if the
        stream fails."""
        kept: list[tuple[int, Any]] = []
        while len(kept) < count:
            first = self._reading.position
            wanted = count - len(kept)
            if self._length is not None:
                wanted = min(wanted, self._length - first)
            found: list[Any] = []
            self._reading.read(found, wanted)
            if not found:
                break
            if self._length is None:
                check_ends(self.name, self._reading.position, self._endless)
            numbered = enumerate(found, first)
            kept += [(number, one) for number, one in numbered if number not in self._gaps]
        places = [Place(number, 0, number) for number, _ in kept]
        fetched(
            partial(check_readable, self._dataset, places, [sample for _, sample in kept]),
            [number for number, _ in kept],
        )
        return kept

    def batch_of(self, numbered: list[tuple[int, Any]]) -> Any:
        """Collates samples that are given with their numbers."""
        names = [(0, number) for number, _ in numbered]
        samples = [sample for _, sample in numbered]
        with Borrowed():
            return collated(self._collate, samples, names, self._seed, self._dataset)


def join(pieces: Sequence[Any], sizes: Sequence[int], place: str = "the output") -> Any:
    """Joins the values computed for batches of `sizes` samples as if they were computed for a single
    batch.

    Tensors are concatenated along dim 0, lists and tuples of samples are concatenated; mappings, tuples
    and dataclasses are joined part by part; None stays None.

    Raises `InputError` with the part that cannot be joined.
    """
    kept = [(piece, size) for piece, size in zip(pieces, sizes, strict=True) if size]
    if not kept:
        raise InputError(f"there is no sample to join {place} of: give data that has at least one.")
    first, size = kept[0]
    if all(piece is None for piece, _ in kept):
        return None
    if all(isinstance(piece, Tensor) for piece, _ in kept):
        return _joined_tensors(kept, place)
    if all(is_samples(piece, n) for piece, n in kept):
        return type(first)([item for piece, _ in kept for item in piece])
    inner = [parts_of(piece) for piece, _ in kept]
    names = [[name for name, _ in parts or ()] for parts in inner]
    if names[0] and all(each == names[0] for each in names):
        counts = [n for _, n in kept]
        values = [
            join([parts[i][1] for parts in inner if parts], counts, place + name)
            for i, name in enumerate(names[0])
        ]
        return rebuilt(first, values)
    raise InputError(
        f"{place} for {size} samples is of type {type(first).__name__}, which cannot be joined with"
        " that for others: return tensors with the samples on dim 0, lists with one entry for each"
        " sample, or a nesting of them."
    )


def _joined_tensors(kept: Sequence[tuple[Tensor, int]], place: str) -> Tensor:
    for piece, size in kept:
        if not piece.dim() or len(piece) != size:
            raise InputError(
                f"{place} for {size} samples has the shape {tuple(piece.shape)}: return one value for"
                " each sample, on dim 0 (reduction='none' for losses, say)."
            )
    first, _ = kept[0]
    for piece, _ in kept:
        if piece.shape[1:] != first.shape[1:]:
            raise InputError(
                f"{place} has the shape {tuple(first.shape)} for one batch and {tuple(piece.shape)}"
                " for another, which cannot be joined: return a list with one tensor for each sample."
            )
    return torch.cat([piece for piece, _ in kept])
