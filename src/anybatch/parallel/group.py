"""Group: the interface through which the ranks of a run cooperate. Implementations are final classes,
which the engine does not distinguish.

Every method that communicates with other ranks is called by every rank in the same order, whatever
happened on it: a rank that failed reports this in the vote instead of staying away, so no rank ever
waits for one that does not arrive.

    prepare, adopt                    once: the same weights on all ranks, control of the gradients
    expect, begin                     at the beginning of every attempt at a step
    last_pass, part_staged, staged    in every attempt: this rank's own part
    gather, agree                     in every attempt: the sums and the vote
    exchange                          if the vote has shown that there is something to report
    accepted                          if the agreed totals lead to an update, before it
    committed                         after the update
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntFlag
from typing import TypeVar, final

from torch import Tensor, nn

from anybatch.compute import Replica
from anybatch.parallel.buffers import Held
from anybatch.parallel.failures import together

T = TypeVar("T")

NUM_FIXED = 8
"""Number of totals that precede the metrics of the task, on every rank that has totals. The second of
them is the weight."""


class Wish(IntFlag):
    """What a rank requests all ranks to do together after a step."""

    NOTHING = 0
    SAVE = 1
    STOP = 2
    PLAN = 4
    END = 8  # training is over


@dataclass(frozen=True, slots=True)
class Agreed:
    """The result of a vote without a failure, known to all ranks.

    Attributes:
        totals: sums over all ranks, by part if there are several parts.
        lengths: number of totals of each rank: a rank without samples does not know the metrics.
        notes: the `note` of each rank.
        wished: all wishes of any rank.
    """

    totals: list[float]
    lengths: tuple[int, ...]
    notes: tuple[float, ...]
    wished: Wish = Wish.NOTHING


class Group(ABC):
    """All ranks of a run, as seen from one of them.

    Attributes:
        rank: number of this rank, from 0.
        shares: parts of the global batch that the ranks take, by rank; only their ratios matter.
        lockstep: whether every rank must run the same number of passes in a step, since ranks
            communicate inside passes.
        overlaps: whether gradients may be sent while the last backward pass is still running.
        num_parts: number of parts with separate sums of losses and weights, see `Reproducible`; 1 in
            other groups.
        diverges: whether weights and optimizer states differ between ranks, which take steps
            independently.
        delays: whether a step applies the gradient of an earlier step.
    """

    rank: int
    shares: Sequence[float]
    lockstep: bool = False
    overlaps: bool = False
    diverges: bool = False
    delays: bool = False
    num_parts: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.shares)

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Build the model with `make`, with the same parameters and buffers on all ranks. Called before
        the optimizer is created.

        Raises the error of `make` on the rank where it fails, and `PeerFailed` on the others.
        """
        model = together(self, make)
        self.prepare(model)
        return model

    def prepare(self, model: nn.Module) -> None:  # noqa: B027 - nothing is a good default
        """Make parameters and buffers the same on all ranks. Called before the optimizer is created."""

    def adopt(self, replica: Replica) -> None:  # noqa: B027
        """Take control of the gradients of `replica`."""

    def expect(self, num_samples: int) -> None:  # noqa: B027
        """Called before an attempt at a step, which has `num_samples` samples over all ranks."""

    def begin(self) -> None:  # noqa: B027
        """Begin an attempt at a step."""

    def last_pass(self, measured: bool = False) -> AbstractContextManager[None]:
        """Context manager around the last pass of this rank in a step. `measured`: it is the only pass,
        and `sum_norm` is called after it."""
        return nullcontext()

    def between_phases(self, replica: Replica) -> None:  # noqa: B027
        """Called after passes without gradient, before ranks communicate outside of passes."""

    def leave(self) -> None:  # noqa: B027
        """Leave the attempt on this rank: the ranks that wait for it inside a pass are woken."""

    def part_staged(self, part: int, held: Held) -> None:  # noqa: B027
        """Called after the passes of `part` of a reproducible step. May run out of memory. If another
        part follows, buffers are reset to what they `held` when the step began."""

    def sum_norm(self, replica: Replica, last: bool) -> Tensor | None:
        """The 2-norm of the gradients that this rank's passes have summed so far (scalar tensor on the
        device), called right after a pass. `last`: it was the last pass of this rank in the step. None
        if this rank holds a shard of the sums over all ranks, or the step is based on other sums."""
        return None if self.lockstep or self.diverges or self.delays else replica.sum_norm()

    def staged(self, held: Held) -> None:  # noqa: B027
        """Called after the passes of this rank. `held` returns the buffers at the start of the step.
        May run out of memory."""

    @abstractmethod
    def gather(self, failed: bool) -> None:
        """Replace the gradients of this rank by the sums over all ranks. `failed`: this rank has no
        valid gradients, but participates nevertheless.

        Raises `PeerLost` if a rank is gone.
        """

    @abstractmethod
    def agree(
        self, totals: Tensor | None, note: float = 0.0, wish: Wish = Wish.NOTHING
    ) -> Agreed | None:
        """Hold the vote: returns the totals over all ranks; None on every rank if any of them failed.

        Synchronizes with the device once.

        Args:
            totals: float64, shape [num_totals], the sums of this rank; None if this rank failed. A rank
                can have fewer totals than others: missing ones count as zero.
            note: any number, sent to all ranks.
            wish: what this rank requests all ranks to do after the step.

        Raises `PeerLost` if a rank is gone.
        """

    @abstractmethod
    def exchange(self, value: T) -> list[T]:
        """The `value` of every rank, in rank order. For small picklable values, and for rare use.

        Raises `PeerLost` if a rank is gone.
        """

    def accepted(self, agreed: Agreed) -> None:  # noqa: B027
        """Called when all ranks proceed to the update, based on what they `agreed` on. Raises
        `PeerLost` if a rank is gone."""

    def undone(self) -> None:  # noqa: B027
        """Called when the step is undone, possibly after `accepted`. No rank waits for another."""

    def committed(self, replica: Replica) -> None:  # noqa: B027
        """Called after the update of a step, to make everything else the same on all ranks."""

    def settle(self, replica: Replica) -> float:
        """Complete pending communication between ranks before weights are read: for an evaluation, and
        at the end of training. Gradients still in transit become those of `replica`.

        Returns their total weight, or 0 if there are none. Raises `PeerLost` if a rank is gone.
        """
        return 0.0

    def state(self) -> dict[str, Tensor]:
        """The state of the exchange itself, by name: the tensors, not copies. The same on all ranks.
        Called between two steps, after `settle`."""
        return {}

    def restored(self) -> None:  # noqa: B027
        """Called after weights and `state` have been loaded."""

    def close(self) -> None:  # noqa: B027
        """Called at the end of the run."""


@final
class SingleDevice(Group):
    """The group of a single rank, which does not communicate."""

    rank: int = 0
    shares: Sequence[float] = (1.0,)

    def gather(self, failed: bool) -> None:
        """Nothing to gather."""

    def agree(
        self, totals: Tensor | None, note: float = 0.0, wish: Wish = Wish.NOTHING
    ) -> Agreed | None:
        """This rank's own totals. Synchronizes with the device once."""
        if totals is None:
            return None
        return Agreed(totals.tolist(), (len(totals),), (note,), wish)

    def exchange(self, value: T) -> list[T]:
        """This rank's own value."""
        return [value]
