"""Batches from a framework's loader: one per optimizer step, with the share of one rank, cut into
micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch import Tensor, arange, cat
from torch.utils.data import BatchSampler

from anybatch.data import batch_size, share, slice_batch
from anybatch.errors import DataError, InputError

_TOKENS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"})
"""Entries of a batch that have one column per token."""

_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")

_MULTIPLE = 8
"""Padded lengths are multiples of this number, for tensor cores."""


class Shares(BatchSampler):
    """Yields this rank's share of each batch of `whole`; the share of the last batch may be empty."""

    def __init__(self, whole: BatchSampler, rank: int, num_ranks: int) -> None:
        super().__init__(whole.sampler, whole.batch_size, whole.drop_last)
        self._rank, self._shares = rank, (1.0,) * num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            part = share(len(batch), self._shares, self._rank)
            yield batch[part.start : part.stop]


class CollateOrNone:
    """Calls `collate`, or returns `nothing` if there are no samples."""

    def __init__(self, collate: Callable[[Any], Any], nothing: Any) -> None:
        self._collate, self._nothing = collate, nothing

    def __call__(self, samples: Any) -> Any:
        return self._collate(samples) if samples else self._nothing


class CollateRows:
    """Calls `collate`, and raises `InputError` if the batch has more rows than there are samples."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        batch, num_samples = self._collate(samples), len(samples)
        try:
            num_rows = batch_size(batch)
        except DataError:  # a step tells it
            return batch
        if num_rows > num_samples:
            collator = getattr(self._collate, "data_collator", self._collate)  # removes columns
            name = getattr(collator, "__name__", type(collator).__name__)
            raise InputError(
                f"the data collator ({name}) made {num_rows} rows of {num_samples}"
                " samples, and which of them belong together is not known, so the batch cannot be cut:"
                " give count_samples= and slice_batch=, as for anybatch.Step, which keep the rows of a"
                " sample together."
            )
        return batch


def presented_as(
    own: Callable[..., Any], loss: Callable[[Any, Any], Any], remedy: str
) -> Callable[[Any, Any], Any]:
    """Returns `loss` with the name and the place of `own`, the user's function, in warnings, which end
    with `remedy`."""

    @wraps(own)
    def presented(model: Any, batch: Any) -> Any:
        return loss(model, batch)

    del vars(presented)["__wrapped__"]  # it is called with other arguments
    vars(presented).update(presents=own, remedy=remedy)
    return presented


def _boundaries(batch: Any) -> Tensor | None:
    """Returns the positions in a padding-free batch at which its sequences begin, and its length, shape
    `(sequences + 1,)`; None for other batches. A padding-free batch has one row and no mask, and the
    positions of each sequence begin with 0."""
    positions = batch.get("position_ids") if isinstance(batch, dict) else None
    if not isinstance(positions, Tensor) or "attention_mask" in batch:
        return None
    if positions.dim() != 2 or len(positions) != 1 or not positions.numel() or positions[0, 0]:
        return None
    starts = positions[0].eq(0).nonzero().flatten()
    return cat([starts, starts.new_tensor([positions.shape[1]])])


def _sequences(batch: dict[str, Any], ends: Tensor) -> dict[str, Any]:
    """Returns the sequences of a padding-free batch between the positions `ends`."""
    first, last = int(ends[0]), int(ends[-1])

    def cut(name: str, value: Any) -> Any:
        if name in _BOUNDARIES:
            return (ends - first).to(value.dtype)
        if name in _LONGEST:
            return int(ends.diff().max())
        return value[:, first:last] if isinstance(value, Tensor) and value.dim() > 1 else value

    return {name: cut(name, value) for name, value in batch.items()}


class PaddingCut:
    """Cuts batches into micro-batches, longest samples first, and removes padding that a micro-batch
    does not need.

    A loader that yields one batch per step pads the whole batch to its longest sequence. Micro-batches
    cut from it in order would keep that padding, unlike those of a loader that pads each micro-batch
    separately.

    Applies to batches that are padded on the right and consist only of tensors with the samples in
    dim 0 and one column per token, unless an answer is one of the columns. Other batches are cut in
    order, without changes; padding-free ones, whose sequences are all in one row, between sequences.
    """

    def __init__(self) -> None:
        self._lengths: Tensor | None = None
        self._order: Tensor | None = None
        self._boundaries: Tensor | None = None

    def expect(self, batch: Any) -> None:
        """Set the batch from which micro-batches are cut from now on."""
        self._boundaries = _boundaries(batch)
        self._lengths = _lengths(batch) if isinstance(batch, dict) else None
        if self._lengths is not None:
            self._order = self._lengths.argsort(descending=True, stable=True)

    @staticmethod
    def count(batch: Any) -> int:
        """Returns the number of samples in `batch`; in a padding-free one, that of its sequences."""
        ends = _boundaries(batch)
        return batch_size(batch) if ends is None else len(ends) - 1

    def __call__(self, batch: Any, start: int, stop: int) -> Any:
        """Returns samples `start` to `stop`, longest samples first."""
        if self._boundaries is not None:
            return _sequences(batch, self._boundaries[start : stop + 1])
        if self._lengths is None or self._order is None:
            return slice_batch(batch, start, stop)
        which = self._order[start:stop]
        width = -(-int(self._lengths[which[0]]) // _MULTIPLE) * _MULTIPLE
        return {k: v[which, :width] if v.dim() > 1 else v[which] for k, v in batch.items()}


def _lengths(batch: dict[str, Any]) -> Tensor | None:
    """Returns the number of columns up to the last token or label of each sample, shape `(samples,)`;
    None if the batch has another form."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not mask.numel():
        return None
    used = mask.ne(0)
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.shape[:1] != mask.shape[:1]:
            return None
        if name == "start_positions":  # the loss of a sample depends on the padding
            return None
        if value.dim() > 1 and (name not in _TOKENS or value.shape != mask.shape):
            return None
        if name == "labels" and value.dim() > 1:
            used = used | value.ne(-100)
    return (used * arange(1, mask.shape[1] + 1, device=mask.device)).amax(1)
