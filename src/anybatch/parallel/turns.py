"""Turns: several parties, each in a thread, exactly one of which runs at a time.

A party gives its turn away where it says so (`pass_on`), where it waits for the others (`meet`), and
when it has ended. The next in order that can run gets it, so the order of everything is a function of
what the parties do and of no clock.

    party 0   | runs, passes on |                 | runs, meets |                            | goes on
    party 1                     | runs, passes on |             | runs, meets, goes on, ends |

Nobody waits for one that will not come: if a party ends, or is interrupted, while others wait for it,
they are released with `PeerFailed`. A Ctrl-C may strike the main thread between any two instructions,
so what changes hands here can be done again without harm, and is until it is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import Enum
from queue import SimpleQueue
from typing import Any, final

from anybatch.errors import PeerFailed


class _State(Enum):
    READY = "has the turn, or could run if it had"
    WAITING = "waits for the others to meet it"
    ENDED = "has nothing more to do"


@final
class _Round:
    """One meeting of all parties: what each brought, and what came of it."""

    def __init__(self, size: int) -> None:
        self.kind: str = ""
        self.values: list[Any] = [None] * size
        self.num_there: int = 0
        self.over: bool = False
        self.result: Any = None
        self.error: BaseException | None = None


@final
class Turns:
    """The turn among `size` parties, numbered from 0.

    Args:
        size: number of parties.
        save: called with a party's number before it gives its turn away.
        load: called with a party's number when it has got it back.
    """

    def __init__(self, size: int, save: Callable[[int], None], load: Callable[[int], None]) -> None:
        self._size = size
        self._save = save
        self._load = load
        self._lock = threading.Lock()
        # Told that something has changed; looked at is what has.
        self._wake: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(size)]
        self._all_ended: SimpleQueue[None] = SimpleQueue()
        self._states = [_State.ENDED] * size
        self._holder: int | None = None
        self._round = _Round(size)
        self._broken = ""  # why no meeting can be any more; empty: they can

    def begin(self) -> None:
        """All parties can run; party 0 has the turn. They must all have ended."""
        self._broken = ""
        self._round = _Round(self._size)
        self._states = [_State.READY] * self._size
        self._holder = 0

    def wait(self, party: int) -> None:
        """Until `party` has the turn."""
        while self._holder != party:
            self._wake[party].get()

    def pass_on(self, party: int) -> None:
        """Let others that can run have the turn, and wait until it is back."""
        if any(s is _State.READY for i, s in enumerate(self._states) if i != party):
            self._switch(party)

    def meet(
        self, party: int, kind: str, value: Any, combine: Callable[[Sequence[Any]], Any]
    ) -> Any:
        """What `combine` makes of the values of all parties, in their order. The last to come calls it;
        an error that it raises is raised by all.

        Raises `PeerFailed` if one of the others has ended.
        """
        meeting = self._round
        with self._lock:
            if not self._broken and _State.ENDED in self._states:
                gone = self._states.index(_State.ENDED)
                self._broken = f"rank {gone} has ended, while rank {party} waits for it in {kind}"
            if not self._broken and meeting.kind not in ("", kind):
                self._broken = f"rank {party} has come to {kind}, and others to {meeting.kind}"
            if self._broken:
                raise PeerFailed(f"{self._broken}.")
            meeting.kind = kind
            meeting.values[party] = value
            meeting.num_there += 1
            last = meeting.num_there == self._size
            if not last:
                self._states[party] = _State.WAITING
        if last:
            self._hold(meeting, combine)
        else:
            self._switch(party)
            if not meeting.over:
                raise PeerFailed(f"{self._broken}.")
        if meeting.error is not None:
            raise meeting.error
        return meeting.result

    def break_off(self, reason: str) -> None:
        """Nobody can be met any more: those who wait are released."""
        with self._lock:
            self._release(reason)

    def end(self, party: int) -> None:
        """`party`, which has the turn, has nothing more to do."""
        with self._lock:
            self._states[party] = _State.ENDED
        self._give(party)

    def wait_for_all(self) -> None:
        """Until all parties have ended."""
        while self._holder is not None:
            self._all_ended.get()

    def _hold(self, meeting: _Round, combine: Callable[[Sequence[Any]], Any]) -> None:
        try:
            meeting.result = combine(meeting.values)
        except BaseException as error:
            meeting.error = error
        meeting.values = []
        with self._lock:
            meeting.over = True
            self._round = _Round(self._size)
            self._states = [_State.READY] * self._size

    def _switch(self, party: int) -> None:
        self._save(party)
        interrupt = self.insist(lambda: (self._give(party), self.wait(party)))
        self._load(party)
        if interrupt is not None:
            raise interrupt

    def insist(self, action: Callable[[], Any]) -> BaseException | None:
        """Do `action`, which only hands over and waits, however often it is interrupted; the first
        interrupt, or None. It breaks off the meetings, so that the wait is a short one."""
        interrupt: BaseException | None = None
        while True:
            try:
                if interrupt is not None:
                    self.break_off(f"rank 0 was interrupted by {type(interrupt).__name__}")
                action()
                return interrupt
            except BaseException as error:
                interrupt = interrupt or error

    def _give(self, party: int) -> None:
        """Give the turn to the next one that can run, if `party` has it."""
        with self._lock:
            if self._holder == party:
                self._holder = self._next(party)
            holder = self._holder
        if holder is None:
            self._all_ended.put(None)
        else:
            self._wake[holder].put(None)

    def _next(self, party: int) -> int | None:
        if _State.READY not in self._states and _State.WAITING in self._states:
            waiting = self._states.index(_State.WAITING)
            self._release(
                f"rank {party} has ended, while rank {waiting} waits for it in {self._round.kind}"
            )
        order = [(party + i) % self._size for i in range(1, self._size + 1)]
        return next((i for i in order if self._states[i] is _State.READY), None)

    def _release(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._states = [_State.READY if s is _State.WAITING else s for s in self._states]
