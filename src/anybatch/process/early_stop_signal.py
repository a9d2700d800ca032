"""Signals that end a run before its first step. Nothing is lost, so the exit status requests a
restart.

A job may be preempted at any time, also while torch is being imported or the plan is made. From its
first step on, the run handles signals itself, see `anybatch.runs.saving`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from anybatch.errors import Stopped

MARK = "ANYBATCH_LAUNCHED"
"""Environment variable that is set in ranks started by this package. Their agent reports what ended
them."""

STOPPED_BY_HAND = 130
"""128 + SIGINT, as shells report it."""

STOPPED = "stopped by hand; what was not saved before is lost."

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)
"""Signals that request the end of a run, other than Ctrl-C, which may be pressed again."""

BEFORE_THE_FIRST_STEP = (
    "the run was asked to stop before its first step: start it again in the same way."
)


class StoppedEarly(BaseException):
    """Like `Stopped`, but not caught by code that catches any exception of a user's model, such as
    planning."""


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Make Ctrl-C end the process immediately within the block, in which libraries are imported and
    nothing has to be undone. The other signals do so after `end_with_status_75`. An exception would
    be lost: torch is imported from C++, which clears it. This has an effect only in the main
    thread, and for signals that have no other handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_SIGNALS)}
    ours = [n for n in before if before[n] in (signal.default_int_handler, _stop)]
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


def _end(number: int, frame: FrameType | None) -> None:
    by_hand = number == signal.SIGINT
    if MARK not in os.environ:
        os.write(2, f"anybatch: {STOPPED if by_hand else BEFORE_THE_FIRST_STEP}\n".encode())
    os._exit(STOPPED_BY_HAND if by_hand else Stopped.exit_status)


def end_with_status_75() -> None:
    """From now on, make termination signals raise `StoppedEarly` if they have no other handler."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _stop)


def over() -> None:
    """Restore the default action of the signals: the run handles them itself, and after it the
    process behaves as usual."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is _stop:
                signal.signal(number, signal.SIG_DFL)


def is_unanswered(number: int) -> bool:
    """Whether the program has not installed a handler for the signal."""
    return signal.getsignal(number) in (signal.SIG_DFL, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    over()
    raise StoppedEarly
