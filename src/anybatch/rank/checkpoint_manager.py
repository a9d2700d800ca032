"""CheckpointManager: one rank's part in saving checkpoints of a run, and in resuming from them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from anybatch.engine import Meter, Skips, uncounted
from anybatch.errors import InputError
from anybatch.events import CheckpointFailed, CheckpointSaved, Resumed, Sink
from anybatch.parallel import Group
from anybatch.parallel.failures import together
from anybatch.rank.record import Position
from anybatch.state import Checkpoints, Failed, TrainingState


@final
@dataclass(eq=False, slots=True)
class CheckpointManager:
    """Saves the state of a rank and loads it. All ranks make the same calls at the same time.

    Attributes:
        checkpoints: storage of the checkpoints; closed by `close`.
        state: training state.
        position: training progress, saved with the state and restored with it.
        skips: skipped bad samples, if any; saved with the state and restored by `resume`.
        group: the ranks.
        meter: meter of the memory in use, which does not count the buffers for writing and reading.
        stages: whether there is memory for a copy of the state, so that training continues while the
            copy is written.
        sink: receives the events.
        has_failed: whether the last completed checkpoint could not be written. Valid on rank 0 only.
        lost: sentence about a rank that is lost, if one is.
    """

    checkpoints: Checkpoints
    state: TrainingState
    position: Position
    skips: Skips | None
    group: Group
    meter: Meter
    stages: bool
    sink: Sink
    has_failed: bool = False
    lost: str = ""

    def save(self, facts: dict[str, Any], score: float | None, at_once: bool) -> None:
        """Start to save a checkpoint, with additional `facts`; a lower `score` is better. The outcome
        is reported by `tell`, or immediately if the state cannot be saved."""
        at = self.position
        try:
            content = self.state.content(
                {
                    "step": at.step,
                    "samples_seen": at.samples_seen,
                    "epoch": at.epoch,
                    "num_skipped": self.skips.num_samples if self.skips else 0,
                    **facts,
                }
            )
        except InputError as error:  # the same on all ranks
            self._tell_failure(at.step, str(error))
            return
        with self._uncounted():
            self.checkpoints.save(content, at.step, score=score, stage=self.stages and not at_once)

    def tell(self, wait: bool) -> None:
        """Report the outcomes of checkpoints since the last call. `wait`: wait for pending ones."""
        if wait:
            self.checkpoints.wait()
        for outcome in self.checkpoints.finished():
            if isinstance(outcome, Failed):
                self._tell_failure(outcome.step, outcome.reason)
                continue
            self.has_failed = False
            self.sink(
                CheckpointSaved(
                    time=time.time(),
                    step=outcome.step,
                    folder=str(outcome.folder),
                    num_bytes=outcome.num_bytes,
                    seconds=outcome.seconds,
                    held_seconds=outcome.held_seconds,
                )
            )

    def _tell_failure(self, step: int, reason: str) -> None:
        self.has_failed = True
        self.sink(CheckpointFailed(time=time.time(), step=step, reason=reason))

    def resume(self) -> Resumed | None:
        """See `Session.resume`."""
        with self._uncounted():
            found = self.checkpoints.newest()
        if found is None:
            return None
        # The optimizer state persists, so its memory is counted.
        tensors = together(self.group, lambda: self.state.destinations(found))
        with self._uncounted():
            self.checkpoints.load(found, tensors)
        facts, at = self.state.restored(found), self.position
        at.step, at.samples_seen, at.epoch = facts.step, facts.samples_seen, facts.epoch
        if self.skips is not None:
            self.skips.num_samples = facts.num_skipped
        return Resumed(
            time=time.time(),
            step=facts.step,
            samples_seen=facts.samples_seen,
            folder=str(found.folder),
            passed_over=found.passed_over,
        )

    def take_weights(self, step: int | None) -> Path:
        """See `Session.take_checkpoint`."""
        with self._uncounted():
            found = self.checkpoints.newest(step, reads_only="weights/")
        if found is None:
            raise InputError(
                "the run has no checkpoint: there are no weights to take before it has saved one, or"
                " has ended."
            )
        tensors = together(self.group, lambda: self.state.weights_in(found))
        with self._uncounted():
            self.checkpoints.load(found, tensors)
        facts, at = self.state.filled(found), self.position
        self.group.restored()
        at.step, at.epoch = facts.step, facts.epoch
        return found.folder

    def close(self) -> None:
        """Complete pending checkpoints, unless they need a rank that is `lost`."""
        self.checkpoints.close(self.lost)

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        with uncounted(), self.meter.aside():
            yield
