"""Heartbeat: what the agents of several machines say of themselves, and whether they are still there.

torch's agents share who takes part in an attempt, and nothing of how it went. Each machine here keeps
one word in the store, in the name space of the attempt, and reads those of the others: whether its
ranks are done, whether they are being stopped and why, and which of them failed first. What follows
is computed from the words (`exits.judge`); the first machine to do so writes it down for all.

A thread speaks and listens, so that a store that has gone away without a sign (its machine has lost
its power) stops nobody for longer than `SILENT_SECONDS`. Time in which this process did not run (its
machine slept, or it was paused) is nobody's silence. One machine has no thread and uses no store.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError

from anybatch.launch.exits import Verdict, Word, judge
from anybatch.launch.network import Deadline, gather_at

SILENT_SECONDS = 10.0
"""After which a machine, or the store, that does not give a sign is taken to be gone."""

_TICK_SECONDS = 0.2
_LONGEST_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.05
_OPEN_SECONDS = 30.0
_FAREWELL_SECONDS = 5.0


class Lost(RuntimeError):
    """The store does not answer."""


class AwakeClock:
    """Seconds in which this process ran, for one thread that looks again and again: what passes between
    two looks counts as `_LONGEST_LOOK_SECONDS` at most."""

    def __init__(self) -> None:
        self.seconds: float = 0.0
        self._looked = time.monotonic()

    def look(self) -> float:
        """Seconds by now."""
        before, self._looked = self._looked, time.monotonic()
        self.seconds += min(self._looked - before, _LONGEST_LOOK_SECONDS)
        return self.seconds


class Heartbeat:
    """The words of the machines of an attempt.

    Args:
        store: of the rendezvous; None on one machine.
        name: of this machine, for messages.
        num_waiting: how many machines wait to take part.

    Attributes:
        attempt: its number, from 0; counts every start of the ranks.
        failures: attempts that have failed before.
        index: of this machine among those of the attempt.
        names: of all.
        start: the moment that all call zero, in nanoseconds of this machine's monotonic clock.
        words: of each machine, the last that was heard.
        waiting: how many machines wait to take part.
        lost: why the store does not answer, if so.
    """

    def __init__(
        self, store: TCPStore | None, name: str, num_waiting: Callable[[], int] | None
    ) -> None:
        self.attempt: int = -1
        self.failures: int = 0
        self.index: int = 0
        self.names: tuple[str, ...] = (name,)
        self.start: int = 0
        self.words: list[Word] = [Word()]
        self.waiting: int = 0
        self.lost: str | None = None
        self._name = name
        self._num_waiting = num_waiting
        self._agreed: Verdict | None = None
        self._proposed: Verdict | None = None
        self._board: Store | None = None
        self._seen: list[float] = [0.0]
        self._clock, self._checking = AwakeClock(), AwakeClock()  # of the thread, of who calls
        self._num_rounds, self._answered = 0, (0, 0.0)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None:
            self._store = store.clone()  # type: ignore[attr-defined]  # a connection of its own
            self._thread = threading.Thread(
                target=self._run, name="anybatch-heartbeat", daemon=True
            )
            self._thread.start()

    # ---------------------------------------------------------------------------------- an attempt

    def open(self, meeting: Store, index: int, size: int, place: str) -> None:
        """Begin an attempt with the machines that have met. All call it.

        Args:
            meeting: the name space of this meeting.
            index, size: which of how many machines this is.
            place: where they met, for messages.

        Raises:
            LaunchError: a machine that had met the others was gone a moment later.
        """
        attempt, failures, names = self.attempt + 1, self.failures, (self._name,)
        if self._thread is not None:
            # A machine that has come late counts with the others.
            known = json.dumps([attempt, failures, self._name])
            meeting.set(f"machine/{index}", known)
            gather_at(PrefixStore("start", meeting), place, size, Deadline(_OPEN_SECONDS))
        start = time.monotonic_ns()
        if self._thread is not None:
            texts = meeting.multi_get([f"machine/{i}" for i in range(size)])
            attempts, all_failures, names = zip(*map(json.loads, texts), strict=True)
            attempt, failures = max(attempts), max(all_failures)
        with self._lock:
            self.attempt, self.failures, self.names = attempt, failures, tuple(names)
            self.index, self.start = index, start
            self.words = [Word()] * size
            self._seen = [self._clock.seconds] * size
            self._proposed = self._agreed = None
            self.waiting = 0  # those have been taken in
            self._board = PrefixStore(f"attempt-{attempt}", self._store) if self._thread else None

    @property
    def now(self) -> int:
        """Nanoseconds since moment zero."""
        return time.monotonic_ns() - self.start

    def say(self, **changes: Any) -> None:
        """Change the word of this machine."""
        with self._lock:
            self.words[self.index] = replace(self.words[self.index], **changes)

    def check(self) -> None:
        """Raises `Lost` if the store does not answer."""
        if self._thread is None:
            return
        now = self._checking.look()
        if self._answered[0] != self._num_rounds:
            self._answered = self._num_rounds, now
        if self.lost is None and now - self._answered[1] > SILENT_SECONDS:
            self.lost = f"it has not answered for {SILENT_SECONDS:g} s"
        if self.lost is not None:
            raise Lost(self.lost)

    def heard(self) -> Sequence[Word | None]:
        """The words; None for a machine that has fallen silent before it said how its ranks ended.
        Raises `Lost`."""
        self.check()
        with self._lock:
            limit = self._clock.seconds - SILENT_SECONDS
            return [
                word
                if seen >= limit or word.told or word.turn == "leave" or i == self.index
                else None
                for i, (word, seen) in enumerate(zip(self.words, self._seen, strict=True))
            ]

    def verdict(self, *, restarts: int, least: int, most: int) -> Verdict:
        """What follows from the attempt, when all machines that are not gone have said how their ranks
        ended; the same on all. See `exits.judge` for the arguments. Raises `Lost`."""
        while True:
            words = self.heard()
            if all(word is None or word.told or word.turn == "leave" for word in words):
                break
            if self._agreed is not None:
                break
            time.sleep(_POLL_SECONDS)
        own = judge(words, failures=self.failures, restarts=restarts, least=least, most=most)
        if self._thread is None:
            agreed = own
        else:
            self._proposed = own
            while (agreed := self._agreed) is None:
                self.check()
                time.sleep(_POLL_SECONDS)
        self.failures = agreed.failures
        return agreed

    def close(self) -> None:
        """Say no more, when the other machines have heard the last word, or have had time to: one of
        the machines serves the store for the others."""
        if self._thread is None:
            return
        self.say(left=True)
        # One that leaves the others to go on does not wait for them.
        leaves = self.words[self.index].turn == "leave"
        deadline = Deadline(0 if leaves else _FAREWELL_SECONDS)
        with suppress(Lost):
            while deadline.left and not all(word is None or word.left for word in self.heard()):
                time.sleep(_POLL_SECONDS)
        self._closing.set()
        self._thread.join(SILENT_SECONDS if self.lost is None else 0)

    # ----------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            closing = self._closing.wait(_TICK_SECONDS)
            try:
                self._speak_and_listen()
            except (RuntimeError, RendezvousError) as error:
                self.lost = self.lost or str(error)
                return
            self._num_rounds += 1
            if closing:
                return

    def _speak_and_listen(self) -> None:
        with self._lock:
            board, index, own = self._board, self.index, self.words[self.index]
            size, proposed = len(self.words), self._proposed
        if board is None:
            self._store.check(["attempt"])
            self._clock.look()
            return
        board.set(f"word/{index}", own.dumps(self._num_rounds))
        names = [f"word/{i}" for i in range(size)]
        texts = [board.get(n) if board.check([n]) else b"" for n in names]
        agreed = None
        if proposed is not None:
            agreed = Verdict.loads(board.compare_set("verdict", "", proposed.dumps()))
        elif board.check(["verdict"]):
            agreed = Verdict.loads(board.get("verdict"))
        waiting = self._num_waiting() if self._num_waiting is not None else 0
        now = self._clock.look()
        with self._lock:
            if board is not self._board:
                return
            self.waiting, self._agreed = waiting, agreed
            for i, text in enumerate(texts):
                word = Word.loads(text)
                if word is None or i == index:
                    continue
                if word.beat != self.words[i].beat:
                    self._seen[i] = now
                self.words[i] = word
