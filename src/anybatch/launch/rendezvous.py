"""Rendezvous of the elastic agents: the machines of an attempt, and how it ended on each.

On one machine there is only one agent, so `Rendezvous` needs no information from the store.

On several machines, torch's `DynamicRendezvousHandler` keeps its state in the store as a pickle,
which can execute code, and any program that reaches the store's port can write to it.
`SignedBackend` therefore prefixes the state with an HMAC-SHA256 with a secret that the machines
share, and passes a state to torch only if its signature is valid. torch also removes a machine that
no longer sends heartbeats.

torch's agents do not tell each other how an attempt ended. Here each attempt has three kinds of
keys: `done/I` is set when all ranks of machine I are done; `over` is the reason why the attempt
ends, set by the first machine that knows it; `end/I` is the first failed end on machine I. From
these, all machines determine the same cause.

If the machine that serves the store loses power, the store does not answer, and torch would wait
for it forever. So every request to it has a deadline. Ranks meet in the agents' store (torch's
variables `MASTER_ADDR` and `MASTER_PORT` refer to it), so no further port is opened for them, and
the store outlives any single rank.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
"""Why an attempt ends: a rank or a machine failed, a machine joined, or a machine was asked to end."""

RUN = "anybatch"
_PURPOSE = "rendezvous"

SILENT_SECONDS = 10.0
"""Time without a sign of life after which a machine, or the store, is considered lost."""

_OPEN_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_ENDS_SECONDS = 5.0
_GOODBYE_SECONDS = 5.0
_TRIES = 3
_SEPARATE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Lost(RuntimeError):
    """Raised when the store does not answer."""


class Rendezvous(RendezvousHandler):
    """The rendezvous of the agents, as seen from one of them.

    Args:
        store: store that the agents share.
        address: host and port of the store, which are also passed to the ranks.
        machines: torch's rendezvous of several machines; None on one machine.
        name: name of this machine, for messages.
        join_seconds: time limit for machines to meet.

    Attributes:
        attempt: number of the attempt, from 0; counts every start of the ranks, the same on all
            machines.
        failures: number of attempts that have failed before, the same on all machines.
        index: index of this machine among those of the attempt.
        names: names of the machines of the attempt.
        start: common zero of time of all machines, in nanoseconds of this machine's monotonic
            clock.
    """

    def __init__(
        self,
        store: TCPStore,
        address: tuple[str, int],
        machines: DynamicRendezvousHandler | None,
        name: str,
        join_seconds: float,
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
        self._meeting: Store | None = None  # the namespace of the attempt
        self._looked = 0.0
        self._left = False

    # ------------------------------------------------------------------------- what torch's agent asks

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return RUN

    def get_run_id(self) -> str:
        return RUN

    def next_rendezvous(self) -> RendezvousInfo:
        """See the base class. Also raises `Lost`."""
        machines = self._machines
        if machines is None:
            self.attempt += 1
            self.start = time.monotonic_ns()
            store = PrefixStore(f"attempt-{self.attempt}", self._store)
            return RendezvousInfo(store, 0, 1, self._info)
        limit = self._join_seconds + _OPEN_SECONDS + SILENT_SECONDS
        for tries_left in reversed(range(_TRIES)):
            try:
                met = self._ask(lambda: self._meet(machines), limit)
                return RendezvousInfo(met.store, met.rank, met.world_size, self._info)
            except Lost:
                raise
            except RuntimeError:  # a machine left as soon as it had joined
                if not tries_left:
                    raise
        raise AssertionError

    def is_closed(self) -> bool:
        return self._machines is not None and self._machines.is_closed()

    def set_closed(self) -> None:
        if self._machines is not None:
            self._machines.set_closed()

    def num_nodes_waiting(self) -> int:
        """See the base class. The agent uses `look` instead, whose requests to the store have a
        deadline."""
        return 0

    def shutdown(self) -> bool:
        return self._machines is None or self._machines.shutdown()

    # -------------------------------------------------------------------------- an attempt, and its end

    def look(self, is_done: bool) -> Literal["runs", "done", "over"]:
        """The state of the attempt on all machines. `is_done`: whether the ranks of this one are
        done. Raises `Lost`."""
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
        """End the attempt. Returns the reason of the first machine that ended it. Raises `Lost`."""
        meeting = self._meeting
        return why if meeting is None else self._ask(lambda: self._end(meeting, why))

    def tell(self, end: End | None) -> None:
        """Report the first failed end of a rank of this machine, if any, to the other machines.
        Raises `Lost`."""
        meeting, text = self._meeting, json.dumps(end and asdict(end))
        if meeting is not None:
            self._ask(lambda: meeting.set(f"end/{self.index}", text))

    def ends(self, own: End | None) -> tuple[Sequence[End], Sequence[str]]:
        """The first failed ends that the machines reported (on one machine, `own`), and the names
        of the machines that reported nothing. Raises `Lost`."""
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
        """Leave the rendezvous; `closing` also closes it for all other machines, and waits for them
        to read the reports of this machine, since one of the machines serves the store."""
        self._left = True
        machines, meeting = self._machines, self._meeting
        if machines is None:
            return
        with suppress(RendezvousError, RuntimeError):  # the store may already be closed
            goodbye = machines.shutdown if closing else machines._stop_heartbeats
            Deadline(_GOODBYE_SECONDS).within(goodbye)
            deadline = Deadline(_GOODBYE_SECONDS if closing else 0)
            if meeting is not None:
                self._ask(lambda: meeting.add("left", 1))
                while deadline.left and self._ask(lambda: meeting.add("left", 0)) < len(self.names):
                    time.sleep(_LOOK_SECONDS)
                if closing:  # else torch prints a stack on those that look when the store is gone
                    time.sleep(2 * _LOOK_SECONDS)

    def _end(self, meeting: Store, why: Why) -> Why:
        return cast(Why, meeting.compare_set("over", "", why).decode())

    def _ask(self, question: Callable[[], T], seconds: float | None = None) -> T:
        """The answer of the store to `question`. Raises `Lost` if there is none in time."""
        seconds = SILENT_SECONDS if seconds is None else seconds
        answer = Deadline(seconds).within(lambda: (question(),))
        if answer is None:
            raise Lost(f"it has not answered for {seconds:g} s")
        return answer[0]

    def _meet(self, machines: DynamicRendezvousHandler) -> RendezvousInfo:
        """Run torch's rendezvous, then make all machines agree on the counts and the start time."""
        with _no_further_store():
            met = machines.next_rendezvous()
        if self._left:
            machines._stop_heartbeats()
        place = joined(self._info.master_addr, self._info.master_port)
        # A machine that joined late adopts the counts of the others.
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
    """Keeps the state of torch's rendezvous in a store, signed with `secret`. A state with another
    signature, or with none, raises `RendezvousStateError` before it is unpickled."""

    def __init__(self, store: TCPStore, secret: str) -> None:
        self._backend = C10dRendezvousBackend(store, RUN)
        self._secret = secret

    @property
    def name(self) -> str:
        return RUN

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._backend.get_state()
        return None if found is None else (self._verified(found[0]), found[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
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
    """Create torch's rendezvous of `least` to `most` machines.

    Args:
        store, secret: see `SignedBackend`.
        address: address of this machine.
        least, most: minimum and maximum number of machines.
        join_seconds: time limit for the minimum number of machines to join.
        last_call_seconds: how long to wait for further machines after that.
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
    """Prevent torch from serving another store for the ranks, which would listen on all interfaces."""
    before = os.environ.get(_SEPARATE_STORE)
    os.environ[_SEPARATE_STORE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SEPARATE_STORE, None)
        else:
            os.environ[_SEPARATE_STORE] = before
