"""CheckpointManager: one rank's part in saving what outlives a step, and in going on from it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anybatch.engine import Meter, Skips, uncounted
from anybatch.errors import InputError
from anybatch.events import CheckpointFailed, CheckpointSaved, Resumed, Sink
from anybatch.parallel import Group
from anybatch.parallel.failures import together
from anybatch.rank.record import Position
from anybatch.state import Checkpoints, Failed, TrainingState


class CheckpointManager:
    """What is saved of a rank and read back. All ranks do the same at the same time.

    Args:
        checkpoints: where to; closed with this.
        state: of the training.
        position: saved with it, and set by `resume`.
        skips: of bad data, if there are any; likewise.
        group: the ranks.
        meter: of the memory in use, which does not count the buffers of writing and reading.
        stages: whether there is memory for a copy, so that training goes on while it is written.
        sink: is told what comes of it.

    Attributes:
        has_failed: whether the last checkpoint that came to its end could not be written. Set on rank 0
            only.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        state: TrainingState,
        position: Position,
        skips: Skips | None,
        group: Group,
        meter: Meter,
        stages: bool,
        sink: Sink,
    ) -> None:
        self._checkpoints = checkpoints
        self._state = state
        self._position = position
        self._skips = skips
        self._group = group
        self._meter = meter
        self._stages = stages
        self._sink = sink
        self.has_failed: bool = False

    def save(self, facts: dict[str, Any], score: float | None, at_once: bool) -> None:
        """Begin to save, with further `facts`; `score` is the lower the better. What comes of it is
        told by `tell`, but for a state that cannot be saved, which is told now."""
        at = self._position
        try:
            content = self._state.content(
                {
                    "step": at.step,
                    "samples_seen": at.samples_seen,
                    "epoch": at.epoch,
                    "num_skipped": self._skips.num_samples if self._skips else 0,
                    **facts,
                }
            )
        except InputError as error:  # alike on all ranks
            self._tell_failure(at.step, str(error))
            return
        with self._uncounted():
            self._checkpoints.save(
                content, at.step, score=score, stage=self._stages and not at_once
            )

    def tell(self, wait: bool) -> None:
        """Tell what has become of the checkpoints since the last call; `wait` for those under way."""
        if wait:
            self._checkpoints.wait()
        for outcome in self._checkpoints.finished():
            if isinstance(outcome, Failed):
                self._tell_failure(outcome.step, outcome.reason)
                continue
            self.has_failed = False
            self._sink(
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
        self._sink(CheckpointFailed(time=time.time(), step=step, reason=reason))

    def resume(self) -> Resumed | None:
        """See `Session.resume`."""
        with self._uncounted():
            found = self._checkpoints.newest()
        if found is None:
            return None
        # What the optimizer remembers stays, and counts.
        tensors = together(self._group, lambda: self._state.destinations(found))
        with self._uncounted():
            self._checkpoints.load(found, tensors)
        facts, at = self._state.restored(found), self._position
        at.step, at.samples_seen, at.epoch = facts.step, facts.samples_seen, facts.epoch
        if self._skips is not None:
            self._skips.num_samples = facts.num_skipped
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
            found = self._checkpoints.newest(step, only="weights/", touches=False)
        if found is None:
            raise InputError(
                "the run has no checkpoint: there are no weights to take before it has saved one, or"
                " has ended."
            )
        tensors = together(self._group, lambda: self._state.weights_in(found))
        with self._uncounted():
            self._checkpoints.load(found, tensors)
        facts, at = self._state.filled(found), self._position
        self._group.restored()
        at.step, at.epoch = facts.step, facts.epoch
        return found.folder

    def close(self) -> None:
        """What is under way is finished or given up."""
        self._checkpoints.close()

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        with uncounted(), self._meter.aside():
            yield
