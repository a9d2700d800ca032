"""One batch per optimizer step from the loader of a framework: the share of a rank, cut into
micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, arange
from torch.utils.data import BatchSampler

from anybatch.data import share, slice_batch

_TOKENS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"})
"""Parts of a batch that have one column per token."""

_MULTIPLE = 8
"""Lengths are cut to multiples of it, which tensor cores want."""


class Shares(BatchSampler):
    """This rank's part of each batch of `whole`; that of the last batch may be empty."""

    def __init__(self, whole: BatchSampler, rank: int, num_ranks: int) -> None:
        super().__init__(whole.sampler, whole.batch_size, whole.drop_last)
        self._rank, self._shares = rank, (1.0,) * num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            part = share(len(batch), self._shares, self._rank)
            yield batch[part.start : part.stop]


class CollateOrNone:
    """`collate`; `nothing` where there are no samples."""

    def __init__(self, collate: Callable[[Any], Any], nothing: Any) -> None:
        self._collate, self._nothing = collate, nothing

    def __call__(self, samples: Any) -> Any:
        return self._collate(samples) if samples else self._nothing


class PaddingCut:
    """Cuts batches, the longest samples first, and pads each piece to the longest of its own.

    A loader that yields one batch per step pads all of it to its longest sequence. Micro-batches cut
    from it in order would carry that padding, too; a loader that pads each by itself does not.

    Only of batches that are padded on the right and are nothing but tensors with the samples in dim 0,
    one column per token; others are cut in order, as they are.
    """

    def __init__(self) -> None:
        self._lengths: Tensor | None = None
        self._order: Tensor | None = None

    def expect(self, batch: Any) -> None:
        """From now on pieces are cut from `batch`."""
        self._lengths = _lengths(batch) if isinstance(batch, dict) else None
        if self._lengths is not None:
            self._order = self._lengths.argsort(descending=True, stable=True)

    def __call__(self, batch: Any, start: int, stop: int) -> Any:
        """Samples `start` to `stop` in that order."""
        if self._lengths is None or self._order is None:
            return slice_batch(batch, start, stop)
        which = self._order[start:stop]
        width = -(-int(self._lengths[which[0]]) // _MULTIPLE) * _MULTIPLE
        return {k: v[which, :width] if v.dim() > 1 else v[which] for k, v in batch.items()}


def _lengths(batch: dict[str, Any]) -> Tensor | None:
    """Columns up to the last token or label of each sample, shape `(samples,)`; None for a batch of
    another kind."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not mask.numel():
        return None
    used = mask.ne(0)
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.shape[:1] != mask.shape[:1]:
            return None
        if value.dim() > 1 and (name not in _TOKENS or value.shape != mask.shape):
            return None
        if name == "labels" and value.dim() > 1:
            used = used | value.ne(-100)
    return (used * arange(1, mask.shape[1] + 1, device=mask.device)).amax(1)
