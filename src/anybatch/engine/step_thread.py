"""Where steps are computed, how that place is cleaned after a failure, and how an interrupt gets there.

A step that fails leaves two things behind in the thread that computed it:

1. Autograd's queue. On CPU the engine keeps the tasks of a backward pass in a queue of the thread.
   Those that were waiting when the pass failed stay there, with the graph behind them and its
   activations, until the next backward pass of the thread: too late, since the step that is redone
   needs the memory in forward. So a pass over nothing is made at once. Its graph is older than that
   of any step: tasks of newer ones go first.
2. The mark of oneDNN (see `anybatch.oom`): new kernels fail in this thread from then on. A thread that
   was never marked computes on.

Ctrl-C reaches the main thread alone. If that is where a step is computed, the passes end at once, and
from the vote on the interrupt waits until the step is done. If it waits for another thread:

    main thread    waits ............ Ctrl-C, waits ............. raises KeyboardInterrupt
    other thread   pass | pass | pass | gives up                     before it was sure of the step
                   pass | pass | sure | vote | update | done         after
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, TypeVar, final

import torch

from anybatch.oom import MemoryFailure
from anybatch.process.interrupts import held
from anybatch.process.process_memory import trim
from anybatch.process.threads import begin

T = TypeVar("T")

_TRIES = 20
_PAUSE_SECONDS = 0.5


class StepThread:
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

    def look(self) -> None:
        """Between two passes of the work. Raises `KeyboardInterrupt` if an interrupt has come to the
        thread that waits for it."""
        if self._helper is not None:
            self._helper.look()

    def sure(self) -> AbstractContextManager[None]:
        """Around what the work then does whole, to its end: an interrupt waits for it. Raises
        `KeyboardInterrupt`, as `look`, if one has come before."""
        if self._helper is None:
            return held()
        self._helper.be_sure()
        return nullcontext()

    def clear(self) -> None:
        """Drop what a failed backward pass left in the queue of this thread."""
        if threading.get_ident() == self._home:
            torch.autograd.grad(self._oldest, self._leaf, retain_graph=True)

    def recover(self, failure: MemoryFailure) -> None:
        """Give back what the failed work held, and move to a fresh thread if this one was marked, or
        is itself one that was moved to (nothing else empties its queue).

        What the heap keeps free would count for the leaner plan."""
        gc.collect()
        trim()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if failure.marks_thread or self.moved:
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


@final
class _Task:
    """Work for a helper, and its result.

    Attributes:
        decided: taken by the one who decides whether the work is done whole: the helper, when it is
            sure, or before that an interrupt, which gives it up.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work: Callable[[], Any] = work
        self.future: Future[Any] = Future()
        self.decided: threading.Lock = threading.Lock()

    def interrupted(self) -> None:
        """Wait for the end of the work, if it has begun. A second interrupt is not waited with if the
        first has given it up: there may be no next place where it looks."""
        if self.future.cancel() or self.decided.acquire(blocking=False):
            wait([self.future])
        else:
            with held():
                wait([self.future])


@final
class _Helper:
    """A thread that works for the one that made it. Raises `MemoryError` if there is no room for it for
    a while."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._current: _Task | None = None
        for _ in range(_TRIES):
            self._ended = begin(self._serve)
            if self._ended is not None:
                return
            time.sleep(_PAUSE_SECONDS)
        raise MemoryError("no room for another thread")

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work()`, or the error that it raised. After an interrupt of this thread the
        work is over, too, before that is raised."""
        task = _Task(work)
        try:
            self._tasks.put(task)
            result: T = task.future.result()
            return result
        except BaseException:
            task.interrupted()  # or it has ended, with this error
            raise
        finally:
            del task  # it holds the error, and that this frame

    def look(self) -> None:
        if self._current is not None and self._current.decided.locked():
            raise KeyboardInterrupt

    def be_sure(self) -> None:
        if self._current is not None and not self._current.decided.acquire(blocking=False):
            raise KeyboardInterrupt

    def close(self) -> None:
        """End the thread when its work is done."""
        self._tasks.put(None)
        if self._ended is not None:
            self._ended.wait()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            if task.future.set_running_or_notify_cancel():
                self._current = task
                try:
                    result = task.work()
                except BaseException as error:
                    self._current = None
                    task.future.set_exception(error)
                else:
                    self._current = None
                    task.future.set_result(result)
                    del result
            del task  # nothing of a step stays here while the next one is waited for
