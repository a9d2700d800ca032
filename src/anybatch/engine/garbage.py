"""Python's collector of garbage while a run goes on.

Recovery from a failed step has to collect what the failure left in circles, and a full collection looks
at every object of the process: with torch loaded some 0.1 s, longer than many a step. So what is there
when training begins is set aside, and collections look at what has come since.
"""

from __future__ import annotations

import gc
import threading

_lock = threading.RLock()  # a collection may end another run, in this thread
_holders: set[int] = set()
_is_ours = False


class SetAside:
    """From its making to `end`, what was there before is not looked at. Nothing happens where the
    program has set objects aside itself. Runs may overlap: the last one to end takes back what the
    first set aside."""

    def __init__(self) -> None:
        global _is_ours
        with _lock:
            if not _holders and not gc.get_freeze_count():
                gc.freeze()
                _is_ours = True
            _holders.add(id(self))

    def end(self) -> None:
        """Look at everything again. May be called more than once."""
        global _is_ours
        with _lock:
            _holders.discard(id(self))
            if not _holders and _is_ours:
                gc.unfreeze()
                _is_ours = False
