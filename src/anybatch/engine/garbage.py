"""Garbage: speeds up Python's garbage collection during a run.

Recovery from a failed step must collect the reference cycles that the failure left, and a full
collection visits every object of the process: with torch loaded about 0.1 s, longer than many steps. So
the objects that exist when training begins are frozen, and collections visit only newer ones.
"""

from __future__ import annotations

import gc
import threading

_lock = threading.RLock()  # a collection may end another run in this thread
_holders: set[int] = set()
_is_ours = False


class SetAside:
    """Excludes the objects that exist at construction from garbage collection until `end`. Does nothing
    if the program has frozen objects itself. Runs may overlap: the objects frozen by the first run are
    released when the last run ends."""

    def __init__(self) -> None:
        global _is_ours
        with _lock:
            if not _holders and not gc.get_freeze_count():
                gc.freeze()
                _is_ours = True
            _holders.add(id(self))

    def end(self) -> None:
        """Include all objects again. Can be called more than once."""
        global _is_ours
        with _lock:
            _holders.discard(id(self))
            if not _holders and _is_ours:
                gc.unfreeze()
                _is_ours = False
