"""A run that is told to end before its first step: nothing is lost, so its status says: start me again.

A job may be preempted at any moment, also while torch is being imported or the plan is made. From its
first step on the run answers signals itself, see `anybatch.saving`.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from anybatch.errors import Stopped

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)
"""What asks a run to end, beside Ctrl-C, which may be pressed again."""


def end_with_status_75() -> None:
    """From now on signals to end raise `Stopped` where nothing else handles them."""
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
    raise Stopped("the run was asked to stop before its first step: start it again with --resume.")
