"""Skips: samples and steps that are left out of training, reported and counted.

Leaving out bad data is what the task requested, so it is not an error. But training on almost nothing
would go unnoticed, so there is a limit, which all ranks reach at the same time, since all have the same
counts.
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
"""Consecutive steps skipped entirely before training ends."""

MOST_OF_EPOCH = 0.5
"""Fraction of an epoch that may be left out before training ends."""


@final
class Skips:
    """Tracks what is left out of one run.

    Args:
        epoch_samples: number of samples in an epoch; None: not known before its end.
        num_held_out: number of samples for evaluation; None: unknown.

    Attributes:
        num_samples: number of samples left out of training so far.
        held_out: positions of the held-out samples that evaluations omit, in order.
    """

    def __init__(
        self, sink: Sink, epoch_samples: int | None, num_held_out: int | None = None
    ) -> None:
        self._num_held_out = num_held_out
        self.num_samples: int = 0
        self.held_out: Sequence[int] = ()
        self._sink = sink
        self._epoch_samples = epoch_samples
        self._taken = self._missing = 0  # in this epoch
        self._in_a_row = 0
        self._reason = ""

    def leave_out(self, step: int, found: Sequence[tuple[int, Bad]]) -> None:
        """`step` is run without these samples, given as (rank that found it, sample).

        Raises `DataError` if too many have been left out.
        """
        for (rank, epoch, reason), group in groupby(found, _by_reason):
            samples = tuple(bad.place.sample for _, bad in group)
            self._miss(step, rank, epoch, samples, len(samples), reason)

    def pass_over(self, step: int, epoch: int, num_samples: int, reason: str) -> None:
        """`step` is skipped entirely, with its remaining `num_samples` samples.

        Raises `DataError` or `LossError` if too much has been left out.
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
        """Record that the step was not skipped."""
        self._in_a_row = 0

    def done(self, num_samples: int, epoch: int, epoch_end: bool) -> None:
        """A step that took `num_samples` samples from the order, in `epoch`, has ended.

        Raises `DataError` if more than half of the epoch has been left out.
        """
        self._taken += num_samples
        if epoch_end:
            self._check(epoch, self._taken)
            self._taken = self._missing = 0

    def leave_out_of_evaluation(self, step: int, found: Sequence[tuple[int, Bad]]) -> None:
        """Evaluations from `step` on run without these samples, given as (rank that found it, sample).

        Raises `DataError` if too many have been left out.
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
        """Count samples of the order as missing. Raises `DataError` if too many are missing."""
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
