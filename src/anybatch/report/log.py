"""The event log of a run: one JSON object per line, appended as events occur.

Each line is passed to the operating system whole, before the next step begins, so the log survives a
kill of the process. Only the last line can be incomplete after a kill. An incomplete last line is
ignored when the log is read, and removed when a resumed run appends to it, so that it never ends up in
the middle.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from anybatch.errors import InputError, StopTraining
from anybatch.events import Event, Sink, StepDone, from_json, to_json

_LOOK_SECONDS = 0.1

_LONGEST_LINE = 1 << 22
"""Maximum number of bytes read to find the last line; a log may grow to gigabytes."""

_STEP = f'{{"kind": "{StepDone.kind}",'.encode()
"""Prefix of the line of a `StepDone` event."""

_REMOVED = tuple(f'{{"kind": "{kind}",'.encode() for kind in ("tried", "compile_decided"))
"""Prefixes of lines that earlier releases wrote and that are skipped."""


class EventLog:
    """A sink that appends every event to the file `path`.

    Raises `InputError` if the file cannot be opened or written; earlier lines stay intact.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        try:
            _mend(self.path)
            # Unbuffered, so that closing the file does not write part of a failed line again.
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def __call__(self, event: Event) -> None:
        rest = memoryview(to_json(event).encode() + b"\n")
        begin = self._file.seek(0, os.SEEK_END)  # a failed write may have moved the position
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            # Only regular files can be truncated; the error of the write is the one to raise.
            with contextlib.suppress(OSError):
                self._file.truncate(begin)
            raise _unwritable(self.path, error) from None

    def close(self) -> None:
        """Close the file. Closing twice does no harm."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def iterate(path: str | os.PathLike[str], every_step: bool = True) -> Iterator[Event]:
    """Iterate over the events of the log `path`, one at a time, so that the log need not fit in memory.
    Damaged lines are skipped, with a warning at the end; an incomplete last line is not damage. Unless
    `every_step`, only the last of consecutive steps is parsed; a log of a million steps then takes a
    second.

    Raises `InputError` if the log cannot be read.
    """
    num_damaged, first = 0, ""
    try:
        with Path(path).open("rb") as file:
            numbered = enumerate(file, start=1)
            for number, line in numbered if every_step else _last_steps(numbered):
                if line.startswith(_REMOVED):
                    continue
                event = _parsed(line)
                if isinstance(event, Event):
                    yield event
                elif line.endswith(b"\n"):
                    num_damaged += 1
                    first = first or f"line {number} ({event})"
    except OSError as error:
        raise InputError(f"the log {path} cannot be read: {error.strerror}.") from None
    if num_damaged:
        lines = "1 line is" if num_damaged == 1 else f"{num_damaged} lines are"
        warnings.warn(f"{lines} damaged in {path} and left out: {first}.", stacklevel=2)


def _last_steps(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """`lines`, keeping only the last of consecutive complete lines of steps."""
    step: tuple[int, bytes] | None = None
    for number, line in lines:
        if line.startswith(_STEP) and line.endswith(b"}\n"):
            step = number, line
            continue
        if step:
            yield step
            step = None
        yield number, line
    if step:
        yield step


def read(path: str | os.PathLike[str]) -> list[Event]:
    """Read all events of the log `path`, in order. Warns and raises `InputError` like `iterate`."""
    return list(iterate(path))


def _parsed(line: bytes) -> Event | str:
    """The event of a line, or a description of the error if the line is invalid."""
    try:
        return from_json(line.decode())
    except (ValueError, TypeError, RecursionError) as error:  # TypeError: a field is missing
        return str(error)


def _mend(path: Path) -> None:
    """Complete or remove a last line without a newline, to which the next line would be joined."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - _LONGEST_LINE))
        tail = file.read().rpartition(b"\n")[2]
        if tail and isinstance(_parsed(tail), Event):
            file.write(b"\n")
        elif tail:
            file.truncate(end - len(tail))


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"the log {path} cannot be written: {error.strerror}."
        " Make room there, or choose another folder for the run."
    )


class Ending:
    """A sink that raises `StopTraining` at the next step after a sink of `follow`, in another process,
    has raised it for an event of the log `path`."""

    def __init__(self, path: Path) -> None:
        self._path = _ending(path)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone) and self._path.exists():
            raise StopTraining


def _ending(path: Path) -> Path:
    return path.with_suffix(".end")


@contextlib.contextmanager
def follow(path: str | os.PathLike[str], sinks: Sequence[Sink]) -> Iterator[None]:
    """Pass the events of the log `path`, to which another process appends, to `sinks`, in order and
    with little delay. At the end of the block, all events in the log have been passed. The log need
    not exist yet.

    Sinks are called in a separate thread. If one raises an exception, `Ending` raises `StopTraining`
    in the training process, and the exception is raised at the end of the block unless it is
    `StopTraining` too.
    """
    if not sinks:
        yield
        return
    ended = threading.Event()
    with ThreadPoolExecutor(1, "anybatch-events") as pool:
        following = pool.submit(_follow, Path(path), sinks, ended)
        try:
            yield
        finally:
            ended.set()
    following.result()


def _follow(path: Path, sinks: Sequence[Sink], ended: threading.Event) -> None:
    place = 0
    last_look = False
    while not last_look:
        last_look = ended.wait(_LOOK_SECONDS)
        if not path.exists():
            continue
        with path.open("rb") as file:
            file.seek(place)
            # Complete lines only: ranks that are restarted cut an incomplete one off.
            *lines, rest = file.read().split(b"\n")
            place = file.tell() - len(rest)
        for event in (from_json(line.decode()) for line in lines if not line.startswith(_REMOVED)):
            for sink in sinks:
                try:
                    sink(event)
                except BaseException as error:
                    _ending(path).touch()  # nobody would see the rest of the run
                    if not isinstance(error, StopTraining):
                        raise
