"""Watchdog: a rank that makes no progress is found after a deadline, named, and shown where it hangs.

torch's own deadlines end a collective that takes too long. They cannot tell why: in the rank that
waits nothing is wrong, and the rank that hangs waits for nobody. Here every rank watches itself.

    rank 0   pass  pass  vote ................................ reads rank 1's word, ends as well
    rank 1   pass  pass  hangs in the data set ...... names itself, shows its stack, ends
             `beat` `beat`                           ^ deadline since the last beat

The thread that trains says that it is alive by counting (`Pulse.beat`): no lock, no call into the
system, no wait for the device. A thread beside it looks every few seconds whether anything has changed.
Whether a rank is at work or waits for others is read off its stack: what waits for others stands in
torch.distributed or in `anybatch.parallel`. So a pass that gathers weights needs no marks, and neither
does a collective in the user's own loss.

Each rank's watchdog also hangs out a word every few seconds, so that a rank whose whole process stands
still, or whose machine is gone, is named by the others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, final

from anybatch.engine import stall
from anybatch.engine.pulse import LEFT, Pulse, Word
from anybatch.engine.stacks import stacks, waits_for_others
from anybatch.engine.stall import PATIENCE, Heard, Stall, judged
from anybatch.errors import AnybatchError, InputError, PeerLost, Stuck
from anybatch.events import Stalled

_HELD = 1.1
"""How much longer than its deadline a rank gets before the last resort, which tells of one whose
interpreter is held: it would have told so itself if it could."""

_TICK_SECONDS = 5.0
_TICKS = 20
_ANNOUNCE_SECONDS = 2.0
_FELT_SECONDS = 5.0
_CLOSE_SECONDS = 2.0


class Board(Protocol):
    """Where ranks hang out their words. See `launch.board`, which has one in a store."""

    @property
    def rank(self) -> int:
        """This one."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def words(self) -> Sequence[str]:
        """Of every rank, the last that was heard; empty: none."""
        ...

    @property
    def verdict(self) -> str:
        """What a rank said on being ended; empty: none has."""
        ...

    @property
    def answered(self) -> float:
        """When the board was last reached, by the monotonic clock."""
        ...

    def tell(self, word: str, ask: bool = False) -> None:
        """Hang out `word`, and hear the others' if `ask`. Does not wait."""
        ...

    def announce(self, verdict: str, seconds: float) -> None:
        """Tell all ranks why this one ends. Waits at most `seconds`."""
        ...

    def refresh(self, seconds: float) -> None:
        """Hear the others now. Waits at most `seconds`."""
        ...

    def close(self) -> None:
        """The last word has been said."""
        ...


def checked_seconds(stall_seconds: float | None) -> float | None:
    """`stall_seconds`. Raises `InputError` for one that is not above 0."""
    if stall_seconds is not None and not stall_seconds > 0:
        raise InputError(
            f"stall_seconds is {stall_seconds}: give the seconds without progress, above 0, after which"
            " a rank counts as stuck."
        )
    return stall_seconds


@final
class Watchdog:
    """Watches the rank of this process. A context manager.

    Args:
        stall_seconds: without progress, after which a rank is stuck; None: see `Stall`.
        board: where the other ranks' words hang; None: there are none in other processes.
        end: ends this process with an error. None: it is the user's own, who is only told, on
            standard error and by `stalled`.
        last_resort: have a thread of C end the process if the interpreter is held, so that not even
            the watchdog runs. Each look then starts such a thread, which takes 8 MiB of addresses.
        clock: seconds.

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
        self._stillness = Stall(stall_seconds)
        self._tick = min(_TICK_SECONDS, (stall_seconds or stall.LEAST_SECONDS) / _TICKS)
        self._pulses: list[Pulse] = []
        self._looked = clock()
        self._number = 0
        self._heard: dict[int, tuple[str, float]] = {}
        self._answered = 0.0
        self._known_for = 0.0
        self._told: _Standstill | None = None  # the one that lasts, once it is told
        self._stalled: list[_Standstill] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="anybatch-watchdog", daemon=True)

    def pulse(self, rank: int) -> Pulse:
        """A pulse for `rank`, watched from now on."""
        pulse = Pulse(rank, self._explained)
        self._pulses.append(pulse)
        return pulse

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
        """What stood still, since the last call, and has gone on: for the thread that did."""
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
        """See what has changed since the last look, and act."""
        now = self._clock()
        # Time in which this thread did not run either (a stopped process, a machine that slept) is
        # nobody's fault: no more of it counts than was meant to pass.
        elapsed, self._looked = min(now - self._looked, 2 * self._tick), now
        still = self._stillness
        num_beats = sum(pulse.num_beats for pulse in self._pulses)
        culprit = self._culprit()
        ended = still.observe(elapsed, num_beats, culprit.phase, culprit.is_first)
        if ended and self._told is not None:
            self._told.seconds = ended
            self._told = None
        mine = self._word(culprit)
        others = self._listen(mine, elapsed)
        self._arm(mine)
        error = self._sentenced(mine, elapsed)
        if error is None and still.is_over:
            name, slack = self._name(culprit), 2 * self._tick
            error = self._unheard(mine) or judged(name, mine, others, still.limit / 4, slack)
        if error is not None:
            self._act(error, culprit)

    def _run(self) -> None:
        while not self._closing.wait(self._tick):
            with contextlib.suppress(Exception):  # such as no memory for a moment: look again
                self.look()

    def _explained(self, error: PeerLost) -> PeerLost:
        """What the rank that was lost has said, if it has."""
        if self._board is not None:
            self._board.refresh(_ANNOUNCE_SECONDS)
        said = self._board.verdict if self._board else ""
        return PeerLost(said) if said else error

    def _culprit(self) -> Pulse:
        """Whom the others wait for: the first rank here that is at work and waits for none."""
        working = [pulse for pulse in self._pulses if pulse.phase]
        busy = (pulse for pulse in working if not waits_for_others(pulse.threads))
        return next(busy, (working or self._pulses or [_NOBODY])[0])

    def _name(self, culprit: Pulse) -> str:
        """The rank that stands still, in words."""
        size = self._board.size if self._board else len(self._pulses)
        return f"rank {culprit.rank} of {size}" if size > 1 else "training"

    def _word(self, pulse: Pulse) -> Word:
        self._number += 1
        still = self._stillness
        waits = bool(pulse.phase) and waits_for_others(pulse.threads)
        return Word(
            self._number, pulse.step, pulse.phase, waits, still.seconds, still.limit, time.time()
        )

    def _sentenced(self, mine: Word, elapsed: float) -> PeerLost | None:
        """What a rank has said on being ended, if nothing else tells this one: a collective of NCCL
        goes on waiting for it."""
        if self._board is None or not self._board.verdict or not mine.phase:
            return None
        self._known_for += elapsed
        return PeerLost(self._board.verdict) if self._known_for >= _FELT_SECONDS else None

    def _listen(self, mine: Word, elapsed: float) -> list[Heard]:
        """Hang out this rank's word, and hear the others once it has stood still for long."""
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
            elif answered:  # else nothing is known of anybody
                silent += elapsed
            self._heard[rank] = text, silent
            found.append(Heard(rank, Word.loads(text), silent))
        return found

    def _unheard(self, mine: Word) -> PeerLost | None:
        """The board itself is not reached: nothing that hangs there is known to be true."""
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
        """The last resort writes the stacks and ends the process, unless it is put off in time."""
        if not self._last_resort:
            return
        if mine.phase:
            # Until its own deadline, and a little longer than this thread would take.
            left = max(0.0, mine.limit - mine.still) + (_HELD - 1) * mine.limit + 2 * self._tick
            faulthandler.dump_traceback_later(left, exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _act(self, error: Stuck | PeerLost, culprit: Pulse) -> None:
        if self._told is not None:
            return
        begun = self._looked - self._stillness.seconds
        self._told = _Standstill(culprit.step, culprit.phase, begun)
        self._stalled.append(self._told)
        shown = stacks(culprit.threads) if isinstance(error, Stuck) else ""
        sentence = f"{error}\n{shown}".rstrip()
        if self._end is None:
            sys.stderr.write(f"anybatch: {sentence}\n")
            sys.stderr.flush()
            return
        if self._board is not None:
            self._board.announce(sentence, _ANNOUNCE_SECONDS)
        self._end(type(error)(sentence))


@dataclass(slots=True)
class _Standstill:
    """One that was told: where, when it began, and how long it was if that has been seen."""

    step: int
    phase: str
    begun: float
    seconds: float | None = None


_NOBODY = Pulse()
