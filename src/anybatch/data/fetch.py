"""Fetches samples by index and collates them. The result does not depend on which process fetches, or
on how the step is cut.

What a sample draws from random generators must be a function of (seed, epoch, index) alone, but seeding
takes 12 us per sample, and most data sets draw nothing. A fetch therefore runs without seeding first.
If anything was drawn, it is repeated one sample at a time, each under its own seed, without
`__getitems__`, and so are all later fetches. Generators that the data set owns are always seeded, so
that workers do not repeat each other's draws. A collate function is seeded by its first sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from anybatch.data.batch_slices import parts_of
from anybatch.data.collation import Collate, batch_of, collated
from anybatch.data.failure import Bad, BadSamples, Place, described
from anybatch.data.generators import Borrowed, seed_by, seed_each
from anybatch.data.order import mix
from anybatch.errors import AnybatchError, DataError, skipping
from anybatch.oom import is_memory_error
from anybatch.side_effects import generators_in, rewinding


class Piece(NamedTuple):
    """Samples of one epoch that belong to one micro-batch. `indices` is int64, shape [num]."""

    epoch: int
    indices: Tensor


Request = Sequence[Piece]
"""One micro-batch. It has several pieces only if it crosses an epoch boundary, or skips samples that
are left out."""


def open_fetch(dataset: Any, collate: Collate | None, seed: int) -> TensorFetch | SampleFetch:
    """Returns the fastest fetch for `dataset` whose results equal those of fetching samples one by one
    and collating them."""
    source, _ = _unwrapped(dataset)
    in_memory = (
        type(source) is TensorDataset
        and (collate is None or collate is default_collate)
        and all(type(t) is Tensor and t.layout is torch.strided for t in source.tensors)
        and not hasattr(dataset, "set_epoch")
    )
    if in_memory:
        return TensorFetch(dataset)
    return SampleFetch(dataset, collate, seed)


def sizes_alone(fetch: Callable[[Request], Any], indices: Tensor) -> list[int]:
    """Returns, for each sample, the number of elements in its tensors when it is collated alone. Empty
    if a sample cannot be: a collate function may need several."""
    try:
        return [_num_elements(fetch([Piece(0, one)])) for one in indices.split(1)]
    except AnybatchError:
        return []


def _num_elements(batch: Any) -> int:
    parts = parts_of(batch)
    if parts is None:
        return batch.numel() if isinstance(batch, Tensor) else 0
    return sum(_num_elements(part) for _, part in parts)


@final
class TensorFetch:
    """Fetches from a `TensorDataset`, or a `Subset` of one, with torch's `default_collate`."""

    def __init__(self, dataset: Any) -> None:
        source, self._subset = _unwrapped(dataset)
        self._tensors: tuple[Tensor, ...] = source.tensors
        self._on_cpu = all(tensor.device.type == "cpu" for tensor in self._tensors)

    def __call__(self, request: Request) -> list[Tensor]:
        indices = (
            request[0].indices
            if len(request) == 1
            else torch.cat([piece.indices for piece in request])
        )
        if self._subset is not None:
            indices = self._subset[indices]
        if self._on_cpu:  # several times faster than indexing
            return [tensor.index_select(0, indices) for tensor in self._tensors]
        return [tensor[indices] for tensor in self._tensors]


@final
class SampleFetch:
    """Fetches from any map-style data set with any collate function. Picklable if they are: each worker
    process holds a copy.

    Args:
        dataset, collate, seed: see `Task`.

    Attributes:
        on_sample: called after every sample to report progress; None: no callback.
    """

    def __init__(self, dataset: Any, collate: Collate | None, seed: int) -> None:
        self.on_sample: Callable[[], None] | None = None
        self._dataset = dataset
        self._source, self._subset = _unwrapped(dataset)
        self._collate: Collate = collate or default_collate
        self._seed = seed
        self._keyed = False  # a sample or the collate function has drawn random numbers
        self._own: list[Any] | None = None  # the data set's generators, once searched for
        self._epoch: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Excludes the generators: in a spawned process, the generators of a module are different
        objects."""
        return {**vars(self), "_own": None}

    @property
    def name(self) -> str:
        """The class name of the data set."""
        return type(self._dataset).__name__

    def __call__(self, request: Request) -> Any:
        """Returns the batch. Raises `BadSamples` with all samples that cannot be loaded, or cannot be
        collated even alone, and `DataError` if samples cannot be collated together. Memory errors are
        re-raised unchanged."""
        if self._own is None:
            self._own = generators_in(self._dataset)
            self._keyed = bool(self._own)
        if not self._keyed:
            with Borrowed() as generators:
                try:
                    batch = batch_of(self._collate, list(self._samples(request)))
                    if not generators.drawn():
                        return batch
                    self._keyed = True
                except Exception as error:
                    if is_memory_error(error):
                        raise
            # Random, or failed: fetching one by one identifies the sample.
        back = [rewinding(generator) for generator in self._own]
        try:
            with Borrowed():
                return self._collated(request, list(self._samples_one_by_one(request)))
        finally:
            for put_back in back:
                put_back()

    def _samples(self, request: Request) -> Iterator[Any]:
        many = getattr(self._source, "__getitems__", None)
        for piece in request:
            indices = self._begin(piece)
            if many is None:
                for index in indices:  # not map(): a sample that raises StopIteration would end it
                    yield self._sample(index)
                continue
            samples = many(indices)
            if len(samples) != len(indices):
                raise DataError(
                    "__getitems__ returned another number of samples than it was asked for"
                )
            yield from samples

    def _samples_one_by_one(self, request: Request) -> Iterator[Any]:
        """Yields each sample under its own seed. After a bad sample none is yielded, and its error is
        raised at the end."""
        bad: list[Bad] = []
        first: Exception | None = None
        for position, (epoch, index, inner) in enumerate(self._asked(request)):
            key = mix(self._seed, epoch, index)
            seed_by(key)
            seed_each(self._own or (), key)
            try:
                sample = self._sample(inner)
            except Exception as error:
                if is_memory_error(error):
                    raise
                bad.append(Bad(Place(position, epoch, index), described(error)))
                first = first or error
                continue
            if first is None:
                yield sample
        if first is not None:
            _, epoch, index = bad[0].place
            raise BadSamples(self._of_sample(epoch, index, first), bad) from first

    def _asked(self, request: Request) -> Iterator[tuple[int, int, int]]:
        """Yields the epoch, the index, and the index into the innermost data set of each sample."""
        for piece in request:
            for index, inner in zip(piece.indices.tolist(), self._begin(piece), strict=True):
                yield piece.epoch, index, inner

    def _sample(self, index: int) -> Any:
        try:
            return self._source[index]
        finally:
            if self.on_sample is not None:
                self.on_sample()

    def _collated(self, request: Request, samples: list[Any]) -> Any:
        names = [(piece.epoch, index) for piece in request for index in piece.indices.tolist()]
        return collated(self._collate, samples, names, self._seed, self._dataset)

    def _begin(self, piece: Piece) -> list[int]:
        """Sets the epoch of the data set, and returns the indices into the innermost data set."""
        if piece.epoch != self._epoch:
            for dataset in (self._dataset, self._source):
                if hasattr(dataset, "set_epoch"):
                    dataset.set_epoch(piece.epoch)
                    break
            self._epoch = piece.epoch
        indices = piece.indices if self._subset is None else self._subset[piece.indices]
        return indices.tolist()

    def _of_sample(self, epoch: int, index: int, error: Exception) -> str:
        kind = type(self._dataset).__name__
        what = f"sample {index} of {kind} (epoch {epoch}) cannot be loaded: {described(error)}"
        if isinstance(error, IndexError):
            return (
                f"{what}; the data set says that it has {len(self._dataset)} samples: is __len__"
                " right?"
            )
        return (
            f"{what}; mend or leave out the sample, {kind}[{index}] shows the error, or"
            f" {skipping()} leaves such samples out."
        )


def _unwrapped(dataset: Any) -> tuple[Any, Tensor | None]:
    """Returns the data set inside nested `Subset`s, and the indices into it (None: all of it)."""
    indices: Tensor | None = None
    while type(dataset) is Subset:  # a subclass may do more
        outer = torch.as_tensor(dataset.indices, dtype=torch.int64, device="cpu")
        indices = outer if indices is None else outer[indices]
        dataset = dataset.dataset
    return dataset, indices
