"""torch's elastic agent, run in this process: the part of the floor that imports it.

torch brings: the rendezvous of agents, the processes, their variables, signals. Added here: every rank
is tied to its agent (`worker`, `janitor`), the order in which ranks end is seen as it happens
(`watch`), agents tell each other how and decide together what follows (`ends`, `council`), and what
torch says on the way into its log is left to the errors of this package.

The agent installs handlers for SIGTERM, SIGINT, SIGHUP, SIGQUIT and SIGUSR1 in the main thread; they
are put back. In another thread signals are not handled. `os.environ` is not changed.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    SignalException,
    SubprocessContext,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from anybatch import early_signals
from anybatch.errors import LaunchError
from anybatch.launch import janitor
from anybatch.launch.council import SILENT_SECONDS, Attempt, Council
from anybatch.launch.exits import End, Told, Turn, Verdict, first, read
from anybatch.launch.membership import ATTEMPT
from anybatch.launch.network import LOOPBACK, Deadline, joined, literal, meet, route_to
from anybatch.launch.rendezvous import Rendezvous, of_machines
from anybatch.launch.watch import Watch
from anybatch.silence import silenced

_POLL_SECONDS = 0.1

LAST_CALL_SECONDS = 5.0
"""For which machines wait for more of them, when there are enough but not as many as may be."""

_SETTLE_SECONDS = 3.0
_MEETING_SECONDS = 30.0
_PULSE_SECONDS = 2
_PATIENCE_SECONDS = 6.0  # longer than the last call
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Orders:
    """What an agent is to do.

    Attributes:
        ranks: processes on this machine.
        least, most: machines.
        meeting: host and port where the agents of several machines meet.
        secret: that they share.
        timeout_seconds: within which they have to.
        grace_seconds: that ranks get to end after a signal, or after one of them failed.
        restarts: how often all ranks are started again after one failed, see `ends`.
        folder: private, for what passes between agent and ranks.
        logs: where ranks but rank 0 write.
        silence_fails: whether a rank that ends with status 0 and leaves no result has failed.
    """

    ranks: int
    least: int
    most: int
    meeting: tuple[str, int] | None
    secret: str
    timeout_seconds: float
    grace_seconds: float
    restarts: int
    folder: Path
    logs: Path
    silence_fails: bool


@dataclass(slots=True)
class Ending:
    """How the last attempt ended.

    Attributes:
        attempt: its number, from 0.
        world_size: ranks on all machines.
        ends: of the ranks of this machine, by local rank; none if none were started.
        cause: the end of a rank, on any machine, that caused the others, if the machines could agree
            on one.
        here: whether it was a rank of this machine.
        silent: machines that had fallen silent, by name.
        signal: what the agent was told to end by, if it was.
        lost: what the agents said to each other when they lost each other, if they did.
    """

    attempt: int = 0
    world_size: int = 0
    ends: dict[int, End] = field(default_factory=dict)
    cause: End | None = None
    here: bool = False
    silent: tuple[str, ...] = ()
    signal: signal.Signals | None = None
    lost: str | None = None


def run(orders: Orders, arguments: Sequence[str], tell: Callable[[str], None]) -> Ending:
    """Start the ranks, again where the rule of `ends` says so, and wait for their end.

    Args:
        orders: see there.
        arguments: of `worker`, after the first three.
        tell: is given a sentence whenever ranks are started again, and while others are waited for.

    Raises:
        LaunchError: the agents of several machines did not meet.
        KeyboardInterrupt: before any rank was started.
    """
    with _quiet(), ExitStack() as stack:
        store, address, place = _store(orders, tell)
        handler = _rendezvous(orders, store, address)
        stack.callback(_end_all, orders.folder)
        council = Council(
            store,
            place,
            socket.gethostname(),
            handler.num_nodes_waiting if orders.most > 1 else None,
            restarts=orders.restarts,
            least=orders.least,
            most=orders.most,
        )
        handler.check = council.check
        stack.callback(council.close)
        where = _Where()
        spec = WorkerSpec(
            role="rank",
            local_world_size=orders.ranks,
            entrypoint=sys.executable,
            args=(
                "-m",
                "anybatch.launch.worker",
                str(orders.folder),
                str(os.getpid()),
                str(orders.logs),
                *arguments,
            ),
            rdzv_handler=handler,
            max_restarts=orders.restarts,
            monitor_interval=_POLL_SECONDS,
        )
        agent = _Agent(spec, where, orders, council, tell)
        return _run(agent, orders, handler, place)


def _run(agent: _Agent, orders: Orders, handler: Rendezvous, place: str) -> Ending:
    ending = agent.ending
    stays = False
    try:
        with _handlers_kept():
            agent.run()
    except SignalException as error:
        ending.signal = error.sigval
        stays = orders.least < orders.most  # the others may go on without this machine
    except RendezvousTimeoutError as error:
        raise LaunchError(
            f"fewer than {_machines(orders.least)} have come to {place} within"
            f" {orders.timeout_seconds:g} s: check that the same command was started on each of them,"
            f" with the same address and number of machines.{agent.before}"
        ) from error
    except RendezvousClosedError:
        ending.lost = "the run there has ended"
    except LaunchError:
        raise  # machines that had met were gone again, every time
    except (RendezvousError, RuntimeError) as error:
        ending.lost = str(error)
    finally:
        agent.read_ends()
        handler.leave(closing=not stays and agent.hears)
    return ending


class _Agent(LocalElasticAgent):
    """torch's agent, which here asks the other machines before it starts ranks again.

    Its own loop would start them again after any failure, counted on each machine by itself, and tell
    of no other machine's. What is used of it: `_initialize_workers` (machines meet, get their ranks,
    and start them), `_shutdown`, and what `run` does around the loop.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        where: _Where,
        orders: Orders,
        council: Council,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(spec, logs_specs=where)
        self.ending: Ending = Ending()
        self.before: str = ""
        self._where = where
        self._orders = orders
        self._council = council
        self._tell = tell
        self._attempt: Attempt | None = None
        self._watch: Watch | None = None
        self._bad: list[End] = []

    @property
    def hears(self) -> bool:
        """Whether the store of the agents still answers."""
        return self._council.lost is None

    def read_ends(self) -> None:
        """Note how the ranks of this machine have ended in the last attempt."""
        attempt = self._attempt
        if attempt is not None:
            self.ending.attempt = attempt.number
            self.ending.world_size = self._where.world_size
            self.ending.ends = self._ends(attempt)

    def _invoke_run(self, role: str = "default") -> RunResult:
        group = self._worker_group
        while True:
            attempt = self._begin()
            self._attend(attempt)
            verdict = self._council.verdict(attempt)
            if not verdict.again:
                break
            self.before = f" Before, {self._sentence(attempt, verdict)}."
            self._tell(self._announcement(attempt, verdict))
        self._council.part(attempt, verdict)
        self.ending.cause = verdict.cause
        self.ending.here = verdict.cause is not None and verdict.cause in self._bad
        self.ending.silent = tuple(attempt.names[i] for i in verdict.gone)
        if verdict.cause is not None or verdict.gone:
            return RunResult(state=WorkerState.FAILED)
        values = dict.fromkeys(worker.global_rank for worker in group.workers)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _begin(self) -> Attempt:
        """Meet the other machines and start the ranks."""
        for tries_left in reversed(range(_TRIES)):
            try:
                self._initialize_workers(self._worker_group)  # type: ignore[call-arg]
                break
            except RuntimeError:  # a machine was gone as soon as it had come
                self._council.check()
                if not tries_left:
                    raise
        assert self._attempt is not None
        return self._attempt

    def _rendezvous(  # type: ignore[override]
        self, worker_group: WorkerGroup
    ) -> None:
        """See the base class."""
        orders = self._orders
        if orders.meeting is None:
            super()._rendezvous(worker_group)  # type: ignore[call-arg]
            return
        least = "" if orders.least == orders.most else "at least "
        with _patience(
            self._tell,
            f"waiting at {joined(*orders.meeting)} for {least}{_machines(orders.least)}, for"
            f" {orders.timeout_seconds:g} s at the most. Start the same command on each of them.",
        ):
            super()._rendezvous(worker_group)  # type: ignore[call-arg]

    def _start_workers(  # type: ignore[override]
        self, worker_group: WorkerGroup
    ) -> dict[int, Any]:
        """See the base class."""
        index, size = worker_group.group_rank, worker_group.group_world_size
        assert worker_group.store is not None
        assert index is not None
        assert size is not None
        attempt = self._council.open(worker_group.store, index, size)
        self._where.attempt = attempt.number
        self._bad = []
        pids = super()._start_workers(worker_group)  # type: ignore[call-arg]
        _answer_warnings()  # as torch has just done with other signals
        assert isinstance(self._pcontext, SubprocessContext)
        handlers = self._pcontext.subprocess_handlers
        self._watch = Watch({local: handler.proc for local, handler in handlers.items()})
        self._attempt = attempt
        return pids

    def _attend(self, attempt: Attempt) -> None:
        """Until the attempt is over: all ranks of all machines have done what they were to do, or one
        has failed, or the number of machines changes. Then none of this machine's is left."""
        watch, council = self._watch, self._council
        assert watch is not None
        try:
            done = False
            while True:
                watch.wait(_POLL_SECONDS)
                heard = council.heard
                ends = self._ends(attempt, so_far=True)
                if first(ends.values()) is not None:
                    break
                if not done and len(ends) == self._orders.ranks:
                    done = True
                    council.tell(attempt, Told(done=True))
                if all(told is not None and told.done for told in council.heard.told):
                    return
                if heard.over or council.silent():
                    break
                if heard.waiting and not any(heard.told):
                    council.take_turn(attempt, Turn("grow", attempt.index, attempt.now))
            council.end(attempt)
            self._settle(attempt)
            self._bad = [end for end in self._ends(attempt, True).values() if not end.is_good]
            if council.heard.turn is None:
                council.tell(attempt, Told(done, first(self._bad)))
            self._stop()
            if council.heard.turn is not None:
                done = all(end.is_good for end in self._ends(attempt).values())
                council.tell(attempt, Told(done, first(self._bad)))
        except SignalException:
            with suppress(RuntimeError):
                council.take_turn(attempt, Turn("leave", attempt.index, attempt.now))
            raise
        finally:
            watch.close()

    def _stop(self) -> None:
        """No rank of this machine is left, nor what it has started."""
        self._shutdown()
        _end_all(self._orders.folder)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None
    ) -> None:
        """See torch. Ranks have as long as the orders say to end: torch 2.11 gives them 30 seconds and
        knows no other time, later ones can be told."""
        if self._pcontext:
            self._pcontext.close(death_sig, self._orders.grace_seconds)  # type: ignore[arg-type]
        super()._shutdown(death_sig)

    def _settle(self, attempt: Attempt) -> None:
        """Let ranks end that have failed, and may have been first, but are still on their way out."""
        watch = self._watch
        assert watch is not None
        watch.wait(0)
        deadline = Deadline(_SETTLE_SECONDS)
        while deadline.left and any(
            self._file(attempt, local, ".noted").exists()
            for local in watch.processes.keys() - watch.ended.keys()
        ):
            watch.wait(_POLL_SECONDS)

    def _sentence(self, attempt: Attempt, verdict: Verdict) -> str:
        """What has ended the attempt, without a full stop."""
        if verdict.failures == attempt.failures:
            turn = self._council.heard.turn
            if turn is not None and turn.why == "leave":
                return f"{attempt.names[turn.machine]} was told to end"
            return "a machine has come"
        if verdict.gone:
            names = " and ".join(attempt.names[i] for i in verdict.gone)
            return f"nothing was heard from {names} for {SILENT_SECONDS:g} s"
        assert verdict.cause is not None
        who = verdict.cause.who(self._where.world_size, several=len(attempt.names) > 1)
        return f"{who} failed first: {verdict.cause.sentence}"

    def _announcement(self, attempt: Attempt, verdict: Verdict) -> str:
        count = f" (restart {verdict.failures} of {self._orders.restarts})"
        if verdict.failures == attempt.failures:
            count = ""
        sentence = f"{self._sentence(attempt, verdict)}. All ranks are started again{count}."
        cause = verdict.cause
        # What rank 0 of this machine has to say, people have read.
        is_read = cause is not None and cause.rank == 0 and cause in self._bad
        return (
            sentence
            if cause is None or is_read or not cause.stack
            else f"{sentence}\n{cause.stack}"
        )

    def _file(self, attempt: Attempt, local: int, suffix: str) -> Path:
        return self._orders.folder / f"{attempt.number}-{local}{suffix}"

    def _ends(self, attempt: Attempt, so_far: bool = False) -> dict[int, End]:
        """How the ranks of this machine have ended, by local rank."""
        watch = self._watch
        assert watch is not None
        ends: dict[int, End] = {}
        for local, process in watch.processes.items():
            if so_far and local not in watch.ended:
                continue
            code = watch.code(local)
            ends[local] = read(
                self._file(attempt, local, ".word"),
                rank=self._where.numbers[local],
                local_rank=local,
                pid=process.pid,
                machine=attempt.names[attempt.index],
                code=-signal.SIGKILL if code is None else code,
                ended=watch.ended.get(local),
                start=attempt.start,
            )
            if ends[local].status == 0 and not self._orders.silence_fails:
                ends[local] = replace(ends[local], spoke=True)
        return ends


class _Where(LogsSpecs):
    """Asked by the agent where output goes: it leaves it where it is, since the ranks place it
    themselves (stdout and stderr of one rank in one file, which torch cannot). Learns in passing
    which ranks there are, and tells them which attempt this is."""

    def __init__(self) -> None:
        super().__init__()
        self.attempt: int = 0
        self.numbers: dict[int, int] = {}
        self.world_size: int = 0

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See the base class."""
        self.numbers = {local: int(variables["RANK"]) for local, variables in envs.items()}
        self.world_size = int(envs[0]["WORLD_SIZE"])
        for variables in envs.values():
            variables[ATTEMPT] = variables["TORCHELASTIC_RESTART_COUNT"] = str(self.attempt)
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=dict(nowhere), stderrs=dict(nowhere), error_files=dict(nowhere))

    @property
    def root_log_dir(self) -> str:
        """See the base class."""
        return ""


def _machines(count: int) -> str:
    return f"{count} machine{'' if count == 1 else 's'}"


@contextmanager
def _patience(tell: Callable[[str], None], sentence: str) -> Iterator[None]:
    """`tell` the `sentence` if what is inside takes longer than machines do that are all there."""
    timer = threading.Timer(_PATIENCE_SECONDS, tell, (sentence,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _store(orders: Orders, tell: Callable[[str], None]) -> tuple[TCPStore, str, str]:
    """A store for the agents, served here for one machine, or by the first agent to come on the
    machine with the address; the address of this machine; that of the store, in words."""
    deadline = Deadline(orders.timeout_seconds)
    if orders.meeting is None:
        store = meet(LOOPBACK, 0, "host", deadline, listen=LOOPBACK)
        address, place = LOOPBACK, LOOPBACK
    else:
        host, port = orders.meeting
        place = joined(host, port)
        with _patience(
            tell,
            f"waiting for an answer at {place}, for {orders.timeout_seconds:g} s at the most. Start the"
            f" same command on {host}.",
        ):
            store = meet(host, port, "first", deadline, listen=literal(host))
        address = route_to(host, port)
    store.set_timeout(timedelta(seconds=min(_MEETING_SECONDS, max(1.0, orders.timeout_seconds))))
    return store, address, place


def _rendezvous(orders: Orders, store: TCPStore, address: str) -> Rendezvous:
    if orders.meeting is None:
        return Rendezvous(store, address, store.port, None)
    machines = of_machines(
        store,
        orders.secret,
        address,
        least=orders.least,
        most=orders.most,
        join_seconds=orders.timeout_seconds,
        last_call_seconds=LAST_CALL_SECONDS,
        pulse_seconds=_PULSE_SECONDS,
        silent_seconds=SILENT_SECONDS,
    )
    return Rendezvous(store, *orders.meeting, machines)


def _end_all(folder: Path) -> None:
    """Kill what is left of the ranks, and of what they started."""
    for pid, started in janitor.signed_in(str(folder)).values():
        if janitor.start_time(pid) in (started, None):
            janitor.kill_group(pid)


@contextmanager
def _quiet() -> Iterator[None]:
    """What torch's agent logs is told by the errors of this package. `LOGLEVEL`, which torch reads,
    brings it back."""
    if "LOGLEVEL" in os.environ:
        yield
        return
    prefixes = ("torch.distributed.elastic", "torchelastic-events")
    logging.getLogger("torchelastic-events-null")  # torch makes it when it first has an event
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefixes)]
    with silenced(names, logging.CRITICAL):
        yield


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Signal handlers are afterwards what they were."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _answer_warnings() -> None:
    """SIGUSR1, by which Slurm is often told to warn, ends the ranks as SIGTERM does. torch leaves it to
    the program: only where that has no answer of its own."""
    if threading.current_thread() is not threading.main_thread():
        return
    if early_signals.is_unanswered(signal.SIGUSR1):
        signal.signal(signal.SIGUSR1, _end_ranks)


def _end_ranks(number: int, frame: FrameType | None) -> None:
    came = signal.Signals(number)
    raise SignalException(f"{came.name} has come to process {os.getpid()}", came)
