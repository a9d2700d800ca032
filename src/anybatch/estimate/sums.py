"""Sums: what a rank of a reproducible run holds of gradients beside its buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from anybatch.compute.buckets import piece_of
from anybatch.data import Waiting
from anybatch.plans import TaskIdentity


@dataclass(frozen=True, slots=True)
class Sums:
    """Of the rank that holds most, in any step.

    Attributes:
        kept: sums as large as all gradients that wait while others are computed.
        slots: sums that a rank tells the others, at the most.
        num_ranks: of all.
    """

    kept: int
    slots: int
    num_ranks: int

    def held(self, flats: Sequence[Tensor]) -> Iterator[Tensor]:
        """Tensors as large as what is held beside the buckets `flats`."""
        for _ in range(self.kept):
            yield from (flat.new_empty(len(flat)) for flat in flats)
        if self.num_ranks > 1:
            for dtype in {flat.dtype for flat in flats}:
                largest = max((flat for flat in flats if flat.dtype == dtype), key=len)
                size = self.num_ranks * self.slots * piece_of(largest, self.num_ranks)
                yield from (largest.new_empty(size) for _ in ("sent", "received"))


def sums_of(identity: TaskIdentity, shares: tuple[float, ...]) -> Sums | None:
    """Of a reproducible run on ranks with `shares`; None: it is not one."""
    if identity.num_parts is None:
        return None
    waiting = Waiting.of(identity.num_parts, shares)
    return Sums(max(waiting.kept), waiting.slots, len(shares))
