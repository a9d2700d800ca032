"""Local steps: every rank trains by itself and the weights are averaged every k steps.

    rank 0   step step step step |         | step step step step |         |
    rank 1   step step step step | average | step step step step | average |
    rank 2   step step step step |         | step step step step |         |

Within a round each rank takes steps on the mean gradient of its own share, with its own optimizer, and
does not communicate: the network is used once in k steps, a rank that runs out of memory redoes its
step alone, and no rank waits for a slower one. At the end of a round the ranks' movements

    D_r = weights at the start of the round - weights of rank r now

are averaged, weighted by the total loss weight of each rank in the round, and the mean D updates the
common weights:

    averaging (Stich 2019, "Local SGD converges fast and communicates little")     w := w - D
    outer optimizer (Douillard et al. 2023, "DiLoCo", algorithm 1)                  w := w - Nesterov(D)

Every rank computes the outer momentum from the same sums, so it is bitwise identical on all ranks. The
states of the inner optimizers stay on their ranks. This is not equivalent to synchronous training: the
result depends on the number of ranks and on k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anybatch.compute import Replica
from anybatch.compute.buckets import Buckets
from anybatch.parallel.group import NUM_FIXED, Agreed, Wish
from anybatch.parallel.sums import Sums
from anybatch.parallel.vote import DistributedGroup, calling, exchange, wish_of
from anybatch.plans import Outer

T = TypeVar("T")


@final
class LocalSteps(DistributedGroup):
    """The ranks of torch.distributed's default group, each with its own weights during a round.

    Within a step (from `begin` to `committed`) ranks do not communicate: `agree` returns this rank's
    own totals, so the gradient is the mean of its own share and the reported loss is that of its share.
    Outside of steps (evaluation, the start of a run) ranks communicate as usual.

    Args:
        shares: parts of the global batch by rank; none is zero.
        device: device of this rank.
        every: number of steps per round.
        outer: the outer optimizer; None: plain averaging.
        sums: reduction of the movements over the ranks.
    """

    diverges: bool = True

    def __init__(
        self,
        shares: Sequence[float],
        device: torch.device,
        every: int,
        outer: Outer | None,
        sums: Sums,
    ) -> None:
        super().__init__(shares, device)
        self._every = every
        self._outer = outer
        self._sums = sums
        self._within_step = False
        self._wish = Wish.NOTHING  # of this rank, in this round
        self._wished = Wish.NOTHING  # of all ranks, in the previous round
        self._num_steps = 0
        self._weight = 0.0  # total loss weight of this rank in this round
        self._weight_of_step = 0.0
        self._last = [0.0, 1.0, *[0.0] * (NUM_FIXED - 2)]
        self._buckets: Buckets | None = None
        self._parameters: list[nn.Parameter] = []
        self._start: list[Tensor] = []
        self._momenta: list[Tensor] = []

    def adopt(self, replica: Replica) -> None:
        # The storage of gradients is unused between two steps, so movements are exchanged in it.
        self._buckets = replica.flatten()
        self._parameters = [param for param in replica.parameters if param.requires_grad]
        self._start = [param.detach().clone() for param in self._parameters]
        if self._outer is not None:
            self._momenta = [torch.zeros_like(param) for param in self._start]
        self._sums.reserve(self._buckets.flats)

    def begin(self) -> None:
        self._within_step = True

    def gather(self, failed: bool) -> None:
        """Nothing is gathered within a round."""

    def agree(
        self, totals: Tensor | None, note: float = 0.0, wish: Wish = Wish.NOTHING
    ) -> Agreed | None:
        """Within a step, this rank's own totals and the wishes of the previous round; otherwise the
        vote of all ranks."""
        if not self._within_step:
            return self._vote.hold(totals, note, wish=wish)[0]
        if totals is None:
            return None
        values: list[float] = totals.tolist()
        self._weight_of_step = values[1]
        buckets = self._buckets
        if values[1] == 0:
            # This rank has no samples in a short last step, or none that count: there is no update, and
            # the previous values are reported again.
            values = self._last[: len(values)]
            if buckets is not None:
                buckets.drop_unused([False] * len(buckets.used))
        else:
            self._last = values
            if buckets is not None and not all(buckets.used):
                buckets.drop_unused(buckets.used)
        self._wish |= wish
        return Agreed(values, (len(values),), (), self._wished)

    def exchange(self, value: T) -> list[T]:
        """The value of every rank. Within a step only this rank's own, with empty values (its type
        called without arguments) in the places of the other ranks."""
        if not self._within_step:
            return exchange(value)
        return [value if rank == self.rank else type(value)() for rank in range(self.size)]

    def committed(self, replica: Replica) -> None:
        """See `Group`. Ends the round after `every` steps."""
        self._within_step = False
        self._wished = Wish.NOTHING
        self._num_steps += 1
        self._weight += self._weight_of_step
        if self._num_steps == self._every:
            self._end_round(replica)

    def settle(self, replica: Replica) -> float:
        """End the round now, so that all ranks have the same weights: before an evaluation and at the
        end of training. Returns 0, since no gradient is left over."""
        self._within_step = False
        if self._num_steps:
            self._end_round(replica)
        return 0.0

    def state(self) -> dict[str, Tensor]:
        """The outer momentum."""
        return {f"momentum.{i}": momentum for i, momentum in enumerate(self._momenta)}

    @torch.no_grad()
    def restored(self) -> None:
        """Start the next round from the current weights."""
        torch._foreach_copy_(self._start, list(self._parameters))

    @torch.no_grad()
    def _end_round(self, replica: Replica) -> None:
        assert self._buckets is not None
        with calling("while the weights were averaged"):
            wishes = [bool(self._wish & one) for one in Wish]
            sums = torch.tensor([self._weight, *wishes], dtype=torch.float64, device=self._device)
            dist.all_reduce(sums)
            total, *counts = sums.tolist()
            self._wish, self._wished = Wish.NOTHING, wish_of(counts)
            part = self._weight / total if total else 1.0 / self.size
            moved = self._buckets.views
            torch._foreach_copy_(moved, self._start)
            torch._foreach_sub_(moved, list(self._parameters))
            torch._foreach_mul_(moved, part)
            for flat in self._buckets.flats:
                self._sums.start(flat)
            self._sums.finish()
            _average_buffers(replica.model, part, self._device)
        if self._outer is None:
            torch._foreach_sub_(self._start, moved)
        else:
            beta = self._outer.momentum
            torch._foreach_mul_(self._momenta, beta)
            torch._foreach_add_(self._momenta, moved)
            torch._foreach_add_(moved, self._momenta, alpha=beta)
            torch._foreach_add_(self._start, moved, alpha=-self._outer.lr)
        torch._foreach_copy_(list(self._parameters), self._start)
        self._num_steps, self._weight = 0, 0.0


def _average_buffers(model: nn.Module, part: float, device: torch.device) -> None:
    """Replace floating-point buffers by their weighted means over the ranks, and integer buffers
    (counts) by the maximum."""
    buffers = list(model.buffers())
    floating = [b for b in buffers if b.is_floating_point()]
    counts = [b for b in buffers if not b.is_floating_point() and not b.is_complex()]
    if floating:
        wide = torch.float64 if any(b.dtype == torch.float64 for b in floating) else torch.float32
        flat = torch.cat([b.detach().to(device, wide).reshape(-1) for b in floating]).mul_(part)
        dist.all_reduce(flat)
        _pour(flat, floating)
    if counts:
        flat = torch.cat([b.detach().to(device, torch.int64).reshape(-1) for b in counts])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        _pour(flat, counts)


def _pour(flat: Tensor, into: Sequence[Tensor]) -> None:
    for tensor, piece in zip(into, flat.split([t.numel() for t in into]), strict=True):
        tensor.copy_(piece.view(tensor.shape))
