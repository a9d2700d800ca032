"""Interrupts: deferring Ctrl-C during operations that have to be completed.

Python raises `KeyboardInterrupt` in the main thread between any two instructions. Where that would
leave an operation half done, the signal is deferred until its end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

Handler: TypeAlias = "Callable[[int, FrameType | None], object] | int | None"

_is_held = False
_then: Handler = None  # the handler to restore when SIGINT is no longer deferred


@contextmanager
def held() -> Iterator[None]:
    """Defer SIGINT to the end of the block, where it is raised as often as it was received. This
    has an effect only in the main thread and if a Python handler is installed for SIGINT; a nested
    block has no effect."""
    global _is_held, _then
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if is_main and not _is_held else None
    if not callable(before):
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    try:
        _then = before
        _is_held = True
        signal.signal(signal.SIGINT, note)
        yield
    finally:
        _is_held = False
        if signal.getsignal(signal.SIGINT) is note:  # otherwise another was set meanwhile
            signal.signal(signal.SIGINT, _then)
        for number in came:
            signal.raise_signal(number)


def handle(number: int, handler: Handler) -> None:
    """Install `handler` for the signal `number`; for SIGINT while it is deferred, the handler is
    installed at the end of the deferral. For use in handlers of other signals, which also run while
    SIGINT is deferred. None: the default action of the operating system."""
    global _then
    handler = handler or signal.SIG_DFL
    if number == signal.SIGINT and _is_held:
        _then = handler
    else:
        signal.signal(number, handler)
