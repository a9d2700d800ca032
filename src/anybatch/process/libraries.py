"""Libraries and Python's garbage collector: objects that imports create are not garbage.

torch and its dependencies create half a million objects. The collector would traverse all of them
repeatedly while they are created, and three more times when the interpreter exits. So it is
disabled while libraries are imported. A process that anybatch started, a command or a rank,
excludes these objects from later collections, and exits a second earlier. Objects that the user's
code creates come later: they are collected and finalized as usual.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from anybatch.process import early_stop_signal
from anybatch.process.import_memory import check_addresses, explained

_sets_aside = False


def stay() -> None:
    """Mark this process as started to run anybatch: the libraries that are loaded first are kept
    until it exits."""
    global _sets_aside
    _sets_aside = True


@contextmanager
def loading() -> Iterator[None]:
    """Context for importing libraries; nothing else may be done in this thread. In a process that
    anybatch started, a signal ends the process at once during the first such block.

    Raises `NoPlanFits` if there is not enough memory for them.
    """
    if _sets_aside:
        check_addresses()
    at_once = early_stop_signal.ending_at_once() if _sets_aside else nullcontext()
    with explained(), at_once, _uncollected():
        yield


@contextmanager
def _uncollected() -> Iterator[None]:
    global _sets_aside
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if _sets_aside:
            gc.freeze()
            _sets_aside = False  # later objects may be the user's
        gc.enable()
