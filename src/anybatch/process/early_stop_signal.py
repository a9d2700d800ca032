"""A run that is told to end before its first step: nothing is lost, so its status says: start me again.

A job may be preempted at any moment, also while torch is being imported or the plan is made. From its
first step on the run answers signals itself, see `anybatch.runs.saving`.
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
"""Environment variable of ranks that this package has started. What ends them, their agent tells."""

STOPPED_BY_HAND = 130
"""128 + SIGINT, as shells report it."""

STOPPED = "stopped by hand; nothing of the unfinished step was kept."

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)
"""What asks a run to end, beside Ctrl-C, which may be pressed again."""

BEFORE_THE_FIRST_STEP = (
    "the run was asked to stop before its first step: start it again with --resume."
)


class StoppedEarly(BaseException):
    """As `Stopped`, but passed on by what catches whatever a user's model raises, as planning does."""


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Within the block, in which libraries are imported and nothing is to be undone, Ctrl-C ends the
    process, as do the other signals after `end_with_status_75`. An exception would be lost there: torch
    is imported from C++, which clears it. Only in the main thread, and where nothing else answers."""
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
    """From now on signals to end raise `StoppedEarly` where nothing else handles them."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _stop)


def over() -> None:
    """The run answers signals itself, and after it the process does what it would without."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is _stop:
                signal.signal(number, signal.SIG_DFL)


def is_unanswered(number: int) -> bool:
    """Whether the program has no handler of its own for the signal."""
    return signal.getsignal(number) in (signal.SIG_DFL, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    over()
    raise StoppedEarly
