"""When this rank failed first, and of what.

Of several ranks that fail, the first one is the cause and the others feel it: their connections
break. But what reaches the end of the process comes late, since leaving a process group takes time,
and breaks the others' connections in passing. So the moment is noted where the failure first shows.
There the error is at hand, too, which a command turns into a sentence and an exit status before its
process ends: whether a restart mends it is noted with the moment. A `listener` hears of it at once, so
that the cause is known by the time its peers feel it.

The clock is the machine's own and the same for all its processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anybatch.errors import AnybatchError, name_of


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of this rank: `when`, in nanoseconds of the monotonic clock; whether it is
    `mended_by_restart`; and `what` it was, in words, or nothing if it was no error."""

    when: int
    mended_by_restart: bool
    what: str


listener: Callable[[Failure | None], None] | None = None
"""Is given the first failure when it is noted, and None when it is forgotten."""

_first: Failure | None = None


def note(error: BaseException | None = None) -> Failure:
    """The first failure: this one, unless one has been noted before."""
    global _first
    if _first is None:
        mended = error is not None and _is_mended_by_restart(error)
        what = ""
        if error is not None and not isinstance(error, SystemExit):
            what = f"{name_of(error)}: {error}".strip(": ")
        _first = Failure(time.monotonic_ns(), mended, what)
        if listener is not None and error is not None:
            listener(_first)
    return _first


def _is_mended_by_restart(error: BaseException) -> bool:
    """Whether the ranks may do better when they are started again. An error of this package says so;
    of others only a lack of memory is one that may have passed."""
    if isinstance(error, AnybatchError):
        return error.mended_by_restart
    # It imports torch, so it is there only if anything was computed.
    oom: Any = sys.modules.get("anybatch.oom")
    return oom is not None and oom.as_memory_failure(error) is not None


def forget() -> None:
    """What was noted has been dealt with."""
    global _first
    if _first is not None and listener is not None:
        listener(None)
    _first = None
