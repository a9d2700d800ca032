"""Libraries, and Python's collector of garbage: what they make when they are imported is none.

torch, with what it brings, makes half a million objects. The collector looks at all of them again and
again while they are made, and three times more as the interpreter ends. So it waits while libraries are
imported. A process of anybatch's own, a command or a rank, does not look at them afterwards, and ends a
second earlier. What the user's code makes comes later: it is collected and finalized as ever.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from anybatch.process import early_stop_signal
from anybatch.process.import_memory import check_addresses, explained

_sets_aside = False


def stay() -> None:
    """This process was started to run anybatch: what is loaded first stays to its end."""
    global _sets_aside
    _sets_aside = True


@contextmanager
def loading() -> Iterator[None]:
    """Inside, libraries are imported, and nothing else is done in this thread. The first time that a
    process of anybatch's own does it, a signal ends it at once.

    Raises `NoPlanFits` if there is no memory for them.
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
            _sets_aside = False  # what comes later may be the user's
        gc.enable()
