"""Rendezvous of the elastic agents: which machines take part in an attempt, and how it went for each.

On one machine the agent is alone, so `Rendezvous` answers by itself and reads nothing from the store.

On several, torch's `DynamicRendezvousHandler` keeps its state in the store as a pickle, which can run
code, and anything that reaches the store's port can write there. `SignedBackend` therefore puts before
the state an HMAC-SHA256 with a secret that the machines share, and hands to torch only a state whose
signature holds. torch also drops a machine that no longer gives a sign of life.

torch's agents do not tell each other how an attempt went. Here each attempt has three kinds of keys:
`done/I` when all ranks of machine I are done; `over`, why the attempt ends, by the first machine
that knows; `end/I`, the first bad end on machine I. From these all machines find the same cause.

A store whose machine has lost its power does not answer, and torch would wait for it without end. So
every question to it has a deadline. Ranks meet in the agents' store (torch's variables `MASTER_ADDR`
and `MASTER_PORT` name it), so a machine opens no further port for them, and it outlives any rank.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Literal, TypeAlias, TypeVar, cast

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
)

from anybatch.launch.exits import End
from anybatch.launch.network import Deadline, gather_at, joined
from anybatch.process.signing import signed, verified

T = TypeVar("T")

Why: TypeAlias = Literal["failed", "grow", "leave"]
"""Why an attempt ends: a rank or a machine failed, a machine has come, one was told to end."""

RUN = "anybatch"
_PURPOSE = "rendezvous"

SILENT_SECONDS = 10.0
"""After which a machine, or the store, that does not give a sign is taken to be gone."""

_OPEN_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_ENDS_SECONDS = 5.0
_GOODBYE_SECONDS = 5.0
_TRIES = 3
_SEPARATE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Lost(RuntimeError):
    """The store does not answer."""


class Rendezvous(RendezvousHandler):
    """The meeting of the agents, from the view of one of them.

    Args:
        store: that the agents share.
        address: host and port of it, which ranks are given too.
        machines: torch's rendezvous of several machines; None on one machine.
        name: of this machine, for messages.
        join_seconds: within which machines have to meet.
        patience: entered while others are waited for.

    Attributes:
        attempt: its number, from 0; counts every start of the ranks, the same on all machines.
        failures: attempts that have failed before, likewise.
        index: of this machine among those of the attempt.
        names: of all.
        start: the moment that all call zero, in nanoseconds of this machine's monotonic clock.
    """

    def __init__(
        self,
        store: TCPStore,
        address: tuple[str, int],
        machines: DynamicRendezvousHandler | None,
        name: str,
        join_seconds: float,
        patience: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.attempt: int = -1
        self.failures: int = 0
        self.index: int = 0
        self.names: Sequence[str] = (name,)
        self.start: int = 0
        self._name = name
        self._store = store
        self._info = RendezvousStoreInfo(*address)
        self._machines = machines
        self._join_seconds = join_seconds
        self._patience = patience
        self._meeting: Store | None = None  # the name space of the attempt
        self._why: Why | None = None
        self._looked = 0.0
        self._left = False

    # ------------------------------------------------------------------------- what torch's agent asks

    @property
    def use_agent_store(self) -> bool:
        """See the base class."""
        return True

    def get_backend(self) -> str:
        """See the base class."""
        return RUN

    def get_run_id(self) -> str:
        """See the base class."""
        return RUN

    def next_rendezvous(self) -> RendezvousInfo:
        """See the base class. Raises `Lost`, too."""
        self._why = None
        machines = self._machines
        if machines is None:
            self.attempt += 1
            self.start = time.monotonic_ns()
            store = PrefixStore(f"attempt-{self.attempt}", self._store)
            return RendezvousInfo(store, 0, 1, self._info)
        limit = self._join_seconds + _OPEN_SECONDS + SILENT_SECONDS
        for tries_left in reversed(range(_TRIES)):
            try:
                with self._patience():
                    met = self._ask(lambda: self._meet(machines), limit)
                return RendezvousInfo(met.store, met.rank, met.world_size, self._info)
            except Lost:
                raise
            except RuntimeError:  # a machine was gone as soon as it had come
                if not tries_left:
                    raise
        raise AssertionError

    def is_closed(self) -> bool:
        """See the base class."""
        return self._machines is not None and self._machines.is_closed()

    def set_closed(self) -> None:
        """See the base class."""
        if self._machines is not None:
            self._machines.set_closed()

    def num_nodes_waiting(self) -> int:
        """See the base class. The agent goes by `look`, which waits for no store."""
        return 0

    def shutdown(self) -> bool:
        """See the base class."""
        return self._machines is None or self._machines.shutdown()

    # -------------------------------------------------------------------------- an attempt, and its end

    def look(self, is_done: bool) -> Literal["runs", "done", "over"]:
        """How the attempt goes on all machines. `is_done`: the ranks of this one are. Raises `Lost`."""
        meeting, machines = self._meeting, self._machines
        if meeting is None or machines is None:
            return "done" if is_done else "runs"
        if time.monotonic() < self._looked + _LOOK_SECONDS:
            return "runs"
        done = [f"done/{i}" for i in range(len(self.names))]

        def look() -> Literal["runs", "done", "over"]:
            if is_done:
                meeting.set(done[self.index], "1")
            if meeting.check(done):
                return "done"
            if meeting.check(["over"]):
                return "over"
            num_waiting = machines.num_nodes_waiting()
            if len(machines._state_holder.state.participants) < len(done):  # torch has dropped one
                self._end(meeting, "failed")
                return "over"
            if num_waiting and not any(meeting.check([name]) for name in done):
                self._end(meeting, "grow")
                return "over"
            return "runs"

        found = self._ask(look)
        self._looked = time.monotonic()
        return found

    def end(self, why: Why) -> Why:
        """The attempt is over. Why it is, as the first machine says that knew it. Raises `Lost`."""
        meeting = self._meeting
        if meeting is None:
            self._why = self._why or why
            return self._why
        return self._ask(lambda: self._end(meeting, why))

    def tell(self, end: End | None) -> None:
        """Tell the other machines the first bad end of a rank here, if there was one. Raises `Lost`."""
        meeting, text = self._meeting, json.dumps(end and asdict(end))
        if meeting is not None:
            self._ask(lambda: meeting.set(f"end/{self.index}", text))

    def ends(self, own: End | None) -> tuple[Sequence[End], Sequence[str]]:
        """The first bad ends that machines have told, `own` here, and the names of the machines that
        tell nothing. Raises `Lost`."""
        meeting, deadline = self._meeting, Deadline(_ENDS_SECONDS)
        if meeting is None:
            return [end for end in (own,) if end is not None], ()
        names = {f"end/{i}": name for i, name in enumerate(self.names)}
        while not self._ask(lambda: meeting.check(list(names))) and deadline.left:
            time.sleep(_LOOK_SECONDS)
        there = [key for key in names if self._ask(partial(meeting.check, [key]))]
        texts = self._ask(lambda: [meeting.get(key) for key in there])
        ends = [End(**end) for text in texts if (end := json.loads(text)) is not None]
        return ends, [name for key, name in names.items() if key not in there]

    def leave(self, closing: bool) -> None:
        """Take part no more; `closing`: nor shall anybody else. Then the others get to read what was
        told: one of the machines serves the store for them."""
        self._left = True
        machines, meeting = self._machines, self._meeting
        if machines is None:
            return
        with suppress(RendezvousError, RuntimeError):  # who served the store may have left before
            goodbye = machines.shutdown if closing else machines._stop_heartbeats
            Deadline(_GOODBYE_SECONDS).within(goodbye)
            deadline = Deadline(_GOODBYE_SECONDS if closing else 0)
            if meeting is not None:
                self._ask(lambda: meeting.add("left", 1))
                while deadline.left and self._ask(lambda: meeting.add("left", 0)) < len(self.names):
                    time.sleep(_LOOK_SECONDS)

    def _end(self, meeting: Store, why: Why) -> Why:
        return cast(Why, meeting.compare_set("over", "", why).decode())

    def _ask(self, question: Callable[[], T], seconds: float | None = None) -> T:
        """What the store answers. Raises `Lost`."""
        seconds = SILENT_SECONDS if seconds is None else seconds
        answer = Deadline(seconds).within(lambda: (question(),))
        if answer is None:
            raise Lost(f"it has not answered for {seconds:g} s")
        return answer[0]

    def _meet(self, machines: DynamicRendezvousHandler) -> RendezvousInfo:
        """torch's meeting, after which all machines count alike, and from the same moment."""
        with _no_further_store():
            met = machines.next_rendezvous()
        if self._left:
            machines._stop_heartbeats()
        place = joined(self._info.master_addr, self._info.master_port)
        # A machine that has come late counts with the others.
        known = json.dumps([self.attempt + 1, self.failures, self._name])
        met.store.set(f"machine/{met.rank}", known)
        deadline = Deadline(_OPEN_SECONDS)
        gather_at(PrefixStore("start", met.store), place, met.world_size, deadline)
        self.start = time.monotonic_ns()
        texts = met.store.multi_get([f"machine/{i}" for i in range(met.world_size)])
        attempts, failures, self.names = zip(*map(json.loads, texts), strict=True)
        self.attempt, self.failures = max(attempts), max(failures)
        self.index, self._meeting = met.rank, met.store
        return met


class SignedBackend(RendezvousBackend):
    """The state of torch's rendezvous in a store, signed with `secret`. A state with another signature,
    or none, raises `RendezvousStateError` before anything unpickles it."""

    def __init__(self, store: TCPStore, secret: str) -> None:
        self._backend = C10dRendezvousBackend(store, RUN)
        self._secret = secret

    @property
    def name(self) -> str:
        """See the base class."""
        return RUN

    def get_state(self) -> tuple[bytes, Token] | None:
        """See the base class."""
        found = self._backend.get_state()
        return None if found is None else (self._verified(found[0]), found[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """See the base class."""
        found = self._backend.set_state(signed(state, self._secret, _PURPOSE), token)
        return None if found is None else (self._verified(found[0]), found[1], found[2])

    def _verified(self, found: bytes) -> bytes:
        state = verified(found, self._secret, _PURPOSE)
        if state is None:
            raise RendezvousStateError(
                "the state of the rendezvous is not signed with this machine's secret: give all"
                " machines the same one, and see who else reaches the port"
            )
        return state


def of_machines(
    store: TCPStore,
    secret: str,
    address: str,
    *,
    least: int,
    most: int,
    join_seconds: float,
    last_call_seconds: float,
) -> DynamicRendezvousHandler:
    """torch's rendezvous of `least` to `most` machines, of which this one has `address`.

    Args:
        store, secret: see `SignedBackend`.
        address: of this machine.
        least, most: number of machines.
        join_seconds: within which enough have to come.
        last_call_seconds: for which more are waited for when enough have come.
    """
    return DynamicRendezvousHandler.from_backend(
        run_id=RUN,
        store=store,
        backend=SignedBackend(store, secret),
        min_nodes=least,
        max_nodes=most,
        local_addr=address,
        timeout=RendezvousTimeout(
            join=timedelta(seconds=max(1.0, join_seconds)),
            last_call=timedelta(seconds=last_call_seconds),
        ),
        keep_alive_interval=1,
        keep_alive_max_attempt=round(SILENT_SECONDS),
    )


@contextmanager
def _no_further_store() -> Iterator[None]:
    """torch serves no store of its own for the ranks, which would listen on all interfaces."""
    before = os.environ.get(_SEPARATE_STORE)
    os.environ[_SEPARATE_STORE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SEPARATE_STORE, None)
        else:
            os.environ[_SEPARATE_STORE] = before
