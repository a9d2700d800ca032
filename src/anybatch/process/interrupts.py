"""Interrupts: Ctrl-C, held while something is done that has to be done whole.

Python raises `KeyboardInterrupt` in the main thread, between any two instructions. Where that would
leave half of something, the signal waits for the end of it.
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
_then: Handler = None  # the handler that is put back when SIGINT is held no longer


@contextmanager
def held() -> Iterator[None]:
    """Within the block SIGINT waits: what it does, it does at the end, as often as it came. Only in the
    main thread, and where a handler of Python's answers it; elsewhere nothing is changed, as within
    another such block."""
    global _is_held, _then
    if (
        threading.current_thread() is not threading.main_thread()
        or not callable(signal.getsignal(signal.SIGINT))
        or _is_held
    ):
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    try:
        _then = signal.getsignal(signal.SIGINT)
        _is_held = True
        signal.signal(signal.SIGINT, note)
        yield
    finally:
        _is_held = False
        if signal.getsignal(signal.SIGINT) is note:  # else somebody has set another meanwhile
            signal.signal(signal.SIGINT, _then)
        for number in came:
            signal.raise_signal(number)


def handle(number: int, handler: Handler) -> None:
    """Have `handler` answer the signal `number`: SIGINT from when it is held no longer. For handlers
    of other signals, which run also while it is held. None: as the operating system does."""
    global _then
    handler = handler or signal.SIG_DFL
    if number == signal.SIGINT and _is_held:
        _then = handler
    else:
        signal.signal(number, handler)
