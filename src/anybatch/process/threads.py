"""Starting threads when memory is short, and the number of threads that can run at once.

`threading.Thread.start` waits until the new thread signals that it runs. A thread that is refused
memory before that ends silently, and `start` waits for it forever.
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from anybatch.process.control_group import cores_of_group

MOST_IDLE = 0.05
"""Maximum fraction of time for which a thread that is alone on its core is idle: above it, other
threads compete for the core."""

_SECONDS = 10.0
"""How long to wait for a thread to begin."""


def begin(work: Callable[[], None]) -> threading.Event | None:
    """Run `work`, which must not raise, in a new thread, which ends with the process.

    Returns an event that is set when `work` has ended; None if no thread could be started: then
    `work` has not run, and will not.
    """
    claim, begun, ended = threading.Lock(), threading.Event(), threading.Event()

    def run() -> None:
        if not claim.acquire(blocking=False):
            return  # too late: `begin` has given up
        try:
            begun.set()
            work()
        finally:
            ended.set()

    try:
        _thread.start_new_thread(run, ())
    except (RuntimeError, MemoryError):
        return None
    if not begun.wait(_SECONDS) and claim.acquire(blocking=False):
        return None
    return ended


@final
class Reminder:
    """Calls a function once if a block takes too long.

    A single thread polls the time, so entering a block is cheap. The function is called by that
    thread, when the block has taken between `seconds` and an eighth more.

    Args:
        seconds: time that a block may take.
        tell: function to call.
    """

    def __init__(self, seconds: float, tell: Callable[[], object]) -> None:
        self._seconds, self._tell = seconds, tell
        self._begun: float | None = None
        self._is_started = False
        self._closing = threading.Event()

    @contextmanager
    def around(self) -> Iterator[None]:
        """Context for the block."""
        if not self._is_started:
            self._is_started = True
            begin(self._look)
        self._begun = time.monotonic()
        try:
            yield
        finally:
            self._begun = None

    def close(self) -> None:
        """End the thread: the function is not called any more."""
        self._closing.set()

    def _look(self) -> None:
        while not self._closing.wait(self._seconds / 8):
            begun = self._begun
            if begun is not None and time.monotonic() - begun > self._seconds:
                self._tell()
                return


def num_cores() -> int:
    """Number of cores that this process may use: those that it may run on, but no more than its
    control group may use at a time."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cores_of_group()
    return own if quota is None else max(1, min(own, int(quota)))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch's intra-op threads within the block, unless `OMP_NUM_THREADS` is set."""
    import torch

    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Stopwatch:
    """Measures how much of the time since its creation the calling thread did not compute: for lack
    of a core, if it had nothing to wait for.

    Args:
        clock: wall-clock time, in seconds.
        busy: time for which the thread has computed, in seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        busy: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock, self._busy = clock, busy
        self._begun = clock(), busy()

    def idle_seconds(self) -> float:
        """Seconds in which the thread did not compute."""
        passed, computed = self._clock() - self._begun[0], self._busy() - self._begun[1]
        return max(0.0, passed - computed)
