"""Watchdog: detects a rank that makes no progress after a deadline, names it, and shows where it hangs.

torch's own timeouts end a collective that takes too long. They cannot tell why: the rank that waits is
fine, and the rank that hangs waits for no one. Here every rank monitors itself.

    rank 0   pass  pass  vote ................................ reads rank 1's word, ends as well
    rank 1   pass  pass  hangs in the data set ...... names itself, shows its stack, ends
             `beat` `beat`                           ^ deadline since the last beat

The thread that trains shows that it is alive by incrementing a counter (`Pulse.beat`): no lock, no
system call, no wait for the device. Another thread checks every few seconds whether anything has
changed. Whether a rank works or waits for others is determined from its stack: a rank that waits is
inside torch.distributed or `anybatch.parallel`. So a pass that gathers weights needs no marks, and
neither does a collective in the user's own loss.

Each rank's watchdog also publishes a `Word` every few seconds, so that the other ranks can name a rank
whose whole process has stopped, or whose machine is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import indent
from types import FrameType, TracebackType
from typing import Protocol, Self, final

from anybatch.errors import AnybatchError, InputError, PeerLost, Stuck, setting
from anybatch.events import IN_STEP, Stalled, whereabouts

LEAST_SECONDS = 300.0
"""Seconds without progress before a rank is considered stuck."""

FIRST_SECONDS = 1800.0
"""The same for work that is done for the first time: compilation, downloads, caches that are filled."""

TIMES_LONGEST = 20.0
"""A rank is not considered stuck before this many times its longest standstill so far."""

PATIENCE = 1.5
"""Factor on its own deadline for which a rank waits for another, so that a hung one reports first."""

_HELD = 1.1
"""Factor on a rank's deadline before the last resort, which reports a rank whose interpreter is
blocked: any other rank would have reported by itself."""

_TICK_SECONDS = 5.0
_TICKS = 20
_ANNOUNCE_SECONDS = 2.0
_FELT_SECONDS = 5.0
_CLOSE_SECONDS = 2.0

_SILENT = ("saving", "resuming", "reading weights", "closing")
"""Phases that may take long without a sign of life, since checkpoints are large and disks slow. They
get the deadline of work that is done for the first time."""

LEFT = "left"
"""Phase of a rank that has finished."""

_WAITING_IN = ("torch.distributed", "anybatch.parallel")
_OWN_THREADS = ("anybatch-watchdog", "anybatch-board")


class HasPhase(Protocol):
    """Object that knows the current phase."""

    phase: str


@final
class Pulse:
    """Current activity of one rank. Written by its own thread, read by the watchdog.

    Attributes:
        rank: number of the rank.
        step: number of the current step, or else of the last one done.
        num_beats: number of signs of life so far.
        thread: the thread that computes.
    """

    def __init__(
        self, rank: int = 0, explain: Callable[[PeerLost], PeerLost] = lambda error: error
    ) -> None:
        self.rank: int = rank
        self.step: int = 0
        self.num_beats: int = 0
        self._explain = explain
        self._source: HasPhase | None = None
        self._doing = self._work = ""
        self._done: set[str] = set()
        self._depth = 0
        self.thread: int = threading.get_ident()

    def follow(self, source: HasPhase) -> None:
        """Read the phase from `source` from now on."""
        self._source = source

    @contextlib.contextmanager
    def at_work(self, what: str) -> Iterator[None]:
        """Context manager for work that is watched; `what` names its beginning. Between such blocks a
        rank may rest for any time, since that time belongs to the script.

        If another rank is lost and has published why, an error with that reason is raised instead.
        """
        outer = self._work
        self.thread = threading.get_ident()
        self._doing = self._work = what
        self._depth += 1
        self.num_beats += 1
        try:
            yield
        except PeerLost as error:
            explained = error if self._depth > 1 else self._explain(error)
            if explained is error:
                raise
            raise explained from error
        finally:
            self._depth -= 1
            self._done.add(what)
            self._doing, self._work = "", outer
            self.num_beats += 1

    def beat(self) -> None:
        """Record a sign of life: a batch is ready, or a pass is over."""
        self.num_beats += 1
        self._doing = ""

    @property
    def phase(self) -> str:
        """The current phase; empty if nothing is watched."""
        if not self._depth:
            return ""
        return self._doing or (self._source.phase if self._source else "set-up")

    @property
    def is_first(self) -> bool:
        """Whether no such block has ended before, or it gives no sign of life inside."""
        return self._work not in self._done or self._work in _SILENT


@dataclass(frozen=True, slots=True)
class Word:
    """Status that a rank publishes to the others.

    Attributes:
        number: number of the word, different each time.
        step, phase: see `Pulse`.
        waits: whether the rank waits for other ranks.
        still: seconds without progress.
        limit: seconds without progress after which the rank is considered stuck.
        time: time of publication, in seconds since the epoch.
    """

    number: int = 0
    step: int = 0
    phase: str = ""
    waits: bool = False
    still: float = 0.0
    limit: float = 0.0
    time: float = 0.0

    def dumps(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> Word | None:
        """Parse the output of `dumps`; None if nothing has been published yet."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    @property
    def where(self) -> str:
        return whereabouts(self.step, self.phase)

    @property
    def is_busy(self) -> bool:
        """Whether others may have to wait for this rank."""
        return self.phase not in ("", LEFT) and not self.waits


@dataclass(frozen=True, slots=True)
class Heard:
    """The last word received from a rank, and for how many seconds, by the receiver's clock, no new
    word has come while the receiver was listening."""

    rank: int
    word: Word | None
    silent: float


@final
class Stall:
    """Tracks how long a rank has made no progress, and how long it may.

    Args:
        given: the deadline in seconds; None: `LEAST_SECONDS` or `TIMES_LONGEST` times the longest
            standstill so far, whichever is larger, and `FIRST_SECONDS` for work that is done for the
            first time.
    """

    def __init__(self, given: float | None = None) -> None:
        self.seconds: float = 0.0
        self._given = given
        self._longest = 0.0
        self._is_first = True
        self._last: tuple[int, str] = (-1, "")

    def observe(self, elapsed: float, num_beats: int, phase: str, is_first: bool = False) -> float:
        """Record what is seen `elapsed` seconds after the last observation. Returns the seconds without
        progress that have just ended, or 0."""
        now = num_beats, phase
        if now == self._last:
            self.seconds += elapsed if phase else 0.0
            return 0.0
        ended, self.seconds, self._last = self.seconds, 0.0, now
        if not self._is_first:
            self._longest = max(self._longest, ended)
        self._is_first = is_first
        return ended

    @property
    def limit(self) -> float:
        """Seconds without progress that are allowed."""
        if self._given is not None:
            return self._given
        if self._is_first:
            return FIRST_SECONDS
        return max(LEAST_SECONDS, TIMES_LONGEST * self._longest)

    @property
    def is_over(self) -> bool:
        return self.seconds >= self.limit


def judged(
    name: str, mine: Word, others: Sequence[Heard], silence: float, slack: float = 0.0
) -> Stuck | PeerLost | None:
    """Returns what a rank concludes when it has made no progress for longer than its deadline: that it
    hangs itself, that another rank does, or nothing yet.

    Args:
        name: name of this rank, as text.
        mine: the word of this rank.
        others: the words of the other ranks.
        silence: seconds without a new word after which a process is considered not running.
        slack: maximum age of words in seconds.
    """
    silent = [one for one in others if one.silent >= silence and not _has_left(one)]
    stuck = [
        one
        for one in others
        if one.word and one.word.is_busy and one.word.still >= one.word.limit - slack
    ]
    if not mine.waits and not any(_behind(one.word, mine) for one in (*silent, *stuck)):
        return Stuck(
            f"{name} has made no progress for {mine.still:.0f} s"
            f" {mine.where}, where at most {mine.limit:.0f} s are allowed: see below where it hangs; if"
            " it only needs longer, allow more (stall_seconds)."
        )
    if mine.still < PATIENCE * mine.limit:
        return None  # the rank that hangs is about to report it
    waited = f"{name} has waited for {mine.still:.0f} s {mine.where}"
    if silent:
        names = " and ".join(map(_last_heard, silent))
        return PeerLost(
            f"{names}; {waited}: its process or its machine has stopped, or the network between."
        )
    if stuck:
        names = " and ".join(
            f"rank {one.rank} has made no progress for {one.word.still:.0f} s {one.word.where}"
            for one in stuck
            if one.word
        )
        return PeerLost(f"{names}; {waited}: its own output says where it hangs.")
    if all(one.word and one.word.waits and one.word.still >= one.word.limit for one in others):
        where = ", ".join(f"rank {one.rank} {one.word.where}" for one in others if one.word)
        return Stuck(
            f"all ranks wait for each other: {waited}, and so has {where}: a collective that not all of"
            " them call (in the model or the loss), or a network that loses what it is given."
        )
    return None


def _has_left(one: Heard) -> bool:
    return one.word is not None and one.word.phase == LEFT


def _behind(word: Word | None, mine: Word) -> bool:
    """Returns whether a rank that published `word` is behind this one, which may thus wait for it."""
    return word is None or _place(word) < _place(mine)


def _place(word: Word) -> tuple[int, int]:
    """Returns how far a rank is. A phase that is not part of a step comes after all those that are."""
    return word.step, IN_STEP.index(word.phase) if word.phase in IN_STEP else len(IN_STEP)


def _last_heard(one: Heard) -> str:
    if one.word is None:
        return f"rank {one.rank} was never heard of"
    ago = max(one.silent, time.time() - one.word.time)
    return f"rank {one.rank} was last heard of {ago:.0f} s ago, {one.word.where}"


class Board(Protocol):
    """Where ranks publish their words. See `launch.board.Board` for the members."""

    rank: int
    size: int
    words: Sequence[str]
    verdict: str
    answered: float

    def tell(self, word: str, ask: bool = False) -> None: ...
    def announce(self, verdict: str, seconds: float) -> None: ...
    def refresh(self, seconds: float) -> None: ...
    def close(self) -> None: ...


def checked_seconds(stall_seconds: float | None) -> float | None:
    """Returns `stall_seconds`. Raises `InputError` if it is not above 0."""
    if stall_seconds is not None and not stall_seconds > 0:
        raise InputError(
            f"{setting('stall_seconds')} is {stall_seconds}: give the seconds without progress, above"
            " 0, after which a rank counts as stuck."
        )
    return stall_seconds


@final
class Watchdog:
    """Watches the rank of this process. A context manager.

    Args:
        stall_seconds: seconds without progress after which a rank is stuck; None: see `Stall`.
        board: provides the words of the other ranks; None: there are none in other processes.
        end: ends this process with an error. None: the process belongs to the user, who is only
            notified, on standard error and by `stalled`.
        last_resort: have a C thread end the process if the interpreter is blocked, so that not even the
            watchdog runs. Each check then starts such a thread, which takes 8 MiB of address space.
        clock: returns seconds.

    Raises `InputError` if `stall_seconds` is not above 0.
    """

    def __init__(
        self,
        stall_seconds: float | None = None,
        board: Board | None = None,
        end: Callable[[AnybatchError], object] | None = None,
        last_resort: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        checked_seconds(stall_seconds)
        self._board = board
        self._end = end
        self._last_resort = last_resort
        self._clock = clock
        self._stall = Stall(stall_seconds)
        self._tick = min(_TICK_SECONDS, (stall_seconds or LEAST_SECONDS) / _TICKS)
        self._pulse = Pulse()
        self._looked = clock()
        self._number = 0
        self._heard: dict[int, tuple[str, float]] = {}
        self._answered = 0.0
        self._known_for = 0.0
        self._reported: _Standstill | None = None  # the current standstill, once reported
        self._stalled: list[_Standstill] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="anybatch-watchdog", daemon=True)

    def pulse(self, rank: int) -> Pulse:
        """Returns the pulse of `rank`, the rank of this process."""
        self._pulse = Pulse(rank, self._explained)
        return self._pulse

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._thread.join(_CLOSE_SECONDS)
        if self._last_resort:
            faulthandler.cancel_dump_traceback_later()
        if self._board is not None:
            self._board.tell(Word(self._number + 1, phase=LEFT).dumps())
            self._board.close()

    def stalled(self) -> list[Stalled]:
        """Returns the standstills reported since the last call, for the thread that has gone on."""
        found, self._stalled = self._stalled, []
        now = self._clock()
        return [
            Stalled(
                time=time.time(),
                step=one.step,
                seconds=now - one.begun if one.seconds is None else one.seconds,
                phase=one.phase,
            )
            for one in found
        ]

    def look(self) -> None:
        """Check what has changed since the last check, and act."""
        now = self._clock()
        # Time in which this thread did not run either (a stopped process, a suspended machine) is no
        # rank's fault: at most twice the interval between checks is counted.
        elapsed, self._looked = min(now - self._looked, 2 * self._tick), now
        still, pulse = self._stall, self._pulse
        ended = still.observe(elapsed, pulse.num_beats, pulse.phase, pulse.is_first)
        if ended and self._reported is not None:
            self._reported.seconds = ended
            self._reported = None
        mine = self._word()
        others = self._listen(mine, elapsed)
        self._arm(mine)
        error = self._sentenced(mine, elapsed)
        if error is None and still.is_over:
            board, slack = self._board, 2 * self._tick
            name = f"rank {pulse.rank} of {board.size}" if board and board.size > 1 else "training"
            error = self._unheard(mine) or judged(name, mine, others, still.limit / 4, slack)
        if error is not None:
            self._act(error)

    def _run(self) -> None:
        while not self._closing.wait(self._tick):
            with contextlib.suppress(Exception):  # such as a momentary lack of memory: check again
                self.look()

    def _explained(self, error: PeerLost) -> PeerLost:
        """Returns an error with the reason that the lost rank has published, if it has."""
        if self._board is not None:
            self._board.refresh(_ANNOUNCE_SECONDS)
        said = self._board.verdict if self._board else ""
        return PeerLost(said) if said else error

    def _word(self) -> Word:
        self._number += 1
        still, pulse = self._stall, self._pulse
        waits = bool(pulse.phase) and waits_for_others(pulse.thread)
        return Word(
            self._number, pulse.step, pulse.phase, waits, still.seconds, still.limit, time.time()
        )

    def _sentenced(self, mine: Word, elapsed: float) -> PeerLost | None:
        """Returns an error with the reason that a rank published when it was ended, if this rank has
        not noticed otherwise: an NCCL collective keeps waiting for it."""
        if self._board is None or not self._board.verdict or not mine.phase:
            return None
        self._known_for += elapsed
        return PeerLost(self._board.verdict) if self._known_for >= _FELT_SECONDS else None

    def _listen(self, mine: Word, elapsed: float) -> list[Heard]:
        """Publish this rank's word, and read the others' if this rank has long made no progress."""
        board = self._board
        if board is None:
            return []
        listens = mine.still >= mine.limit / 2
        board.tell(mine.dumps(), listens)
        if not listens:
            self._heard.clear()
        answered, self._answered = board.answered > self._answered, board.answered
        found: list[Heard] = []
        for rank, text in enumerate(board.words):
            if rank == board.rank or not listens:
                continue
            before, silent = self._heard.get(rank, ("", 0.0))
            if text != before:
                silent = 0.0
            elif answered:  # otherwise nothing is known about any rank
                silent += elapsed
            self._heard[rank] = text, silent
            found.append(Heard(rank, Word.loads(text), silent))
        return found

    def _unheard(self, mine: Word) -> PeerLost | None:
        """Returns an error if the board itself does not answer: its words may be outdated."""
        board = self._board
        if board is None or mine.still < PATIENCE * mine.limit or not mine.waits:
            return None
        silent = time.monotonic() - board.answered
        if silent < mine.limit / 4:
            return None
        return PeerLost(
            f"rank {board.rank} has waited for {mine.still:.0f} s {mine.where}, and the place where the"
            f" ranks met has not answered for {silent:.0f} s: the process that serves it (rank 0's, or"
            " that of its starter) or its machine has stopped, or the network between."
        )

    def _arm(self, mine: Word) -> None:
        """Arm the last resort, which writes the stacks and ends the process unless it is postponed."""
        if not self._last_resort:
            return
        if mine.phase:
            # Until the rank's own deadline, and a little longer than this thread would take.
            left = max(0.0, mine.limit - mine.still) + (_HELD - 1) * mine.limit + 2 * self._tick
            faulthandler.dump_traceback_later(left, exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _act(self, error: Stuck | PeerLost) -> None:
        if self._reported is not None:
            return
        pulse = self._pulse
        self._reported = _Standstill(pulse.step, pulse.phase, self._looked - self._stall.seconds)
        self._stalled.append(self._reported)
        shown = stacks(pulse.thread) if isinstance(error, Stuck) else ""
        sentence = f"{error}\n{shown}".rstrip()
        if self._end is None:
            print(f"anybatch: {sentence}", file=sys.stderr, flush=True)  # noqa: T201 - may be None
            return
        if self._board is not None:
            self._board.announce(sentence, _ANNOUNCE_SECONDS)
        self._end(type(error)(sentence))


@dataclass(slots=True)
class _Standstill:
    """A standstill that was reported: where and when it began, and how long it lasted if known."""

    step: int
    phase: str
    begun: float
    seconds: float | None = None


# ------------------------------------------------------------------------- where threads are


def waits_for_others(thread: int) -> bool:
    """Returns whether this thread of this process is inside a collective. A backward pass on a
    GPU runs in one of autograd's threads, while the thread that began it waits."""
    with _frames() as frames:
        modules = [_module(frames.get(thread))]
        if modules[0].startswith("torch.autograd"):
            modules += map(_module, frames.values())
    return any(module.startswith(_WAITING_IN) for module in modules)


@contextmanager
def _frames() -> Iterator[dict[int, FrameType]]:
    """The innermost frame of every thread. The frames are released at the end: this thread's own is
    among them and would keep all of them alive in a cycle, with the tensors of their passes."""
    frames = sys._current_frames()
    try:
        yield frames
    finally:
        frames.clear()


def _module(frame: FrameType | None) -> str:
    return str(frame.f_globals.get("__name__", "")) if frame else ""


def stacks(thread: int) -> str:
    """Returns the stack of `thread`, then those of the other threads that run Python code, indented."""
    names = {one.ident: one.name for one in threading.enumerate()}
    rest = [
        ident
        for ident, name in names.items()
        if ident not in (thread, threading.get_ident()) and name not in _OWN_THREADS
    ]
    lines: list[str] = []
    with _frames() as frames:
        for ident in (thread, *rest):
            if ident in frames:
                lines.append(f"thread {names.get(ident, ident)}, most recent call last:\n")
                lines += traceback.format_stack(frames[ident])
    return indent("".join(lines).rstrip(), "  ")
