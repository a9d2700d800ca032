"""Step thread: where steps are computed, how it is cleaned up after a failure, how interrupts reach it.

A step that fails leaves two things behind in the thread that computed it:

1. Autograd's queue. On CPU the engine keeps the tasks of a backward pass in a per-thread queue. Tasks
   that were pending when the pass failed stay there, and keep their graph and its activations alive,
   until the next backward pass of the thread. That is too late, since the redone step needs the memory
   in forward. So an empty backward pass is run at once. Its graph is older than that of any step, and
   tasks of newer graphs run first.
2. oneDNN's error mark (see `anybatch.oom`): new kernels fail in this thread from then on. A thread that
   was never marked is not affected.

Ctrl-C is delivered only to the main thread. If steps are computed there, the passes end at once, and
from the vote on the interrupt is delayed until the step is done. If the main thread waits for another
thread:

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
    """Runs work in the current thread, or after `renew` in a thread that was never marked."""

    def __init__(self) -> None:
        self._helper: _Helper | None = None
        self._home = threading.get_ident()
        with torch.enable_grad():
            self._leaf = torch.zeros((), requires_grad=True)
            self._oldest = self._leaf * 1.0  # older than any graph of a step

    @property
    def moved(self) -> bool:
        """Whether work runs in a thread other than the caller's."""
        return self._helper is not None

    def run(self, work: Callable[[], T]) -> T:
        """Returns the result of `work()`, or raises its error."""
        return work() if self._helper is None else self._helper.run(work)

    def look(self) -> None:
        """Called between two passes of the work. Raises `KeyboardInterrupt` if an interrupt has reached
        the thread that waits for it."""
        if self._helper is not None:
            self._helper.look()

    def sure(self) -> AbstractContextManager[None]:
        """Context manager for the rest of the work, which must be completed: an interrupt is delayed
        until its end. Raises `KeyboardInterrupt`, as `look` does, if one has arrived before."""
        if self._helper is None:
            return held()
        self._helper.be_sure()
        return nullcontext()

    def clear(self) -> None:
        """Discard what a failed backward pass left in the queue of this thread."""
        if threading.get_ident() == self._home:
            torch.autograd.grad(self._oldest, self._leaf, retain_graph=True)

    def recover(self, failure: MemoryFailure) -> None:
        """Free the memory of the failed work, and move to a new thread if the current one was marked or
        is itself a replacement (nothing else empties its queue).

        Memory that the heap keeps free is returned, since it would count against the leaner plan."""
        gc.collect()
        trim()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if failure.marks_thread or self.moved:
            self.renew()

    def renew(self) -> None:
        """Compute in a new thread from now on. The queue of the previous one ends with it."""
        self.close()
        self._helper = _Helper()
        # A sum large enough to start the thread pool of this thread.
        self._helper.run(lambda: torch.ones(1 << 18).sum())

    def close(self) -> None:
        """End the replacement thread, if there is one, when its work is done."""
        if self._helper is not None:
            self._helper.close()
            self._helper = None


@final
class _Task:
    """Work for a helper, and its result.

    Attributes:
        decided: lock acquired by whichever decides first whether the work is completed: the helper,
            when the work must be completed, or an interrupt, which cancels it.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work: Callable[[], Any] = work
        self.future: Future[Any] = Future()
        self.decided: threading.Lock = threading.Lock()

    def interrupted(self) -> None:
        """Wait for the end of the work, if it has begun. A second interrupt ends this wait if the first
        one canceled the work, which may not check for interrupts again."""
        if self.future.cancel() or self.decided.acquire(blocking=False):
            wait([self.future])
        else:
            with held():
                wait([self.future])


@final
class _Helper:
    """A thread that works for its creator. Raises `MemoryError` if none can be started for a while."""

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
        """Returns the result of `work()`, or raises its error. If this thread is interrupted, waits for
        the work to end before the interrupt is raised."""
        task = _Task(work)
        try:
            self._tasks.put(task)
            result: T = task.future.result()
            return result
        except BaseException:
            task.interrupted()  # unless the work has ended with this error
            raise
        finally:
            del task  # it references the error, which references this frame

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
            del task  # keep nothing of a step alive while waiting for the next one
