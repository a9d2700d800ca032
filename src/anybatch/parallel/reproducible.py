"""Reproducible: the whole model on every rank, gradients added in an order independent of the ranks.

The task alone determines how a step is cut into parts, and a part into grains (forward passes of one
size). A rank takes whole parts. Gradients are added grain by grain within a part, and in a binary tree
over the parts (`data.tree`): first, on each rank, the nodes that lie entirely on it, then the remaining
ones across ranks. So one rank computes the same sums as four, and the result is bitwise identical.

    parts       0   1   2   3 | 4   5   6   7         2 ranks
    on a rank   ((0+1)+(2+3)) | ((4+5)+(6+7))
    over ranks         ( ... ) + ( ... )

Across ranks, each rank sums its piece of every bucket and sends the result to the others: the same
number of bytes as an all-reduce, but in a controlled order. Losses and weights are exchanged by part,
and their reader adds them exactly; each part starts from the buffers at the start of the step
(`buffers.Buffers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anybatch.compute import Replica
from anybatch.compute.buckets import Buckets, piece_of
from anybatch.data import Node, Waiting, join, nodes_of, parts_of_rank
from anybatch.parallel.buffers import Buffers, Held
from anybatch.parallel.group import Agreed, Group, Wish
from anybatch.parallel.vote import Vote, calling, exchange, same_weights
from anybatch.plans import num_units

T = TypeVar("T")

# torch 2.13 renamed the second one and warns about the old name.
_all_to_all: Any = dist.all_to_all_single
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@final
class Reproducible(Group):
    """One rank, or the ranks of torch.distributed's default group, each with the whole model.

    Args:
        shares: parts of the global batch by rank; each rank takes whole parts.
        device: device of this rank.
        global_batch: number of samples of a full step.
        part: number of samples of a part.
    """

    def __init__(
        self, shares: Sequence[float], device: torch.device, global_batch: int, part: int
    ) -> None:
        self.shares: Sequence[float] = tuple(shares)
        several = len(self.shares) > 1
        self.rank: int = dist.get_rank() if several else 0
        self.num_parts: int = num_units(global_batch, part)
        self._device = device
        self._global_batch = global_batch
        self._part = part
        self._vote = Vote(device) if several else None
        self._buckets: Buckets | None = None
        self._buffers: Buffers | None = None
        self._sums: list[tuple[Node, Sequence[Tensor]]] = []
        self._free: list[Sequence[Tensor]] = []  # for sums, as large as the buckets
        self._used: list[bool] = []
        self._ranges: list[range] = []  # of parts, by rank
        self._there = 0  # number of parts of this step
        self._wire: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def prepare(self, model: nn.Module) -> None:
        """See `Group`. All ranks get the parameters and buffers of rank 0."""
        if self._vote is not None:
            same_weights(model)

    def adopt(self, replica: Replica) -> None:
        """See `Group`. Allocates the maximum memory that the sums need."""
        buckets = self._buckets = replica.flatten()
        self._used = [False] * len(buckets.used)  # `agree` may be called before the first step
        waiting = Waiting.of(self.num_parts, self.shares)
        kept = range(waiting.kept[self.rank])
        self._free = [[torch.empty_like(flat) for flat in buckets.flats] for _ in kept]
        if self._vote is not None:
            for flat in buckets.flats:
                size = self.size * waiting.slots * piece_of(flat, self.size)
                if flat.dtype not in self._wire or size > len(self._wire[flat.dtype][0]):
                    self._wire[flat.dtype] = flat.new_empty(size), flat.new_empty(size)
        self._buffers = Buffers(
            replica.model, self._device, self.num_parts, several=self._vote is not None
        )

    def expect(self, num_samples: int) -> None:
        self._there = num_units(num_samples, self._part)
        self._ranges = [
            parts_of_rank(num_samples, self._part, self.shares, rank) for rank in range(self.size)
        ]

    def begin(self) -> None:
        self._free += [value for _, value in self._sums if not self._is_in_buckets(value)]
        self._sums.clear()
        if self._buckets is not None:
            self._used = [False] * len(self._buckets.used)
        if self._buffers is not None:
            owners = [rank for rank, parts in enumerate(self._ranges) for _ in parts]
            self._buffers.begin(owners)

    def part_staged(self, part: int, held: Held) -> None:
        buckets = self._buckets
        if buckets is None or self._buffers is None:
            return
        self._buffers.staged(part, held)
        buckets.complete()
        self._used = [a or b for a, b in zip(self._used, buckets.used, strict=True)]
        join(self._sums, Node(0, part), buckets.flats, self._there, self._add)
        if part + 1 < self._ranges[self.rank].stop:
            self._keep_last()
            buckets.drop()

    def staged(self, held: Held) -> None:
        if self._buffers is not None:
            self._buffers.ended(held)

    def gather(self, failed: bool) -> None:
        if self._buckets is None or self._buffers is None:
            return
        if self._vote is None:
            if not failed and self._sums:
                ((_, root),) = self._sums
                self._fill(root)
            self._buffers.gather()
            return
        with calling("while gradients were added up"):
            layout = [nodes_of(parts, self._there) for parts in self._ranges]
            slots = max(len(nodes) for nodes in layout)
            for number, flat in enumerate(self._buckets.flats):
                # A rank that failed has too few sums, or more that are not joined yet, and sends what
                # it has: the result will be discarded.
                num_nodes = len(layout[self.rank])
                mine = [value[number] for _, value in self._sums[:num_nodes]]
                mine += [flat] * (num_nodes - len(mine))
                length = self.size * piece_of(flat, self.size)
                for start in range(0, len(flat), length):
                    piece = slice(start, min(start + length, len(flat)))
                    self._cross(flat[piece], [one[piece] for one in mine], layout, slots)
            self._buffers.gather()

    def agree(
        self, totals: Tensor | None, note: float = 0.0, wish: Wish = Wish.NOTHING
    ) -> Agreed | None:
        buckets = self._buckets
        if self._vote is None:
            if totals is None:
                return None
            agreed, used = Agreed(totals.tolist(), (len(totals),), (note,), wish), self._used
        else:
            flags = (not all(self._used),)
            found, (unused,) = self._vote.hold(totals, note, flags, wish=wish)
            if found is None:
                return None
            agreed, used = found, self._vote.any_of(self._used) if unused else self._used
        if buckets is not None:
            buckets.drop_unused(used)
        return agreed

    def exchange(self, value: T) -> list[T]:
        return exchange(value) if self._vote is not None else [value]

    def committed(self, replica: Replica) -> None:
        if self._buffers is not None:
            with calling("while buffers were put together"):
                self._buffers.settle()

    # ------------------------------------------------------------------------------------------ sums

    def _add(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> Sequence[Tensor]:
        torch._foreach_add_(list(left), list(right))
        if not self._is_in_buckets(right):
            self._free.append(right)
        return left

    def _keep_last(self) -> None:
        """Move the last sum out of the buckets to make room for the next part."""
        node, value = self._sums[-1]
        if self._is_in_buckets(value):
            kept = self._free.pop() if self._free else [torch.empty_like(flat) for flat in value]
            torch._foreach_copy_(list(kept), list(value))
            self._sums[-1] = node, kept

    def _fill(self, value: Sequence[Tensor]) -> None:
        """Copy `value` to the buckets, unless it is in them already."""
        assert self._buckets is not None
        if not self._is_in_buckets(value):
            torch._foreach_copy_(self._buckets.flats, list(value))

    def _is_in_buckets(self, value: Sequence[Tensor]) -> bool:
        return self._buckets is not None and value is self._buckets.flats

    # ------------------------------------------------------------------------------------ over ranks

    def _cross(
        self,
        target: Tensor,
        mine: Sequence[Tensor],
        layout: Sequence[Sequence[Node]],
        slots: int,
    ) -> None:
        """Set `target`, a piece of a bucket, to the sum over all ranks; `mine` are this rank's sums."""
        chunk = -(-len(target) // self.size)
        sent, received = (
            wire[: self.size * slots * chunk].view(self.size, slots, chunk)
            for wire in self._wire[target.dtype]
        )
        for slot, value in enumerate(mine):
            _spread(value, sent[:, slot])
        _all_to_all(_bytes(received), _bytes(sent))
        sums: list[tuple[Node, Tensor]] = []
        for nodes, theirs in zip(layout, received, strict=True):
            for node, value in zip(nodes, theirs, strict=False):
                join(sums, node, value, self._there, lambda left, right: left.add_(right))
        ((_, root),) = sums
        whole = sent.view(-1)[: self.size * chunk]
        _all_gather(_bytes(whole), _bytes(root))
        target.copy_(whole[: len(target)])


def _spread(value: Tensor, rows: Tensor) -> None:
    """Write `value` to consecutive `rows`; the elements after its end are left unchanged."""
    num, length = divmod(len(value), rows.shape[1])
    rows[:num].copy_(value[: num * rows.shape[1]].view(num, -1))
    if length:
        rows[num, :length].copy_(value[-length:])


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes, which every backend supports."""
    return tensor.view(-1).view(torch.uint8)
