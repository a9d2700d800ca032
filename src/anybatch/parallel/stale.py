"""Stale: gradients that cross the network while the next step computes, applied one step late.

    compute   | step 1 | step 2 | step 3 | step 4 |
    network            |  g 1   |  g 2   |  g 3   |  g 4   |
    update         -       g 1      g 2      g 3      g 4 (at the end)

The time of a step becomes the larger of computing and crossing instead of their sum, which overlap
inside a step reaches only for the last backward pass. The gradient that updates the weights was
computed on those of one update before (delay 1; Lian et al. 2015, "Asynchronous parallel stochastic
gradient for nonconvex optimization"). What is delayed is the gradient alone: the vote of a step is
still held in that step, so a rank that runs out of memory is heard at once, all redo the step, and the
gradients under way, which lie in storage of their own, are not touched by it. Nor are they by a step
that is refused, since its loss is not finite say: those of a step are sent off once it is accepted.
Where the update fails then, since the gradient under way is not finite say, neither is applied any
more: that of the step before is spent, and that of this step is computed again when the step is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from anybatch.compute import Replica
from anybatch.compute.buckets import Buckets
from anybatch.parallel.buffers import Buffers
from anybatch.parallel.group import Agreed, Wish
from anybatch.parallel.sums import Sums
from anybatch.parallel.vote import DistributedGroup, calling

_PIECE = 1 << 20  # elements exchanged at once between two storages


class _UnderWay(NamedTuple):
    """Gradients that are crossing."""

    weight: float  # of the global batch that they are sums over
    used: Sequence[bool]  # for each parameter, whether any rank used it


@final
class Stale(DistributedGroup):
    """The ranks of torch.distributed's default group, each with the whole model, one gradient behind.

    The first step, and the first after `settle`, has no gradient to apply and leaves the weights as
    they are: no parameter has a gradient, so that the optimizer passes over all of them. Takes as
    much memory again as the gradients.

    Args:
        shares: by rank.
        device: of this rank.
        sums: how gradients are added up.
    """

    delays: bool = True

    def __init__(self, shares: Sequence[float], device: torch.device, sums: Sums) -> None:
        super().__init__(shares, device)
        self._sums = sums
        # A parameter, on some rank, in the step that was voted on last.
        self._is_some_unused = False
        self._buckets: Buckets | None = None
        self._crossing: list[Tensor] = []
        self._under_way: _UnderWay | None = None
        self._is_accepted = False  # a step that is not committed yet

    def adopt(self, replica: Replica) -> None:
        self._buckets = replica.flatten()
        self._buffers = Buffers(replica.model, self._device, self.size)
        self._crossing = [torch.zeros_like(flat) for flat in self._buckets.flats]
        self._sums.reserve(self._crossing)

    def sum_norm(self, replica: Replica, last: bool) -> Tensor | None:
        """See `Group`: a step applies the gradient of the one before."""
        return None

    def gather(self, failed: bool) -> None:
        """The gradients of the step before are there when this returns."""
        with calling("while gradients were added up"):
            self._sums.finish()
            if self._buffers is not None:
                self._buffers.gather()

    def agree(
        self, totals: Tensor | None, note: float = 0.0, wish: Wish = Wish.NOTHING
    ) -> Agreed | None:
        unused = self._buckets is not None and not all(self._buckets.used)
        agreed, (num_unused,) = self._vote.hold(totals, note, (unused,), wish=wish)
        self._is_some_unused = num_unused > 0
        return agreed

    def accepted(self, agreed: Agreed) -> None:
        """The gradients of this step are sent off, and those of the step before take their place, in
        the scale of this one: the engine divides by its weight."""
        buckets = self._buckets
        if buckets is None:
            return
        self._is_accepted = True
        buckets.complete()
        everything = [True] * len(buckets.used)
        used = self._vote.any_of(buckets.used) if self._is_some_unused else everything
        before, now = self._under_way, _UnderWay(agreed.totals[1], used)
        for gradients, crossing in zip(buckets.flats, self._crossing, strict=True):
            _swap(gradients, crossing)
            with calling("while gradients were sent off"):
                self._sums.start(crossing)
        self._under_way = now
        if before is None:
            buckets.drop_unused([False] * len(used))
        else:
            if now.weight != before.weight:
                torch._foreach_mul_(buckets.flats, now.weight / before.weight)
            buckets.drop_unused(before.used)

    def undone(self) -> None:
        if self._is_accepted:
            self._under_way, self._is_accepted = None, False

    def committed(self, replica: Replica) -> None:
        """See `Group`: the buffers."""
        self._is_accepted = False
        super().committed(replica)

    def settle(self, replica: Replica) -> float:
        """Make the gradients under way those of `replica`, before an evaluation and at the end of
        training, so that each is applied once. Their total weight; 0 if there are none."""
        last, buckets = self._under_way, self._buckets
        if last is None or buckets is None:
            return 0.0
        with calling("while gradients were added up"):
            self._sums.finish()
        torch._foreach_copy_(buckets.flats, self._crossing)
        buckets.drop_unused(last.used)
        self._under_way = None
        return last.weight


def _swap(one: Tensor, other: Tensor) -> None:
    """Exchange the contents of two 1-D tensors, with little memory."""
    for left, right in zip(one.split(_PIECE), other.split(_PIECE), strict=True):
        kept = left.clone()
        left.copy_(right)
        right.copy_(kept)
