"""What the agents of the machines of a run tell each other, and whether they can still hear each other.

torch's rendezvous says which machines take part in an attempt, and nothing of how it went: each agent
would decide for itself whether its ranks are started again, and tell its own ranks' failure. Here they
decide together, through the store of the rendezvous, in the name space of the attempt:

    open    the number of the attempt, the machines' names, a moment that all call zero
    pulse   a count by each machine; one that stands still for long has fallen silent
    turn    a machine has come, or one was told to end: all ranks are to stop
    over    some machine's ranks have failed
    told    by each machine, what it saw (`ends.Told`)
    verdict what follows (`ends.Verdict`), by the first that has heard all; the same for all

A thread listens, over a connection of its own, so that a store which has gone away without a word
(its machine has lost its power) stops nobody for longer than `SILENT_SECONDS`. Time in which this
process did not run (its machine slept, or was paused) is nobody's silence.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError

from anybatch.errors import LaunchError
from anybatch.launch.exits import End, Told, Turn, Verdict, judge
from anybatch.launch.network import Deadline, gather_at

T = TypeVar("T")

SILENT_SECONDS = 10.0
"""After which a machine, or the store, that does not give a sign is taken to be gone."""

_TICK_SECONDS = 0.5
_LONGEST_LOOK_SECONDS = 1.0
_ASK_SECONDS = 0.05
_OPEN_SECONDS = 30.0
_FAREWELL_SECONDS = 5.0


class Lost(RuntimeError):
    """The store does not answer."""


@dataclass(slots=True)
class Heard:
    """What the listener has heard of the attempt: whether it is `over`, the `turn`, what the machines
    have `told`, and how many are `waiting` to take part."""

    over: bool = False
    turn: Turn | None = None
    told: list[Told | None] = field(default_factory=list)
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt, as all machines see it.

    Attributes:
        number: from 0; counts every start of the ranks.
        failures: attempts that have failed before.
        index: of this machine.
        names: of all.
        start: the moment zero, in nanoseconds of this machine's monotonic clock.
        store: the name space of the attempt.
    """

    number: int
    failures: int
    index: int
    names: tuple[str, ...]
    start: int
    store: Store

    @property
    def now(self) -> int:
        """Nanoseconds since moment zero."""
        return time.monotonic_ns() - self.start


class _Awake:
    """A clock of the time in which this process runs, for one thread that looks at it again and again:
    what passes between two looks counts as `_LONGEST_LOOK_SECONDS` at most."""

    def __init__(self) -> None:
        self.seconds: float = 0.0
        self._looked = time.monotonic()

    def look(self) -> float:
        """Seconds by now."""
        before, self._looked = self._looked, time.monotonic()
        self.seconds += min(self._looked - before, _LONGEST_LOOK_SECONDS)
        return self.seconds


class Council:
    """The agents' talk.

    Args:
        store: of the rendezvous.
        place: its address, for messages.
        name: of this machine, for messages.
        num_waiting: how many machines wait to take part; None if more than there are cannot be.
        restarts, least, most: see `ends.judge`.
    """

    def __init__(
        self,
        store: TCPStore,
        place: str,
        name: str,
        num_waiting: Callable[[], int] | None,
        *,
        restarts: int,
        least: int,
        most: int,
    ) -> None:
        self.lost: str | None = None
        self._place = place
        self._name = name
        self._num_waiting = num_waiting
        self._restarts, self._least, self._most = restarts, least, most
        self._store: Store = _connection(store)
        self._ear: Store = _connection(store)
        self._attempt: Attempt | None = None
        self._heard = Heard()
        self._beat = 0
        self._pulses: dict[int, tuple[bytes, float]] = {}
        self._listening = _Awake()  # of the thread
        self._checking = _Awake()  # of who calls
        self._num_answers = 0
        self._answered = 0, 0.0  # the number of answers, and when there were no fewer
        self._merging = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="anybatch-council", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------- an attempt

    def open(self, meeting: Store, index: int, size: int) -> Attempt:
        """Begin an attempt with the machines that have met. All call it.

        Args:
            meeting: the name space of this meeting.
            index, size: which of how many machines this is.

        Raises:
            Lost: the store does not answer.
            LaunchError: a machine that had met the others was gone a moment later.
        """
        deadline = Deadline(_OPEN_SECONDS)
        if index == 0:
            number = self._ask(lambda: self._store.add("attempts", 1)) - 1
            failures = 0
            if self._ask(lambda: self._store.check(["failures"])):
                failures = int(self._ask(lambda: self._store.get("failures")))
            self._ask(lambda: meeting.set("opening", json.dumps([number, failures])))
        while not self._ask(lambda: meeting.check(["opening"])):
            if not deadline.left:
                raise LaunchError(f"a machine that had come to {self._place} was gone again.")
            time.sleep(_ASK_SECONDS)
        number, failures = json.loads(self._ask(lambda: meeting.get("opening")))
        store = PrefixStore(f"attempt-{number}", self._store)
        values = {f"machine/{index}": self._name, f"pulse/{index}": "", f"told/{index}": ""}
        if index == 0:
            values.update(over="", turn="", verdict="")
        for key, value in values.items():
            self._ask(lambda key=key, value=value: store.set(key, value))
        gather_at(PrefixStore("start", store), self._place, size, deadline)
        start = time.monotonic_ns()
        names = self._ask(lambda: store.multi_get([f"machine/{i}" for i in range(size)]))
        attempt = Attempt(number, failures, index, tuple(map(bytes.decode, names)), start, store)
        with self._merging:
            self._heard = Heard(told=[None] * size)
            now = self._listening.seconds
            self._pulses = dict.fromkeys(range(size), (b"", now))
            self._attempt = attempt
        return attempt

    @property
    def heard(self) -> Heard:
        """The latest. Raises `Lost` if the store does not answer."""
        self.check()
        return self._heard

    def check(self) -> None:
        """Raises `Lost` if the store does not answer."""
        now = self._checking.look()
        if self._answered[0] != self._num_answers:
            self._answered = self._num_answers, now
        if self.lost is None and now - self._answered[1] > SILENT_SECONDS:
            self.lost = f"it has not answered for {SILENT_SECONDS:g} s"
        if self.lost is not None:
            raise Lost(self.lost)

    def silent(self) -> list[int]:
        """Machines that have given no sign for long and told nothing, by index."""
        limit = self._listening.seconds - SILENT_SECONDS
        told = self._heard.told
        return [i for i, (_, seen) in self._pulses.items() if seen < limit and told[i] is None]

    def take_turn(self, attempt: Attempt, turn: Turn) -> None:
        """Say that the number of machines changes. The first to say so is heard."""
        text = json.dumps(asdict(turn))
        heard = self._ask(lambda: attempt.store.compare_set("turn", "", text))
        with self._merging:
            self._heard.turn = Turn(**json.loads(heard))
        self.end(attempt)

    def end(self, attempt: Attempt) -> None:
        """Say that the attempt is over."""
        self._ask(lambda: attempt.store.set("over", "1"))

    def tell(self, attempt: Attempt, told: Told) -> None:
        """Say what was seen on this machine."""
        text = json.dumps({"done": told.done, "first": told.first and told.first.dumps()})
        self._ask(lambda: attempt.store.set(f"told/{attempt.index}", text))
        with self._merging:
            self._heard.told[attempt.index] = told

    def verdict(self, attempt: Attempt) -> Verdict:
        """What follows from the attempt, when all machines that are not gone have told what they saw.

        Raises:
            Lost: the store does not answer.
        """
        while True:
            heard = self.heard
            turn = heard.turn
            leaving = turn.machine if turn is not None and turn.why == "leave" else None
            gone = self.silent()
            missing = [
                i
                for i, one in enumerate(heard.told)
                if one is None and i != leaving and i not in gone
            ]
            if not missing:
                break
            if self._ask(lambda: attempt.store.get("verdict")):
                break
            time.sleep(_ASK_SECONDS)
        own = judge(
            heard.told,
            heard.turn,
            failures=attempt.failures,
            restarts=self._restarts,
            least=self._least,
            most=self._most,
        )
        text = self._ask(lambda: attempt.store.compare_set("verdict", "", _dumped(own)))
        verdict = _loaded(text)
        self._ask(lambda: self._store.set("failures", str(verdict.failures)))
        with self._merging:
            self._attempt = None
        self._ask(lambda: attempt.store.add("heard", 1))
        return verdict

    def part(self, attempt: Attempt, verdict: Verdict) -> None:
        """Wait until the other machines have heard the last verdict, too, for a while: one of the
        machines serves the store for the others."""
        deadline = Deadline(_FAREWELL_SECONDS)
        turn = self._heard.turn
        leaving = turn is not None and turn.why == "leave"
        staying = len(attempt.names) - len(verdict.gone) - leaving
        with suppress(RuntimeError):
            while deadline.left and self._ask(lambda: attempt.store.add("heard", 0)) < staying:
                time.sleep(_ASK_SECONDS)

    def close(self) -> None:
        """Listen no longer."""
        self._closing.set()
        self._thread.join(SILENT_SECONDS if self.lost is None else 0)

    # ----------------------------------------------------------------------------------- the store

    def _ask(self, question: Callable[[], T]) -> T:
        """The store's answer. Raises `Lost`."""
        answers: list[T] = []
        try:
            Deadline(SILENT_SECONDS).within(lambda: answers.append(question()))
        except RuntimeError as error:
            self.lost = self.lost or str(error)
        if not answers:
            self.lost = self.lost or f"it has not answered for {SILENT_SECONDS:g} s"
            raise Lost(self.lost)
        return answers[0]

    def _listen(self) -> None:
        while not self._closing.wait(_TICK_SECONDS):
            try:
                self._hear()
            except (RuntimeError, RendezvousError) as error:
                self.lost = self.lost or str(error)
                return
            self._num_answers += 1

    def _hear(self) -> None:
        attempt = self._attempt
        if attempt is None:
            self._ear.check(["attempts"])
            self._listening.look()
            return
        store = PrefixStore(f"attempt-{attempt.number}", self._ear)
        size = len(attempt.names)
        self._beat += 1
        store.set(f"pulse/{attempt.index}", str(self._beat))
        keys = [f"{kind}/{i}" for kind in ("pulse", "told") for i in range(size)]
        over, turn, *values = store.multi_get(["over", "turn", *keys])
        waiting = self._num_waiting() if self._num_waiting is not None else 0
        now = self._listening.look()
        with self._merging:
            if attempt is not self._attempt:
                return
            for i, pulse in enumerate(values[:size]):
                if pulse != self._pulses[i][0]:
                    self._pulses[i] = (pulse, now)
            before = self._heard
            self._heard = Heard(
                over=bool(over) or before.over,
                turn=before.turn or (Turn(**json.loads(turn)) if turn else None),
                # What has been told here may have passed this question on its way.
                told=[
                    _told(text) or old for text, old in zip(values[size:], before.told, strict=True)
                ],
                waiting=waiting,
            )


def _connection(store: TCPStore) -> Store:
    """One of its own, for the names of this module: what waits on one does not hold up the other."""
    return PrefixStore("anybatch", store.clone())  # type: ignore[attr-defined]


def _told(text: bytes) -> Told | None:
    if not text:
        return None
    told = json.loads(text)
    return Told(told["done"], End.loads(told["first"]) if told["first"] else None)


def _dumped(verdict: Verdict) -> str:
    return json.dumps({**asdict(verdict), "cause": verdict.cause and verdict.cause.dumps()})


def _loaded(text: bytes) -> Verdict:
    values = json.loads(text)
    cause = End.loads(values["cause"]) if values["cause"] else None
    return Verdict(values["again"], values["failures"], cause, tuple(values["gone"]))
