"""Where steps are computed, and how that place is cleaned after a failure.

A step that fails leaves two things behind in the thread that computed it:

1. Autograd's queue. On CPU the engine keeps the tasks of a backward pass in a queue of the thread.
   Those that were waiting when the pass failed stay there, with the graph behind them and its
   activations, until the next backward pass of the thread: too late, since the step that is redone
   needs the memory in forward. So a pass over nothing is made at once. Its graph is older than that
   of any step: tasks of newer ones go first.
2. The mark of oneDNN (see `anybatch.oom`): new kernels fail in this thread from then on. A thread that
   was never marked computes on.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from anybatch.engine.limit import Limit
from anybatch.oom import MemoryFailure
from anybatch.threads import begin

T = TypeVar("T")

_TRIES = 20
_PAUSE_SECONDS = 0.5


class Bench:
    """Runs work in this thread, or after `renew` in a thread that was never marked."""

    def __init__(self) -> None:
        self._helper: _Helper | None = None
        self._home = threading.get_ident()
        with torch.enable_grad():
            self._leaf = torch.zeros((), requires_grad=True)
            self._oldest = self._leaf * 1.0  # older than any graph of a step

    @property
    def moved(self) -> bool:
        """Whether work runs in another thread than the caller's."""
        return self._helper is not None

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work()`, or the error that it raised."""
        return work() if self._helper is None else self._helper.run(work)

    def clear(self) -> None:
        """Drop what a failed backward pass left in the queue of this thread."""
        if threading.get_ident() == self._home:
            torch.autograd.grad(self._oldest, self._leaf, retain_graph=True)

    def recover(self, failure: MemoryFailure, limit: Limit) -> None:
        """Give back what the failed work held, and move to a fresh thread if this one was marked, or
        is itself one that was moved to (nothing else empties its queue)."""
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if failure.marks_thread or self.moved:
            with limit.lifted():
                self.renew()

    def renew(self) -> None:
        """Compute in a fresh thread from now on. The one before it takes its queue along."""
        self.close()
        self._helper = _Helper()
        # Large enough a sum to start the pool of threads that belongs to this one.
        self._helper.run(lambda: torch.ones(1 << 18).sum())

    def close(self) -> None:
        """End the thread, if there is one, when its work is done."""
        if self._helper is not None:
            self._helper.close()
            self._helper = None


class _Helper:
    """A thread that works for the one that made it. Raises `MemoryError` if there is no room for it for
    a while."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        for _ in range(_TRIES):
            self._ended = begin(self._serve)
            if self._ended is not None:
                return
            time.sleep(_PAUSE_SECONDS)
        raise MemoryError("no room for another thread")

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work()`, or the error that it raised."""
        future: Future[T] = Future()
        self._tasks.put((future, work))
        try:
            return future.result()
        finally:
            del future  # it holds the error, and that this frame

    def close(self) -> None:
        """End the thread when its work is done."""
        self._tasks.put(None)
        if self._ended is not None:
            self._ended.wait()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work = task
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del task, future, work  # nothing of a step stays here while the next one is waited for
