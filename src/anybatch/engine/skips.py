"""Skips: samples and steps that are left out of training, told and counted.

Leaving out is what the task asked for, so it is no error; training on next to nothing would be one that
nobody notices. So there is an end to it, and it is the same on all ranks, which all know the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import final

from anybatch.data import Bad
from anybatch.errors import DataError, LossError
from anybatch.events import Sink, Skipped

MOST_IN_A_ROW = 10
"""Steps left out whole, one after the other, before training ends."""

MOST_OF_EPOCH = 0.5
"""Part of an epoch that may be left out before training ends."""


@final
class Skips:
    """What is left out of one run.

    Args:
        sink: is told.
        epoch_samples: of an epoch; None: not known before its end.
        num_held_out: samples that evaluations have; None: not known.

    Attributes:
        num_samples: left out of training so far.
        held_out: positions of the held-out samples that evaluations do without, in order.
    """

    def __init__(
        self, sink: Sink, epoch_samples: int | None, num_held_out: int | None = None
    ) -> None:
        self._num_held_out = num_held_out
        self.num_samples: int = 0
        self.held_out: Sequence[int] = ()
        self._sink = sink
        self._epoch_samples = epoch_samples
        self._taken = self._missing = 0  # of this epoch
        self._in_a_row = 0
        self._reason = ""

    def leave_out(self, step: int, found: Sequence[tuple[int, Bad]]) -> None:
        """`step` is done without these: (rank that found it, sample) each.

        Raises `DataError` if that makes too many.
        """
        for (rank, epoch, reason), group in groupby(found, _by_reason):
            samples = tuple(bad.place.sample for _, bad in group)
            self._miss(step, rank, epoch, samples, len(samples), reason)

    def pass_over(self, step: int, epoch: int, num_samples: int, reason: str) -> None:
        """`step` is left out whole, with the `num_samples` that it had left.

        Raises `DataError` or `LossError` if that makes too many.
        """
        self._miss(step, None, epoch, (), num_samples, reason)
        self._in_a_row += 1
        if self._in_a_row == MOST_IN_A_ROW:
            raise LossError(
                f"the last {MOST_IN_A_ROW} steps had to be left out whole, up to step {step}"
                f" ({reason}): look at the data, or lower the learning rate. Nothing of these steps was"
                " kept."
            )

    def learned(self) -> None:
        """The step was not left out whole."""
        self._in_a_row = 0

    def done(self, num_samples: int, epoch: int, epoch_end: bool) -> None:
        """A step that took so many samples from the order, in an epoch, is over.

        Raises `DataError` if more than half of the epoch has been left out.
        """
        self._taken += num_samples
        if epoch_end:
            self._check(epoch, self._taken)
            self._taken = self._missing = 0

    def leave_out_of_evaluation(self, step: int, found: Sequence[tuple[int, Bad]]) -> None:
        """Every evaluation after `step` steps is done without these: (rank that found it, sample) each.

        Raises `DataError` if that makes too many.
        """
        self.held_out = sorted({*self.held_out, *(bad.place.position for _, bad in found)})
        for (rank, epoch, reason), group in groupby(found, _by_reason):
            samples = tuple(bad.place.sample for _, bad in group)
            self._tell(step, rank, epoch, samples, len(samples), reason, held_out=True)
        total = self._num_held_out
        if total is not None and len(self.held_out) > MOST_OF_EPOCH * total:
            raise DataError(
                f"{len(self.held_out):,} of the {total:,} held-out samples are bad (the last:"
                f" {found[-1][1].reason}), which is more than half: mend the data, or what loads it."
            )

    def _miss(
        self,
        step: int,
        rank: int | None,
        epoch: int,
        samples: tuple[int, ...],
        num_samples: int,
        reason: str,
    ) -> None:
        """Samples of the order are missing from now on. Raises `DataError` if they are too many."""
        self.num_samples += num_samples
        self._missing += num_samples
        self._reason = reason
        self._tell(step, rank, epoch, samples, num_samples, reason)
        if self._epoch_samples is not None:
            self._check(epoch, self._epoch_samples)

    def _tell(
        self,
        step: int,
        rank: int | None,
        epoch: int,
        samples: tuple[int, ...],
        num_samples: int,
        reason: str,
        held_out: bool = False,
    ) -> None:
        self._sink(
            Skipped(
                time=time.time(),
                step=step,
                rank=rank,
                epoch=epoch,
                samples=samples,
                num_samples=num_samples,
                reason=reason,
                held_out=held_out,
            )
        )

    def _check(self, epoch: int, total: int) -> None:
        if self._missing > MOST_OF_EPOCH * total:
            raise DataError(
                f"{self._missing:,} of the {total:,} samples of epoch {epoch} are bad (the last:"
                f" {self._reason}), which is more than half: mend the data, or what loads it."
            )


def _by_reason(found: tuple[int, Bad]) -> tuple[int, int, str]:
    rank, bad = found
    return rank, bad.place.epoch, bad.reason
