"""SharedLimit: one limit of the process or of a device that several hold at once, as two `Step`s do.

There is one value, and whoever sets it and puts back what was there before would undo the others. So
all of them set it here: the least holds, whichever is given up first, and after the last one what was
there before the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

Holder = TypeVar("Holder")


class SharedLimit(Generic[Holder]):
    """See the module.

    Args:
        read: the value as it is.
        write: sets it.
    """

    def __init__(self, read: Callable[[], float], write: Callable[[float], None]) -> None:
        self._read = read
        self._write = write
        # A holder that was dropped without giving up holds nothing any more.
        self._held: WeakKeyDictionary[Holder, float] = WeakKeyDictionary()
        self._instead: list[tuple[object, float]] = []
        self._before: float | None = None
        self._lock = threading.RLock()

    @property
    def holders(self) -> list[Holder]:
        """Those that hold it now."""
        return list(self._held)

    @property
    def before(self) -> float | None:
        """What was there before anyone held it; None where nobody does."""
        return self._before

    def hold(self, holder: Holder, value: float) -> None:
        """Let `holder` have `value`, from now on or in place of what it has."""
        with self._lock:
            if self._before is None:
                self._before = self._read()
            self._held[holder] = value
            self._apply()

    def give_up(self, holder: Holder) -> None:
        """Let `holder` have none, if it has one."""
        with self._lock:
            if self._held.pop(holder, None) is not None:
                self._apply()

    @contextmanager
    def instead(self, value: float) -> Iterator[None]:
        """Inside it is `value`, whatever anyone holds; the innermost counts. To be entered while
        someone holds it."""
        mine = object(), value
        with self._lock:
            self._instead.append(mine)
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                self._instead.remove(mine)
                self._apply()

    def _apply(self) -> None:
        held = list(self._held.values())
        if self._before is None:
            return
        if not held:
            self._write(self._before)
            self._before = None
        elif self._instead:
            self._write(self._instead[-1][1])
        else:
            self._write(min(held))
