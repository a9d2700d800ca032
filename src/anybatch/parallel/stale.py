"""Stale: gradients are exchanged while the next step computes, and applied one step late.

    compute   | step 1 | step 2 | step 3 | step 4 |
    network            |  g 1   |  g 2   |  g 3   |  g 4   |
    update         -       g 1      g 2      g 3      g 4 (at the end)

The time of a step becomes the maximum of computation and communication instead of their sum; overlap
within a step achieves this only for the last backward pass. The gradient that updates the weights was
computed with the weights from one update earlier (delay 1; Lian et al. 2015, "Asynchronous parallel
stochastic gradient for nonconvex optimization"). Only the gradient is delayed: the vote of a step is
still held in that step, so a rank that runs out of memory is noticed immediately, all ranks redo the
step, and the gradients in transit, which have separate storage, are not affected. They are not affected
either by a step that is rejected, for example because its loss is not finite: the gradients of a step
are sent only after it is accepted. If the update fails after that, for example because the gradient in
transit is not finite, neither gradient is applied: that of the previous step is discarded, and that of
this step is computed again when the step is repeated.
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

_PIECE = 1 << 20  # elements swapped at a time


class _UnderWay(NamedTuple):
    """Gradients in transit."""

    weight: float  # of the global batch over which they are summed
    used: Sequence[bool]  # for each parameter, whether any rank used it


@final
class Stale(DistributedGroup):
    """The ranks of torch.distributed's default group, each with the whole model; gradients are applied
    one step late.

    The first step, and the first step after `settle`, has no gradient to apply and leaves the weights
    unchanged: no parameter has a gradient, so the optimizer skips all of them. Needs additional memory
    of the size of the gradients.

    Args:
        shares: parts of the global batch by rank.
        device: device of this rank.
        sums: reduction of the gradients over the ranks.
    """

    delays: bool = True

    def __init__(self, shares: Sequence[float], device: torch.device, sums: Sums) -> None:
        super().__init__(shares, device)
        self._sums = sums
        # Whether a parameter was unused on some rank in the step of the last vote.
        self._is_some_unused = False
        self._buckets: Buckets | None = None
        self._crossing: list[Tensor] = []
        self._under_way: _UnderWay | None = None
        self._is_accepted = False  # whether the current step is accepted but not yet committed

    def adopt(self, replica: Replica) -> None:
        self._buckets = replica.flatten()
        self._buffers = Buffers(replica.model, self._device, self.size)
        self._crossing = [torch.zeros_like(flat) for flat in self._buckets.flats]
        self._sums.reserve(self._crossing)

    def gather(self, failed: bool) -> None:
        """See `Group`. When this returns, the gradients of the previous step have arrived."""
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
        """Start sending the gradients of this step, and replace them by those of the previous step,
        scaled to the weight of this step, since the engine divides by it."""
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
        self._is_accepted = False
        super().committed(replica)

    def settle(self, replica: Replica) -> float:
        """Make the gradients in transit those of `replica`, before an evaluation and at the end of
        training, so that each is applied once. Returns their total weight; 0 if there are none."""
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
    """Swap the contents of two 1-D tensors, using little memory."""
    for left, right in zip(one.split(_PIECE), other.split(_PIECE), strict=True):
        kept = left.clone()
        left.copy_(right)
        right.copy_(kept)
