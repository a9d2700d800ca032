"""How ranks end: which end caused the others, and whether the ranks are restarted.

A rank that ends by itself writes an exit record: its status, the time of its first failure, and
whether a restart can fix the cause. Its process ends later, since leaving a process group takes
time and breaks the connections of the other ranks, so the failure is noted where it first appears.
A rank that is killed writes no record; the time at which its process was seen to end is used. All
times are on one scale, across machines too (`rendezvous`), so the earliest failure is the cause.

The rule: ranks are restarted if the cause is that one of them died without an exit record (killed,
or its machine lost power), or reported that it lost a peer or was stuck
(`AnybatchError.mended_by_restart`), or ran out of memory where no step could be undone, or that a
whole machine stopped responding. Outcomes that a program reports itself (an invalid input, no plan
that fits, saved and stopped early, an exception of the user's code) would only recur.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from anybatch.errors import AnybatchError, PeerFailed, PeerLost, Stopped, Stuck, name_of

SAID_BY_STATUS = frozenset({2, 3, 75})
"""Exit statuses that have the same meaning with and without an exit record: see `anybatch.errors`."""

_SLACK_NS = 250_000_000
"""Subtracted from the end time of a rank without an exit record: its peers notice its end slightly
before its agent does."""

_PRINT_SECONDS = 2.0
"""Time limit for printing: the reader of standard error may hang as well."""

_write: Callable[[AnybatchError], None] | None = None


@dataclass(frozen=True, slots=True)
class End:
    """How a rank ended."""

    rank: int
    local_rank: int
    pid: int
    machine: str
    status: int  # if negative, the signal that killed it
    when: int  # nanoseconds from the start of the attempt to the failure
    spoke: bool  # whether it ended by itself and reported so
    mended: bool  # whether a restart can fix the cause
    what: str  # follows a colon in a sentence
    by_agent: bool = False  # whether its agent ended it

    @property
    def is_good(self) -> bool:
        """Whether the rank completed its work."""
        return self.status == 0 and self.spoke

    def raised(self, *kinds: type[AnybatchError]) -> bool:
        """Whether the rank recorded an error of one of `kinds`."""
        return self.what.partition(":")[0] in {kind.__name__ for kind in kinds}

    @property
    def is_reported_by_agent(self) -> bool:
        """Whether the agent, instead of the rank, reports to the user why the rank ended: the rank
        reported nothing, or only that another rank is lost; or it was stopped, and only the agent
        knows whether all ranks are restarted."""
        return not self.spoke or self.raised(PeerLost, Stopped)

    @property
    def was_stopped(self) -> str:
        """The message of a rank that stopped as requested; empty for any other rank."""
        return self.what.partition(": ")[2] if self.spoke and self.raised(Stopped) else ""

    @property
    def sentence(self) -> str:
        """What happened, without a full stop and without the `stack`."""
        first = self.what.partition("\n")[0]
        return (first if self.raised(Stuck, PeerLost) else self.what).rstrip(".")

    @property
    def stack(self) -> str:
        """Stack of the rank at fault at the point where it hung, on separate lines; empty if none
        did."""
        return self.what.partition("\n")[2].rstrip() if self.raised(Stuck, PeerLost) else ""

    @property
    def follows(self) -> bool:
        """Whether the rank ended because another rank reported a failure."""
        return self.spoke and self.raised(PeerFailed)

    @property
    def died(self) -> bool:
        """Whether the rank died: it reported nothing, its agent did not end it, and it had not lost
        a peer."""
        ended = self.by_agent or self.status == -signal.SIGTERM or self.raised(PeerLost)
        return not self.spoke and self.mended and not ended

    def who(self, world_size: int, several: bool) -> str:
        """Description of the rank, with its machine if there are `several`."""
        where = f", on {self.machine}" if several else ""
        return f"rank {self.rank} of {world_size} (process {self.pid}{where})"

    def failed_first(self, world_size: int, several: bool) -> str:
        """The sentence for the end that caused the others, without a full stop."""
        return f"{self.who(world_size, several)} failed first: {self.sentence}"


def mended(ends: Iterable[End], silent: Iterable[str]) -> bool:
    """Whether a restart can fix an attempt with the failed `ends`. It can if there are `silent`
    machines, which reported nothing: errors of their peers may be consequences of their loss."""
    cause = first(ends)
    return bool(tuple(silent)) or (cause is not None and cause.mended)


def first(ends: Iterable[End]) -> End | None:
    """The earliest failed end. An end that follows another failure is not the first, although the
    other rank may take longer to end; nor is that of a rank that lost a peer, if another rank died."""
    bad = sorted((end for end in ends if not end.is_good), key=lambda end: (end.when, end.rank))
    if bad and bad[0].follows:
        return next((end for end in bad if end.spoke and not end.follows), bad[0])
    if bad and bad[0].raised(PeerLost):
        return next((end for end in bad if end.died), bad[0])
    return bad[0] if bad else None


# --------------------------------------------------------------------- the first failure of this rank


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of this rank."""

    when: int  # nanoseconds of the monotonic clock
    mended: bool  # whether a restart can fix it
    what: str  # empty if it was not an error


listener: Callable[[Failure | None], None] | None = None
"""Called with the first failure when it is noted, and with None when it is forgotten."""

_first: Failure | None = None


def note(error: BaseException | None = None) -> Failure:
    """Record `error` as the first failure, unless one was recorded before. Returns the first
    failure."""
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
    """Whether a restart of the ranks can fix `error`. Errors of this package carry this
    information; of all other errors, only out-of-memory errors may be transient."""
    if isinstance(error, AnybatchError):
        return error.mended_by_restart
    # `anybatch.oom` imports torch, so it is loaded only if anything was computed.
    oom: Any = sys.modules.get("anybatch.oom")
    return oom is not None and oom.as_memory_failure(error) is not None


def forget() -> None:
    """Clear the recorded failure, which has been handled."""
    global _first
    if _first is not None and listener is not None:
        listener(None)
    _first = None


# ------------------------------------------------------------------------------- what a rank leaves


def write_word(path: Path, status: int, failure: Failure) -> None:
    """Write the exit record of a rank, from which `read` creates its `End`."""
    write_whole(path, json.dumps({"status": status, **asdict(failure)}).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    half = path.with_name(path.name + ".half")
    half.write_bytes(data)
    half.replace(path)


def read(
    word: Path,
    *,
    rank: int,
    local_rank: int,
    pid: int,
    machine: str,
    code: int,
    ended: int | None,
    start: int,
) -> End:
    """Read the end of a rank.

    Args:
        word: file with its exit record; a file in the same folder may hold the failure that it
            noted before.
        rank, local_rank, pid, machine: see `End`.
        code: return code of the process, as seen by its parent.
        ended: when the process ended, in nanoseconds of the monotonic clock; None: after its agent
            requested it.
        start: when the ranks of the attempt were started, on the same clock.
    """
    late = sys.maxsize if ended is None else ended - start
    # A recorded status of 0 does not count if the interpreter fails after writing it.
    said, spoke = said_in(word), True
    if said is None or (code and not said["status"]):
        # A rank that was killed while exiting may not have reported its failure to the user.
        said, spoke = said_in(word.with_suffix(".noted")), code >= 0
    if said is not None:
        status, when, mended = said["status"], said["when"] - start, said["mended"]
        how = said["what"] or how_it_ended(status)
        return End(rank, local_rank, pid, machine, status, when, spoke, mended, how)
    # Agents end the remaining ranks by SIGTERM, so it is the cause only if there is no other.
    slack = 0 if code == -signal.SIGTERM or ended is None else _SLACK_NS
    mended = code != 0 and code not in SAID_BY_STATUS
    by_agent = ended is None and code in (-signal.SIGTERM, -signal.SIGKILL)
    how = "it was ended with the others" if by_agent else how_it_ended(code)
    return End(rank, local_rank, pid, machine, code, late - slack, False, mended, how, by_agent)


def said_in(word: Path) -> dict[str, Any] | None:
    """The record that `write_word` wrote; None if there is none."""
    try:
        return json.loads(word.read_text())
    except FileNotFoundError:
        return None


def how_it_ended(code: int) -> str:
    """Description of an exit code."""
    if code >= 0:
        return f"it exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the system kills so when memory runs out)" if code == -signal.SIGKILL else ""
    return f"it was killed by {name}{hint}"


# ---------------------------------------------------------------- a rank whose main thread hangs


def prepare(write: Callable[[AnybatchError], None]) -> None:
    """Register `write`, which reports an error to the agent of this rank."""
    global _write
    _write = write


def leave(error: AnybatchError) -> NoReturn:
    """End this process with the status of `error`, after reporting it to the agent and on standard
    error. The loss of another rank is reported only to the agent, if there is one, which reports it
    to the user. The processes that this process started are killed first."""
    try:
        note(error)
        if _write is None or type(error) is not PeerLost:
            _print(error)
        if _write is not None:
            _write(error)  # last: the agent then assumes that it was printed
        for child in psutil.Process().children(recursive=True):
            child.kill()
    except (OSError, psutil.Error):
        pass  # the process exits regardless
    finally:
        os._exit(error.exit_status)


def _print(error: AnybatchError) -> None:
    line = f"anybatch: {error}\n".encode(errors="replace")
    # Not by `sys.stderr`: the main thread may hold its lock.
    printing = threading.Thread(target=os.write, args=(2, line), daemon=True)
    printing.start()
    printing.join(_PRINT_SECONDS)
