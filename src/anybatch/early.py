"""A run that is told to end before its first step: nothing is lost, so its status says: start me again.

A job may be preempted at any moment, also while torch is being imported or the plan is made. From its
first step on the run answers signals itself, see `anybatch.keeping`.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from anybatch.errors import Stopped


def end_with_status_75() -> None:
    """From now on SIGTERM raises `Stopped` where nothing else handles it."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _stop)


def over() -> None:
    """The run answers signals itself, and after it the process does what it would without."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is _stop
    ):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Stopped("the run was asked to stop before its first step: start it again with --resume.")
