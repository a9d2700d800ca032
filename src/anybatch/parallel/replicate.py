"""Replicate: the whole model on every rank, gradients reduced once per global step.

DistributedDataParallel reduces inside autograd hooks, so a rank that fails in the middle of a backward
pass leaves the others waiting, and it finds unused parameters by traversing the graph. Here every rank
reduces a fixed list of buckets in a fixed order in every step, whatever happens:

    1. all passes but the last only add to the gradients
    2. in the last one, each bucket is sent as soon as it is complete           (overlap)
    3. when it is over, or has failed at any point, the remaining buckets are sent
    4. one small all-reduce carries the vote: failures, losses, weights

So gradients are exchanged once per step for any number of micro-batches, a rank can have fewer of them
than others or none, and after a failure all ranks are at the same point and redo the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor

from anybatch.compute import Replica
from anybatch.compute.buckets import Buckets
from anybatch.parallel.buffers import Buffers
from anybatch.parallel.group import Agreed, Wish
from anybatch.parallel.norms import NormExchange
from anybatch.parallel.sums import Sums
from anybatch.parallel.vote import DistributedGroup, calling


@final
class Replicate(DistributedGroup):
    """The ranks of torch.distributed's default group, each with the whole model.

    Args:
        shares: parts of the global batch by rank.
        device: device of this rank.
        overlaps: see `Group`. If False, all buckets are sent after the last pass.
        synchronised: ghost batches of BatchNorm are divided over the ranks, which communicate inside
            every pass; buckets are then sent only after the passes.
        sums: reduction of the buckets over the ranks; None: exact sums.
    """

    def __init__(
        self,
        shares: Sequence[float],
        device: torch.device,
        overlaps: bool = True,
        synchronised: bool = False,
        sums: Sums | None = None,
    ) -> None:
        super().__init__(shares, device)
        self.overlaps: bool = overlaps and not synchronised
        self._synchronised = synchronised
        self._norms: NormExchange | None = None
        self._buckets: Buckets | None = None
        self._sums: Sums = sums or Sums()

    def adopt(self, replica: Replica) -> None:
        if self._synchronised:  # first, since the ranks create it together
            self._norms = NormExchange(self._device)
            replica.synchronise(self._norms)
        self._buckets = replica.flatten()
        self._sums.reserve(self._buckets.flats)
        self._buffers = Buffers(
            replica.model, self._device, self.size, synchronised=self._synchronised
        )

    def begin(self) -> None:
        if self._norms is not None:
            self._norms.begin()

    def last_pass(self, measured: bool = False) -> AbstractContextManager[None]:
        if self._buckets is None or not self.overlaps:
            return nullcontext()
        flats = self._buckets.flats
        return self._buckets.giving(lambda number: self._sums.start(flats[number]), measured)

    def sum_norm(self, replica: Replica, last: bool) -> Tensor | None:
        """See `Group`. With overlap, the norm of an only pass is taken before its buckets are sent, and
        that of the last of several passes is None. None also if norms are synchronized, since the sums
        of a rank then depend on the samples of the others."""
        crossing = last and self.overlaps and not (self._buckets and self._buckets.own_norms)
        return None if crossing or self._norms is not None else replica.sum_norm()

    def gather(self, failed: bool) -> None:
        """See `Group`. The sums that are started here complete in `agree`, together with the vote."""
        if self._buckets is None or self._buffers is None:
            return
        with calling("while gradients were added up"):
            if self._norms is not None:
                self._norms.finish(failed)
            self._buckets.complete()
            for flat in self._buckets.flats[self._sums.num_started :]:
                self._sums.start(flat)
            self._buffers.gather()

    def agree(
        self, totals: Tensor | None, note: float = 0.0, wish: Wish = Wish.NOTHING
    ) -> Agreed | None:
        buckets = self._buckets
        flags = (False, False) if buckets is None else (buckets.late, not all(buckets.used))
        agreed, (late, unused) = self._vote.hold(totals, note, flags, self._arrive, wish)
        if agreed is None:
            return None
        if late:  # see `Buckets.late`: the step is redone without overlap
            self.overlaps = False
            return None
        if unused and buckets is not None:
            buckets.drop_unused(self._vote.any_of(buckets.used))
        return agreed

    def close(self) -> None:
        if self._norms is not None:
            self._norms.close()

    def _arrive(self) -> None:
        self._sums.finish(None if self._buckets is None else self._buckets.measure)
