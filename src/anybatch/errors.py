"""Every failure that a user can meet, as one sentence: what happened, the values, what to do.

A command ends with the `exit_status` of the error that stopped it; the Python interface raises the
same class. Each class also derives from the built-in exception a caller would expect, so that
`except ValueError` works for code that does not know anybatch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_MOST_IN_LINE = 2000
"""Characters of a line of a message: more are a value that was given, and hide what is said of it."""


def shortened(text: str, most: int = 200) -> str:
    """`text`, without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    left_out = f" ... ({len(text) - most:,} characters left out) ... "
    return text[: most // 2] + left_out + text[len(text) - most // 2 :]


class AnybatchError(Exception):
    """Base of every error raised on purpose. `str(error)` is meant for people.

    `mended_by_restart`: whether ranks that are started again may do better.
    """

    exit_status = 1
    mended_by_restart: bool = False

    def __str__(self) -> str:
        return "\n".join(shortened(line, _MOST_IN_LINE) for line in super().__str__().split("\n"))


class InputError(AnybatchError, ValueError):
    """Something the user wrote (an option, a file, a task, a plan) cannot be used as it stands."""

    exit_status = 2


class DataError(InputError):
    """A sample, or a batch made of samples, cannot be used. The message names the sample.

    Attributes:
        row: of the micro-batch in which it was found, where that is all that is known of the sample.
    """

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row: int | None = row


class LossError(InputError):
    """The loss function returned something that is not a loss, or a loss that is not finite."""


class NoPlanFits(AnybatchError):
    """Not even the leanest plan fits the memory budget, or there is no memory for torch itself.

    `least_bytes` is the least budget, in bytes, under which some plan is predicted to fit, or None
    where it is not known.
    """

    exit_status = 3

    def __init__(self, message: str, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class Stopped(AnybatchError):
    """The run was asked to stop, and has: after a whole step, with everything saved, to be resumed."""

    exit_status = 75


class StopTraining(Exception):
    """Raised by a sink (`train`, `Session`): training ends with the step that is under way, as if it
    were the last, and the model is evaluated and saved."""


class PeerFailed(AnybatchError):
    """Another rank raised an error of its own; all ranks stopped at the same place.

    `exit_status` is that of the other's error.
    """

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class PeerLost(AnybatchError):
    """Another rank does not answer: its process has ended, or hangs. `backend` is what the network's
    library said of it, which is no sentence for people."""

    mended_by_restart = True

    def __init__(self, message: str, backend: str = "") -> None:
        super().__init__(message)
        self.backend: str = backend


class RankLost(PeerLost):
    """This rank itself has no place among the others any more: memory ran out in the middle of an
    update, or while ranks spoke to each other."""


class Stuck(AnybatchError):
    """A rank makes no progress: what it runs hangs. The message has its stack."""

    mended_by_restart = True


class LaunchError(AnybatchError, RuntimeError):
    """The ranks of a run could not be brought together, or one of them ended without a word. The
    message names the address and the seconds waited, or the rank and how it ended."""

    exit_status = 1


def name_of(error: BaseException) -> str:
    """The name of its class: of one of ours that nobody can import, of the one that it stands for."""
    return next(kind for kind in type(error).__mro__ if not _is_private(kind)).__qualname__


def _is_private(kind: type) -> bool:
    return issubclass(kind, AnybatchError) and kind.__module__ != __name__


def listed(names: Iterable[object], meant: str = "") -> str:
    """The names, quoted, for the end of a sentence: `'a', 'b' or 'c'`. In the order in which people
    count (`block.9` before `block.10`), but first the one that is close to what was `meant`."""
    order = sorted(map(str, names), key=_as_counted)
    close = difflib.get_close_matches(meant, order, n=1) if meant else []
    quoted = [repr(name) for name in (*close, *(name for name in order if name not in close))]
    if len(quoted) < 2:
        return "".join(quoted) or "nothing"
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names, quoted, and how many more there are: `'a', 'b', 'c' and 4 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def _as_counted(name: str) -> list[tuple[str, int]]:
    """Sorts by the numbers in names as numbers."""
    return [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name)]
