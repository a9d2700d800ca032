"""Group: how the ranks of a run act as one. One interface, final classes; the engine never asks which.

Every method that speaks to other ranks is called by every rank in the same order, whatever happened on
it: a rank that failed says so in the vote instead of staying away, so no rank ever waits for one that
does not come.

    prepare, adopt                    once: the same weights everywhere, gradients taken charge of
    expect, begin                     in every attempt of a step, as it begins
    last_pass, part_staged, staged    in every attempt: this rank's own part
    gather, agree                     in every attempt: the sums and the vote
    exchange                          when the vote has shown that there is something to tell
    accepted                          when there is something to learn from what was agreed on
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
"""Totals of every rank that has any; the metrics of the task follow. The second is the weight."""


class Wish(IntFlag):
    """What a rank wants all ranks to do together after a step."""

    NOTHING = 0
    SAVE = 1
    STOP = 2
    PLAN = 4
    END = 8  # training is over


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know after a vote without a failure.

    Attributes:
        totals: the sums over all ranks, by part where there are several.
        lengths: how many totals each rank had: a rank without samples knows of no metrics.
        notes: the number that each rank sent along.
        wished: what any rank wished.
    """

    totals: list[float]
    lengths: tuple[int, ...]
    notes: tuple[float, ...]
    wished: Wish = Wish.NOTHING


class Group(ABC):
    """All ranks of a run, seen from one of them.

    Attributes:
        rank: number of this one, from 0.
        shares: parts of the global batch that the ranks take, by rank; only their ratios count.
        lockstep: every rank must run equally many passes in a step, since ranks meet inside passes.
        overlaps: whether gradients may begin to cross while the last backward pass still runs.
        num_parts: sums of losses and weights that each rank has, see `Reproducible`; else 1.
        diverges: weights and optimizer states differ between ranks, which take steps by themselves.
        delays: the gradient that a step applies is that of a step before it.
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
        """The model that `make` builds, before the optimizer is made: with the same parameters and
        buffers on all ranks.

        Raises the error of `make` on the rank where it fails, and `PeerFailed` on the others.
        """
        model = together(self, make)
        self.prepare(model)
        return model

    def prepare(self, model: nn.Module) -> None:  # noqa: B027 - nothing is a good default
        """Before the optimizer is made: the same parameters and buffers on all ranks."""

    def adopt(self, replica: Replica) -> None:  # noqa: B027
        """Take charge of the gradients of `replica`."""

    def expect(self, num_samples: int) -> None:  # noqa: B027
        """The step that is tried next has so many samples, over all ranks."""

    def begin(self) -> None:  # noqa: B027
        """An attempt at a step begins."""

    def last_pass(self, measured: bool = False) -> AbstractContextManager[None]:
        """Around the last pass of this rank in a step. `measured`: it is the only one, and `sum_norm`
        is asked for after it."""
        return nullcontext()

    def between_phases(self, replica: Replica) -> None:  # noqa: B027
        """Passes without gradient are over, and ranks are going to meet outside of them."""

    def leave(self) -> None:  # noqa: B027
        """This rank has no part in the attempt any more: whoever waits for it inside a pass wakes."""

    def part_staged(self, part: int, held: Held) -> None:  # noqa: B027
        """The passes of `part` of a reproducible step are over. May run out of memory. If another part
        follows, buffers are put back to what they `held` when the step began."""

    def sum_norm(self, replica: Replica, last: bool) -> Tensor | None:
        """Right after a pass, the `last` of this rank in the step or not: the 2-norm of what its own
        passes have added up so far (scalar tensor on the device); None where that is not there by
        itself, or is no part of what the step makes of it."""
        return replica.sum_norm()

    def staged(self, held: Held) -> None:  # noqa: B027
        """This rank's passes are over. `held` tells what buffers held when the step began. May run out
        of memory."""

    @abstractmethod
    def gather(self, failed: bool) -> None:
        """Make this rank's gradients the sums over all ranks. `failed`: this rank has none that
        count, and takes part all the same.

        Raises `PeerLost` if a rank is gone.
        """

    @abstractmethod
    def agree(
        self, totals: Tensor | None, note: float = 0.0, wish: Wish = Wish.NOTHING
    ) -> Agreed | None:
        """The vote: the totals over all ranks; None on every rank if any of them failed.

        Waits for the device once.

        Args:
            totals: float64, shape [num_totals], this rank's sums; None if this rank failed. A rank
                may have fewer than others: what is missing counts as zero.
            note: any number, for all ranks to know.
            wish: what this rank wants all to do after the step.

        Raises `PeerLost` if a rank is gone.
        """

    @abstractmethod
    def exchange(self, value: T) -> list[T]:
        """The `value` of every rank, by rank. For small things that pickle, and rare moments.

        Raises `PeerLost` if a rank is gone.
        """

    def accepted(self, agreed: Agreed) -> None:  # noqa: B027
        """All ranks go on to the update, by what they `agreed` on. Raises `PeerLost` if one is gone."""

    def undone(self) -> None:  # noqa: B027
        """The step is put back, though it may have been `accepted`. No rank waits for another."""

    def committed(self, replica: Replica) -> None:  # noqa: B027
        """After the update of a step: what else has to be made the same on all ranks."""

    def settle(self, replica: Replica) -> float:
        """Bring to its end what is under way between ranks, before weights are read: for an evaluation,
        and at the end of training. Gradients that were still crossing become those of `replica`.

        Returns their total weight, or 0 if there are none. Raises `PeerLost` if a rank is gone.
        """
        return 0.0

    def state(self) -> dict[str, Tensor]:
        """Between two steps, settled: what the exchange itself remembers, by name; the tensors, not
        copies. Alike on all ranks."""
        return {}

    def restored(self) -> None:  # noqa: B027
        """Weights and `state` have been filled anew."""

    def close(self) -> None:  # noqa: B027
        """The run is over."""


@final
class SingleDevice(Group):
    """One rank by itself: what it knows is what all know."""

    rank: int = 0
    shares: Sequence[float] = (1.0,)

    def gather(self, failed: bool) -> None:
        """Nothing to gather."""

    def agree(
        self, totals: Tensor | None, note: float = 0.0, wish: Wish = Wish.NOTHING
    ) -> Agreed | None:
        """This rank's own totals. Waits for the device once."""
        if totals is None:
            return None
        return Agreed(totals.tolist(), (len(totals),), (note,), wish)

    def exchange(self, value: T) -> list[T]:
        """This rank's own value."""
        return [value]
