"""Error classes. Each message is one sentence: what happened, the values involved, and what to do.

A command exits with the `exit_status` of the error that stopped it; the Python interface raises the
same class. Where a built-in exception fits, the class derives from it too, so that `except ValueError`
works for code that does not know anybatch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

_MOST_IN_LINE = 2000
"""Maximum characters per line of a message. A longer line contains a long input value, which would hide
the rest of the message."""


_is_command_line = False


@contextmanager
def worded_for_command_line() -> Iterator[None]:
    """Context manager in which messages name settings as options of the command line."""
    global _is_command_line
    before, _is_command_line = _is_command_line, True
    try:
        yield
    finally:
        _is_command_line = before


def worded(python: str, option: str) -> str:
    """Whichever of the two names a setting in the interface in use: Python, or the command line."""
    return option if _is_command_line else python


def setting(name: str) -> str:
    """The name of a setting for a message: `micro_batch` in Python, `--micro-batch` on the command
    line. Text that is no name is returned as it is."""
    return worded(name, f"--{name.replace('_', '-')}") if name.isidentifier() else name


def as_setting(name: str, value: str | int | None = None) -> str:
    """A setting for a message: `memory="1GiB"` in Python, `--memory 1GiB` on the command line. Without
    a value: `memory=` and `--memory`; with True: `resume=True` and `--resume`."""
    option = f"--{name.replace('_', '-')}"
    if value is None or value is True:
        return worded(f"{name}={value or ''}", option)
    written = f'"{value}"' if isinstance(value, str) else value
    return worded(f"{name}={written}", f"{option} {value}")


def skipping() -> str:
    """The setting of a task that leaves out bad samples, for a message. Recipes and functions that make
    a task may have it as an option."""
    option = "bad_data='skip' in the task (-s bad_data=skip where it is an option)"
    return worded("bad_data='skip'", option)


def shortened(text: str, most: int = 200) -> str:
    """`text` with its middle removed if it has more than `most` characters."""
    if len(text) <= most:
        return text
    left_out = f" ... ({len(text) - most:,} characters left out) ... "
    return text[: most // 2] + left_out + text[len(text) - most // 2 :]


class AnybatchError(Exception):
    """Base class of all errors raised deliberately. `str(error)` is a message for the user.

    `mended_by_restart`: whether restarting the ranks may help.
    """

    exit_status = 1
    mended_by_restart: bool = False

    def __str__(self) -> str:
        return "\n".join(shortened(line, _MOST_IN_LINE) for line in super().__str__().split("\n"))


class InputError(AnybatchError, ValueError):
    """User input (an option, a file, a task or a plan) cannot be used."""

    exit_status = 2


class DataError(InputError):
    """A sample, or a batch of samples, cannot be used. The message names the sample.

    Attributes:
        row: row of the micro-batch in which the sample was found, if nothing else is known about it.
    """

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row: int | None = row


class LossError(InputError):
    """The loss function returned something that is not a loss, or a loss that is not finite."""


class NoPlanFits(AnybatchError):
    """Even the leanest plan exceeds the memory budget, or there is not enough memory for torch itself.

    `least_bytes` is the smallest budget, in bytes, under which a plan is predicted to fit, or None if
    unknown.
    """

    exit_status = 3

    def __init__(self, message: str, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class Stopped(AnybatchError):
    """The run stopped on request, after a complete step, with everything saved so that it can be
    resumed."""

    exit_status = 75


class StopTraining(Exception):
    """Raised by a sink (`train`, `Session`) to end training with the current step, as if it were the
    last; the model is then evaluated and saved."""


class PeerFailed(AnybatchError):
    """Another rank raised an error; all ranks stopped at the same point.

    `exit_status` is that of the other rank's error.
    """

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class PeerLost(AnybatchError):
    """Another rank does not respond: its process has ended or hangs. `backend` is the error text of the
    communication library, which is not a message for the user."""

    mended_by_restart = True

    def __init__(self, message: str, backend: str = "") -> None:
        super().__init__(message)
        self.backend: str = backend


class RankLost(PeerLost):
    """This rank cannot continue: it ran out of memory during an update or during communication, or
    oneDNN was refused memory for a kernel."""


class Stuck(AnybatchError):
    """A rank makes no progress because the code it runs hangs. The message contains its stack."""

    mended_by_restart = True


class LaunchError(AnybatchError, RuntimeError):
    """The ranks of a run could not connect, or one of them ended without reporting an error. The
    message names the address and the seconds waited, or the rank and how it ended."""

    exit_status = 1


def kind_of(value: object) -> str:
    """`value` described by its type, for a sentence about what is wrong with it."""
    return f"a value of type {type(value).__name__}"


def name_of(error: BaseException) -> str:
    """Class name of `error`. For a subclass of `AnybatchError` defined outside this module, the name of
    its public base class."""
    return next(kind for kind in type(error).__mro__ if not _is_private(kind)).__qualname__


def _is_private(kind: type) -> bool:
    return issubclass(kind, AnybatchError) and kind.__module__ != __name__


def listed(names: Iterable[object], meant: str = "") -> str:
    """`names`, quoted, for the end of a sentence: `'a', 'b' or 'c'`. Numbers in names are sorted by
    value (`block.9` before `block.10`), but the closest match to `meant` comes first."""
    order = sorted(map(str, names), key=_as_counted)
    close = difflib.get_close_matches(meant, order, n=1) if meant else []
    quoted = [repr(name) for name in (*close, *(name for name in order if name not in close))]
    if len(quoted) < 2:
        return "".join(quoted) or "nothing"
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def some(names: Sequence[object], most: int = 3) -> str:
    """The first `most` names, quoted, and the number of remaining ones: `'a', 'b', 'c' and 4 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def _as_counted(name: str) -> list[tuple[str, int]]:
    """Sort key that compares numbers in names by value."""
    return [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name)]
