"""Where a rank stands between two global steps."""

from __future__ import annotations

from dataclasses import dataclass

from anybatch.data import StepData


@dataclass(slots=True)
class Position:
    """How far training has come, the same on all ranks.

    Attributes:
        step: global steps that are committed, those before a resumption included; so the number of the
            last one, and the index of the one that comes next.
        samples_seen: in them, those left out included.
        epoch: that the next sample is of.
    """

    step: int = 0
    samples_seen: int = 0
    epoch: int = 0

    def advance(self, data: StepData) -> None:
        """The step of `data` is done."""
        self.step += 1
        self.samples_seen += data.num_samples
        self.epoch = data.next_epoch
