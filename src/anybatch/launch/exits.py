"""How ranks end, which end was the cause of the others, and whether to start them again.

A rank that ends by itself leaves a word: its status, the moment of its first failure, and whether a
restart mends what it failed of. The end of its process comes later, since leaving a process group takes
time and breaks the others' connections, so the failure is noted where it first shows. A rank that is
killed leaves no word; the kernel tells when it ended. All moments are on one scale, on several machines
too (`rendezvous`), so that the earliest is the cause.

The rule. Ranks are started again if the cause is that one of them died without a word (killed; the
power of its machine lost), or that it said that it had lost a peer or was stuck
(`AnybatchError.mended_by_restart`), or ran out of memory where no step could be undone, or that a
whole machine has fallen silent. What a program says by itself (a wrong input, no plan that fits, saved
and stopped early, an exception of the user's code) would only be said again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from anybatch.errors import AnybatchError, PeerFailed, PeerLost, Stopped, Stuck, name_of

SAID_BY_STATUS = frozenset({2, 3, 75})
"""Exit statuses that mean the same whether a word was left or not: see `anybatch.errors`."""

_SLACK_NS = 250_000_000
"""A rank that ends without a word is seen to end a little after its peers have felt it."""

_PRINT_SECONDS = 2.0
"""That printing may take: what reads standard error may hang as well."""

_write: Callable[[AnybatchError], None] | None = None


@dataclass(frozen=True, slots=True)
class End:
    """How a rank ended.

    Attributes:
        rank, local_rank, pid: whose end it is.
        machine: where, by name.
        status: exit status; negative: the signal that killed it.
        when: it failed, in nanoseconds since the ranks of the attempt were started.
        spoke: whether it ended by itself and said so.
        mended: whether a restart mends it.
        what: in words, for a sentence after a colon.
        by_agent: whether its agent ended it.
    """

    rank: int
    local_rank: int
    pid: int
    machine: str
    status: int
    when: int
    spoke: bool
    mended: bool
    what: str
    by_agent: bool = False

    @property
    def is_good(self) -> bool:
        """Whether the rank did all it was to do."""
        return self.status == 0 and self.spoke

    @property
    def is_told_by_agent(self) -> bool:
        """Whether the rank leaves it to its agent to tell people why it ended: it has only felt that
        another is lost; or it was stopped, and the agent knows whether all are started again."""
        kinds = (f"{PeerLost.__name__}:", f"{Stopped.__name__}:")
        return not self.spoke or self.what.startswith(kinds)

    @property
    def was_stopped(self) -> str:
        """What it said when it had stopped as it was asked to, or nothing."""
        kind, _, sentence = self.what.partition(": ")
        return sentence if self.spoke and kind == Stopped.__name__ else ""

    @property
    def sentence(self) -> str:
        """What has happened, without a full stop, and without the `stack`."""
        return self._parted[0].rstrip(".")

    @property
    def stack(self) -> str:
        """Where the rank that is to blame hung, in lines of their own; empty if none did."""
        return self._parted[1].rstrip()

    @property
    def _parted(self) -> tuple[str, str]:
        hung = self.what.startswith((f"{Stuck.__name__}:", f"{PeerLost.__name__}:"))
        sentence, _, stack = self.what.partition("\n")
        return (sentence, stack) if hung else (self.what, "")

    @property
    def follows(self) -> bool:
        """Whether another rank had said that it failed, and this one ended for that."""
        return self.spoke and self.what.startswith(f"{PeerFailed.__name__}:")

    @property
    def has_lost_a_peer(self) -> bool:
        """Whether it ended because another rank did not answer."""
        return self.what.startswith(f"{PeerLost.__name__}:")

    @property
    def died(self) -> bool:
        """Whether neither its own word ended it, nor its agent, nor that it had lost a peer."""
        ended = self.by_agent or self.status == -signal.SIGTERM or self.has_lost_a_peer
        return not self.spoke and self.mended and not ended

    def who(self, world_size: int, several: bool) -> str:
        """The rank in words, with its machine where there are `several`."""
        where = f", on {self.machine}" if several else ""
        return f"rank {self.rank} of {world_size} (process {self.pid}{where})"


def mended(ends: Iterable[End], silent: Iterable[str]) -> bool:
    """Whether a restart mends an attempt with the bad `ends`, of which the machines `silent` told
    nothing: what its peers said may be the way in which they felt it."""
    cause = first(ends)
    return bool(tuple(silent)) or (cause is not None and cause.mended)


def first(ends: Iterable[End]) -> End | None:
    """The earliest of the bad ones. One that follows another is not it, though the other may take
    longer to its end; nor is one that has lost a peer, where a rank died without a word."""
    bad = sorted((end for end in ends if not end.is_good), key=lambda end: (end.when, end.rank))
    if bad and bad[0].follows:
        return next((end for end in bad if end.spoke and not end.follows), bad[0])
    if bad and bad[0].has_lost_a_peer:
        return next((end for end in bad if end.died), bad[0])
    return bad[0] if bad else None


# --------------------------------------------------------------------- the first failure of this rank


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


# ------------------------------------------------------------------------------- what a rank leaves


def write_word(path: Path, status: int, failure: Failure) -> None:
    """The last word of a rank, from which `read` makes its end."""
    word = {
        "status": status,
        "when": failure.when,
        "mended": failure.mended_by_restart,
        "what": failure.what,
    }
    write_whole(path, json.dumps(word).encode())


def write_whole(path: Path, data: bytes) -> None:
    """The file is there whole or not at all."""
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
    """The end of a rank.

    Args:
        word: the file with its last one; beside it may be one with what it has noted before.
        rank, local_rank, pid, machine: see `End`.
        code: of the process, as its parent sees it.
        ended: when it did, in nanoseconds of the monotonic clock; None: after it was told to.
        start: when the ranks of the attempt were started, on the same clock.
    """
    late = sys.maxsize if ended is None else ended - start
    # A status of 0 does not count if the interpreter fails after its last word.
    said, spoke = said_in(word), True
    if said is None or (code and not said["status"]):
        # One that was killed on its way out has perhaps not told anybody.
        said, spoke = said_in(word.with_suffix(".noted")), code >= 0
    if said is not None:
        status, when, mended = said["status"], said["when"] - start, said["mended"]
        how = said["what"] or how_it_ended(status)
        return End(rank, local_rank, pid, machine, status, when, spoke, mended, how)
    # By SIGTERM agents end the ranks that are left, so it is no cause unless it is alone.
    slack = 0 if code == -signal.SIGTERM or ended is None else _SLACK_NS
    mended = code != 0 and code not in SAID_BY_STATUS
    by_agent = ended is None and code in (-signal.SIGTERM, -signal.SIGKILL)
    how = "it was ended with the others" if by_agent else how_it_ended(code)
    return End(rank, local_rank, pid, machine, code, late - slack, False, mended, how, by_agent)


def said_in(word: Path) -> dict[str, Any] | None:
    """What `write_word` has written, if it has."""
    try:
        return json.loads(word.read_text())
    except FileNotFoundError:
        return None


def how_it_ended(code: int) -> str:
    """An exit code in words."""
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
    """`write` leaves word of an error for the agent of this rank."""
    global _write
    _write = write


def leave(error: AnybatchError) -> NoReturn:
    """End this process with the status of `error`, having told it to the agent and to standard error;
    that another rank is lost, to the agent alone, if there is one, which says so to people. The
    processes that it has started end first."""
    try:
        note(error)
        if _write is None or type(error) is not PeerLost:
            _print(error)
        if _write is not None:
            _write(error)  # last: from then on the agent takes it for told
        for child in psutil.Process().children(recursive=True):
            child.kill()
    except (OSError, psutil.Error):
        pass  # the process ends all the same
    finally:
        os._exit(error.exit_status)


def _print(error: AnybatchError) -> None:
    told = f"anybatch: {error}\n".encode(errors="replace")
    # Not by `sys.stderr`: the main thread may hold its lock.
    printing = threading.Thread(target=os.write, args=(2, told), daemon=True)
    printing.start()
    printing.join(_PRINT_SECONDS)
