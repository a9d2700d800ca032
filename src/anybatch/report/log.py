"""The run's log: one event per line of JSON, appended as it happens.

A line is handed to the operating system whole, before the next step begins: what the log holds
survives a kill of the process. The one line that a kill can tear is the last; it is dropped when
the log is read, and removed when a resumed run appends, so that it never hides in the middle.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from anybatch.errors import InputError, StopTraining
from anybatch.events import Event, Sink, StepDone, from_json, to_json
from anybatch.process.files import Records

_LOOK_SECONDS = 0.1

_LONGEST_LINE = 1 << 22
"""Of a log that grows to gigabytes no more than this is read to find the last line."""

_STEP = f'{{"kind": "{StepDone.kind}",'.encode()
"""So the line of a step begins."""


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


def iterate(path: str | os.PathLike[str], every_step: bool = True) -> Iterator[Event]:
    """The events of the log `path`, one at a time: a long run's log need not fit in memory. Damaged
    lines are left out, and a warning at the end says so; a torn last line is no damage. Of steps that
    follow each other only the last is read unless `every_step`: a log of a million takes a second.

    Raises `InputError` if it cannot be read.
    """
    num_damaged, first = 0, ""
    try:
        with Path(path).open("rb") as file:
            numbered = enumerate(file, start=1)
            for number, line in numbered if every_step else _last_steps(numbered):
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
    """`lines`, of whole ones of steps that follow each other only the last."""
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
    """All events of the log `path`, in order. Warns and raises `InputError` as `iterate` does."""
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
    `StopTraining`, which `Ending` hands to the process that trains.
    """
    if not sinks:
        yield
        return
    ended = threading.Event()
    failures: list[BaseException] = []
    thread = threading.Thread(
        target=_follow,
        args=(Path(path), sinks, ended, failures),
        name="anybatch-events",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if failures:
        raise failures[0]


def _follow(
    path: Path,
    sinks: Sequence[Sink],
    ended: threading.Event,
    failures: list[BaseException],
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
                    for sink in sinks:
                        try:
                            sink(event)
                        except StopTraining:
                            _ending(path).touch()
            if last_look:
                return
    except BaseException as error:
        failures.append(error)
