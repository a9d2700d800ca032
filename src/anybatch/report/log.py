"""The run's log: one event per line of JSON, appended as it happens.

A line is handed to the operating system whole, before the next step begins: what the log holds
survives a kill of the process. The one line that a kill can tear is the last; it is dropped when
the log is read, and removed when a resumed run appends, so that it never hides in the middle.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from anybatch.errors import InputError, StopTraining
from anybatch.events import Event, Sink, StepDone, from_json, to_json
from anybatch.process.files import Records

_LOOK_SECONDS = 0.1
_HANGS_SECONDS = 60.0


class EventLog:
    """A sink that appends every event to the file `path`.

    Raises `InputError` if the file cannot be opened or written; the lines before stay whole.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        try:
            _mend(self.path)
            self._records = Records(self.path)
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def __call__(self, event: Event) -> None:
        try:
            self._records.append(to_json(event).encode() + b"\n")
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def close(self) -> None:
        """Close the file. Closing twice does no harm."""
        self._records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def iterate(path: str | os.PathLike[str]) -> Iterator[Event]:
    """The events of the log `path`, one at a time: a long run's log need not fit in memory.

    Raises `InputError` naming file and line number for a line that is no event.
    """
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                event = _parsed(line)
                if isinstance(event, Event):
                    yield event
                elif line.endswith(b"\n"):
                    raise InputError(
                        f"{path}, line {number}, is not an event of anybatch ({event}):"
                        " remove the line, or restore the file."
                    )
    except OSError as error:
        raise InputError(f"the log {path} cannot be read: {error.strerror}.") from None


def sound_events(path: str | os.PathLike[str]) -> Iterator[Event]:
    """The events of the log `path` as `iterate` gives them, without the lines that are damaged."""
    try:
        with Path(path).open("rb") as file:
            yield from (event for line in file if isinstance(event := _parsed(line), Event))
    except OSError as error:
        raise InputError(f"the log {path} cannot be read: {error.strerror}.") from None


def set_damaged_aside(path: Path) -> str:
    """Move the log `path` aside if lines of it are damaged, and leave the others in its place. Returns
    what was done, as a sentence; empty: nothing was to be done.

    Raises `InputError` if the log cannot be read or moved.
    """
    if not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            # A last line without an end is one that a kill has torn: no damage.
            sound = [not line.endswith(b"\n") or isinstance(_parsed(line), Event) for line in file]
        num_damaged = sound.count(False)
        if not num_damaged:
            return ""
        aside = _unused(path.with_name(f"{path.stem}.damaged{path.suffix}"))
        path.rename(aside)
    except OSError as error:
        raise InputError(f"the log {path} cannot be read: {error.strerror}.") from None
    partial = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("rb") as old, partial.open("wb") as new:
            new.writelines(line for line, keeps in zip(old, sound, strict=True) if keeps)
        partial.rename(path)
    except OSError:  # no room, say: a new log begins, and the old one is there to be mended
        with contextlib.suppress(OSError):
            partial.unlink()
    lines = "1 line is" if num_damaged == 1 else f"{num_damaged} lines are"
    return f"{lines} damaged in the log {path}, which goes on without them: it is kept as {aside.name}."


def _unused(path: Path) -> Path:
    """`path`, or the first of NAME-2, NAME-3, ... that is not there."""
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found


def read(path: str | os.PathLike[str]) -> list[Event]:
    """All events of the log `path`, in order. Raises `InputError` as `iterate` does."""
    return list(iterate(path))


def _parsed(line: bytes) -> Event | str:
    """The event, or what is wrong with the line."""
    try:
        return from_json(line.decode())
    except (ValueError, TypeError, RecursionError) as error:  # TypeError: a field is missing
        return str(error)


def _mend(path: Path) -> None:
    """Complete or remove a last line without line end, onto which the next would be glued."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        tail = _tail(file.fileno(), end)
        if not tail:
            return
        if isinstance(_parsed(tail), Event):
            file.write(b"\n")
        else:
            file.truncate(end - len(tail))


def _tail(descriptor: int, end: int, block: int = 1 << 16) -> bytes:
    """What follows the last line end, read backwards: logs grow to gigabytes."""
    tail = b""
    while end > 0:
        begin = max(0, end - block)
        _, line_end, rest = os.pread(descriptor, end - begin, begin).rpartition(b"\n")
        tail = rest + tail
        if line_end:
            break
        end = begin
    return tail


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"the log {path} cannot be written: {error.strerror}."
        " Make room there, or choose another folder for the run."
    )


class Ending:
    """A sink that raises `StopTraining` once a sink of `follow`, in another process, has raised it on
    the events in the log `path`."""

    def __init__(self, path: Path) -> None:
        self._path = _ending(path)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone) and self._path.exists():
            raise StopTraining


def _ending(path: Path) -> Path:
    return path.with_suffix(".end")


@contextlib.contextmanager
def follow(path: str | os.PathLike[str], sinks: Sequence[Sink]) -> Iterator[None]:
    """Give `sinks` every event that another process appends to the log `path` meanwhile, in order and
    soon; at the end of the block all that is there has been given. The log need not be there yet.

    Sinks are called in a thread of its own. What one raises is raised at the end of the block, but for
    `StopTraining`, which `Ending` hands to the process that trains; and `InputError` if one hangs then.
    """
    if not sinks:
        yield
        return
    ended = threading.Event()
    failures: list[BaseException] = []
    reading = _Reading()
    thread = threading.Thread(
        target=_follow,
        args=(Path(path), sinks, ended, failures, reading),
        name="anybatch-events",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        while thread.is_alive():
            before = reading.num_begun
            thread.join(_HANGS_SECONDS)
            if thread.is_alive() and reading.num_begun == before:
                failures.append(
                    InputError(
                        f"a reader of events has not returned for {_HANGS_SECONDS:g} s (event"
                        f" {before}, {reading.kind}): the run has ended, but what the sinks do hangs."
                    )
                )
                break
    if failures:
        raise failures[0]


@dataclass(slots=True)
class _Reading:
    """How many events the sinks were given so far, and the kind of the last."""

    num_begun: int = 0
    kind: str = ""


def _follow(
    path: Path,
    sinks: Sequence[Sink],
    ended: threading.Event,
    failures: list[BaseException],
    reading: _Reading,
) -> None:
    place, rest = 0, b""
    try:
        while True:
            last_look = ended.wait(_LOOK_SECONDS)
            if path.exists():
                with path.open("rb") as file:
                    file.seek(place)
                    new = file.read()
                place += len(new)
                *lines, rest = (rest + new).split(b"\n")
                for line in lines:
                    event = from_json(line.decode())
                    reading.num_begun, reading.kind = reading.num_begun + 1, event.kind
                    for sink in sinks:
                        try:
                            sink(event)
                        except StopTraining:
                            _ending(path).touch()
            if last_look:
                return
    except BaseException as error:
        failures.append(error)
