"""DataWait: whether steps wait for their samples; reported once, with what would help."""

from __future__ import annotations

import math
import time

from anybatch.events import Sink, Starved
from anybatch.process.threads import num_cores

_STEPS = 5
"""That are looked at before anything is said; the first of a run starts workers, and is passed over."""

_SECONDS = 1.0
"""Below so much waiting in all nobody would notice."""

_PART = 0.2
"""Of the time of the steps."""


class DataWait:
    """The waiting of one rank.

    Args:
        num_workers: that load its samples; 0: the rank itself does.
        can_help: whether workers would load them.
        sink: is told.
    """

    def __init__(self, num_workers: int, can_help: bool, sink: Sink) -> None:
        self._num_workers = num_workers
        self._can_help = can_help
        self._sink = sink
        self._num_steps = 0
        self._seconds = self._waited = 0.0
        self._is_told = False

    def observe(self, step: int, seconds: float, waited: float) -> None:
        """A step took so long, of which it `waited`."""
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
        """Workers that would load as fast as samples are learned from, as far as there are cores for
        them; None: more than there are would not help."""
        if not self._can_help:
            return None
        computing = max(1e-9, self._seconds - self._waited)
        # Workers that are there have worked all the time, the rank itself only while it waited.
        busy = self._num_workers * self._seconds or self._waited
        wanted = min(math.ceil(busy / computing), num_cores())
        return wanted if wanted > self._num_workers else None
