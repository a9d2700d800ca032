"""Waiting: a step of a script's own loop that waits for other ranks for long is told to people.

Whether the others hang, or their loops have ended, is not known here: what they do between two steps is
the script's own. So nothing is ended; torch's deadline does that, half an hour later with gloo.

    rank 0   step  step  step 7 ............................... says that it waits in step 7
    rank 1   step  step  (a loop with a batch less) `barrier` ..
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from anybatch.engine.stacks import waits_for_others
from anybatch.engine.stall import LEAST_SECONDS

_TICK_SECONDS = 5.0
_CLOSE_SECONDS = 2.0


@final
class Waiting:
    """Tells, once per step, that it waits for other ranks.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = ""
        self._clock = clock
        self._limit = LEAST_SECONDS
        self._step: int | None = None  # the one that is under way
        self._thread = 0
        self._seen: int | None = None  # at the last look
        self._told: int | None = None
        self._seconds = 0.0
        self._looked = clock()
        self._closing = threading.Event()

    @contextmanager
    def among(self, rank: int, size: int) -> Iterator[None]:
        """Within the block the steps of `rank` of `size` ranks are watched, by another thread; those of
        one alone are not."""
        if size == 1:
            yield
            return
        self._name = f"rank {rank} of {size}"
        closing = self._closing = threading.Event()
        watch = threading.Thread(target=self._run, name="anybatch-waiting", daemon=True)
        watch.start()
        try:
            yield
        finally:
            closing.set()
            watch.join(_CLOSE_SECONDS)

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Around `step`."""
        self._step = step
        self.here()
        try:
            yield
        finally:
            self._step = None

    def here(self) -> None:
        """The step that is under way is computed in this thread."""
        self._thread = threading.get_ident()

    def look(self) -> None:
        """See how long the step has waited by now, and tell."""
        now = self._clock()
        # Time in which this thread did not run either (a stopped process) is nobody's fault.
        elapsed, self._looked = min(now - self._looked, 2 * _TICK_SECONDS), now
        step, before, self._seen = self._step, self._seen, self._step
        if step is None or step != before or not waits_for_others((self._thread,)):
            self._seconds = 0.0
            return
        self._seconds += elapsed
        if self._seconds < self._limit or self._told == step:
            return
        self._told = step
        self._limit *= 2  # where it goes on, such waits belong to the script
        sys.stderr.write(
            f"anybatch: {self._name} has waited for {self._seconds:.0f} s in step {step} for another"
            " rank, which hangs, is busy with something else, or has ended its loop: every rank calls"
            " Step equally often, with None where it has no samples left.\n"
        )
        sys.stderr.flush()

    def _run(self) -> None:
        closing = self._closing
        while not closing.wait(_TICK_SECONDS):
            self.look()
