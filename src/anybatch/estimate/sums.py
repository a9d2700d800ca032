"""Sums: what a rank of a reproducible run holds of gradients beside its buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from anybatch.compute.buckets import PIECE_BYTES
from anybatch.data import most_kept, nodes_of, num_parts_of, parts_of_rank
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
                most = min(PIECE_BYTES // dtype.itemsize, -(-len(largest) // self.num_ranks))
                for _ in range(2):
                    yield largest.new_empty(self.num_ranks * self.slots * most)


def sums_of(identity: TaskIdentity, shares: tuple[float, ...]) -> Sums | None:
    """Of a reproducible run on ranks with `shares`; None: it is not one."""
    if identity.part is None:
        return None
    kept = slots = 0
    for num_parts in range(1, num_parts_of(identity.global_batch, identity.part) + 1):
        for rank in range(len(shares)):
            parts = parts_of_rank(num_parts * identity.part, identity.part, shares, rank)
            kept = max(kept, most_kept(parts, num_parts))
            slots = max(slots, len(nodes_of(parts, num_parts)))
    return Sums(kept, slots, len(shares))
