"""DataWait: detects steps that wait for their samples, and reports it once, with a remedy."""

from __future__ import annotations

import math
import time

from anybatch.events import Sink, Starved
from anybatch.process.threads import num_cores

_STEPS = 5
"""Number of steps observed before a report; the first step of a run starts workers, and is ignored."""

_SECONDS = 1.0
"""Minimum total waiting time for a report; less would not be noticed."""

_PART = 0.2
"""Minimum waiting time for a report, as a fraction of the time of the steps."""


class DataWait:
    """Measures how long one rank waits for samples.

    Args:
        num_workers: number of workers that load its samples; 0: the rank loads them itself.
        can_help: whether workers could load them.
        sink: receives the event.
    """

    def __init__(self, num_workers: int, can_help: bool, sink: Sink) -> None:
        self._num_workers = num_workers
        self._can_help = can_help
        self._sink = sink
        self._num_steps = 0
        self._seconds = self._waited = 0.0
        self._is_told = False

    def observe(self, step: int, seconds: float, waited: float) -> None:
        """Record a step that took `seconds`, of which it `waited` for samples."""
        self._num_steps += 1
        if self._is_told or self._num_steps == 1:
            return
        self._seconds += seconds
        self._waited += waited
        if self._num_steps <= _STEPS or self._waited < max(_SECONDS, _PART * self._seconds):
            return
        self._is_told = True
        count = self._num_steps - 1
        self._sink(
            Starved(
                time=time.time(),
                step=step,
                step_seconds=self._seconds / count,
                data_seconds=self._waited / count,
                num_workers=self._num_workers,
                wanted_workers=self._wanted(),
            )
        )

    def _wanted(self) -> int | None:
        """The number of workers that would load samples as fast as training uses them, limited by the
        number of cores; None if more workers would not help."""
        if not self._can_help:
            return None
        computing = max(1e-9, self._seconds - self._waited)
        # Existing workers have been busy all the time, the rank itself only while it waited.
        busy = self._num_workers * self._seconds or self._waited
        wanted = min(math.ceil(busy / computing), num_cores())
        return wanted if wanted > self._num_workers else None
