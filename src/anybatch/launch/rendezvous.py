"""Rendezvous of the elastic agents: which machines take part in an attempt, and in which order.

On one machine the agent is alone, so `Rendezvous` answers by itself and reads nothing from the store.

On several, torch's `DynamicRendezvousHandler` keeps its state in the store as a pickle, which can run
code, and anything that reaches the store's port can write there. `SignedBackend` therefore puts before
the state an HMAC-SHA256 with a secret that the machines share, and hands to torch only a state whose
signature holds.

Ranks meet in the agents' store (torch's variables `MASTER_ADDR` and `MASTER_PORT` name it), so that a
machine opens no further port for them, and it outlives any rank.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
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

from anybatch.launch.heartbeat import Heartbeat
from anybatch.launch.network import Deadline, joined
from anybatch.process.signing import signed, verified

RUN = "anybatch"
_PURPOSE = "rendezvous"

_POLL_SECONDS = 0.1
_GOODBYE_SECONDS = 5.0
_TRIES = 3
_SEPARATE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Rendezvous(RendezvousHandler):
    """The meeting of the agents, from the view of one of them.

    Args:
        store: that the agents share.
        address: host and port of it, which ranks are given too.
        machines: torch's rendezvous of several machines; None on one machine.
        heartbeat: opened for each attempt; it sees, too, that machines wait to take part.
        patience: entered while others are waited for.
    """

    def __init__(
        self,
        store: TCPStore,
        address: tuple[str, int],
        machines: DynamicRendezvousHandler | None,
        heartbeat: Heartbeat,
        patience: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.heartbeat: Heartbeat = heartbeat
        self._store = store
        self._info = RendezvousStoreInfo(*address)
        self._machines = machines
        self._patience = patience
        self._left = False

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
        """See the base class. Raises `heartbeat.Lost`, too."""
        if self._machines is None:
            self.heartbeat.open(self._store, 0, 1, "")
            name = f"attempt-{self.heartbeat.attempt}"
            return RendezvousInfo(PrefixStore(name, self._store), 0, 1, self._info)
        for tries_left in reversed(range(_TRIES)):
            try:
                return self._meet(self._machines)
            except RuntimeError:  # a machine was gone as soon as it had come
                self.heartbeat.check()
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
        """See the base class. The agent goes by `heartbeat.waiting`, which waits for no store."""
        return 0

    def shutdown(self) -> bool:
        """See the base class."""
        return self._machines is None or self._machines.shutdown()

    def leave(self, closing: bool) -> None:
        """Take part no more; `closing`: nor shall anybody else."""
        self._left = True
        if self._machines is None:
            return
        goodbye = self._machines.shutdown if closing else self._machines._stop_heartbeats
        with suppress(RendezvousError, RuntimeError):  # who served the store may have left before
            Deadline(_GOODBYE_SECONDS).within(goodbye)

    def _meet(self, machines: DynamicRendezvousHandler) -> RendezvousInfo:
        """torch's meeting, in a thread, since a store that has gone away does not answer it."""
        outcome: list[RendezvousInfo] = []
        failure: list[BaseException] = []

        def meet() -> None:
            try:
                with _no_further_store():
                    met = machines.next_rendezvous()
                place = joined(self._info.master_addr, self._info.master_port)
                self.heartbeat.open(met.store, met.rank, met.world_size, place)
                outcome.append(RendezvousInfo(met.store, met.rank, met.world_size, self._info))
            except BaseException as error:
                failure.append(error)
            if self._left:
                machines._stop_heartbeats()

        thread = threading.Thread(target=meet, name="anybatch-meeting", daemon=True)
        thread.start()
        with self._patience():
            while thread.is_alive():
                thread.join(_POLL_SECONDS)
                self.heartbeat.check()
        if failure:
            raise failure[0]
        return outcome[0]


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
    pulse_seconds: int,
    silent_seconds: float,
) -> DynamicRendezvousHandler:
    """torch's rendezvous of `least` to `most` machines, of which this one has `address`.

    Args:
        store, secret: see `SignedBackend`.
        address: of this machine.
        least, most: number of machines.
        join_seconds: within which enough have to come.
        last_call_seconds: for which more are waited for when enough have come.
        pulse_seconds: between two signs of life.
        silent_seconds: without a sign, after which a machine is gone.
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
        keep_alive_interval=pulse_seconds,
        keep_alive_max_attempt=round(silent_seconds / pulse_seconds),
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
