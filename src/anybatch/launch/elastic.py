"""torch's elastic agent, run in this process: the part of `launch` that imports it.

torch provides the rendezvous of agents, the processes and their variables, signal handling, and the
loop that starts, monitors and restarts ranks. `_Agent` overrides `_monitor_workers` (the state of
the ranks), `_restart_workers` (whether they are restarted at all), and, with what these need,
`_start_workers`, `_shutdown` and `_exit_barrier`. torch's own implementations restart ranks after
any failure, count restarts separately on each machine, and do not report what failed on another
machine.

The agent installs handlers for SIGTERM, SIGINT, SIGHUP, SIGQUIT and SIGUSR1 in the main thread; the
previous handlers are restored. In another thread signals are not handled. `os.environ` is left
unchanged.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

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

from anybatch.errors import LaunchError
from anybatch.launch.exits import End, first, mended, read
from anybatch.launch.membership import ATTEMPT
from anybatch.launch.network import LOOPBACK, Deadline, joined, literal, meet, route_to
from anybatch.launch.rendezvous import Rendezvous, of_machines
from anybatch.process import early_stop_signal
from anybatch.process.log_filter import silenced
from anybatch.process.signing import SECRET

_POLL_SECONDS = 0.05

LAST_CALL_SECONDS = 5.0
"""How long to wait for further machines after the minimum number, but not the maximum, has joined."""

_SETTLE_SECONDS = 3.0
_MEETING_SECONDS = 30.0
_UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Orders:
    """Configuration of an agent; see `agent.Options`."""

    ranks: int  # on this machine
    least: int  # minimum and maximum number of machines
    most: int
    meeting: tuple[str, int] | None  # host and port for several machines
    secret: str  # shared by the agents and their ranks
    timeout_seconds: float
    grace_seconds: float
    restarts: int
    folder: Path  # private, for files that the agent and the ranks exchange
    logs: Path  # for the output of all ranks but rank 0
    silence_fails: bool  # whether a rank that ends with status 0 and leaves no result has failed


@dataclass(slots=True)
class Ending:
    """How the last attempt ended."""

    attempt: int = 0
    world_size: int = 0  # on all machines
    ends: dict[int, End] = field(default_factory=dict)  # by local rank; empty if none were started
    cause: End | None = None  # the end of a rank, on any machine, that caused the others
    here: bool = False  # whether that was a rank of this machine
    silent: tuple[str, ...] = ()  # machines that did not report how the attempt ended there
    signal: signal.Signals | None = None  # that ended the agent
    lost: str | None = None  # why the agents lost each other, if they did


def run(orders: Orders, arguments: Sequence[str], tell: Callable[[str], None]) -> Ending:
    """Start the ranks, restart them where the rule of `exits` requires it, and wait for them to
    end.

    Args:
        orders: see `Orders`.
        arguments: arguments of `worker`, after the first three.
        tell: called with a message before other machines are awaited, and whenever ranks are
            restarted.

    Raises:
        LaunchError: the agents of several machines did not meet.
        KeyboardInterrupt: SIGINT was received before any rank was started.
    """
    with _quiet():
        meeting, place = _rendezvous(orders, tell)
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
            rdzv_handler=meeting,
            max_restarts=_UNLIMITED,
            monitor_interval=1e-3,  # `_monitor_workers` waits longer
        )
        return _run(_Agent(spec, orders, meeting, tell), orders, meeting, place)


def _run(agent: _Agent, orders: Orders, meeting: Rendezvous, place: str) -> Ending:
    ending = agent.ending
    stays = False
    try:
        with _handlers_kept():
            agent.run()
    except _Over:
        pass
    except SignalException as error:
        ending.signal = error.sigval
        stays = orders.least < orders.most  # the others may continue without this machine
    except RendezvousTimeoutError as error:
        raise LaunchError(
            f"fewer than {_machines(orders.least)} have come to {place} within"
            f" {orders.timeout_seconds:g} s: check that the same command was started on each of them,"
            f" with the same address and number of machines.{agent.before}"
        ) from error
    except RendezvousClosedError:
        ending.lost = "the run there has ended"
    except LaunchError:
        raise  # machines met, but were lost again on every try
    except (RendezvousError, RuntimeError) as error:
        ending.lost = str(error)
    finally:
        agent.read_ends()
        agent.end_groups()
        meeting.leave(closing=not stays and ending.lost is None)
    return ending


class _Over(Exception):
    """Raised when the ranks have failed and are not restarted."""


class _Agent(LocalElasticAgent):
    """torch's agent, which consults the other machines before it restarts ranks."""

    def __init__(
        self,
        spec: WorkerSpec,
        orders: Orders,
        meeting: Rendezvous,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(spec, logs_specs=_Environment(meeting, orders))
        self.ending: Ending = Ending()
        self.before: str = ""
        self._ended: dict[int, int] = {}  # when the end of each rank was noticed, by local rank
        self._orders = orders
        self._meeting = meeting
        self._tell = tell

    def read_ends(self) -> None:
        """Record how the ranks of this machine ended in the last attempt."""
        if self._pcontext is not None:
            self.ending.attempt = self._meeting.attempt
            self.ending.world_size = self._world_size
            self.ending.ends = self._ends()

    def end_groups(self) -> None:
        """Kill the remaining processes that the ranks of the last attempt started."""
        if self._pcontext is not None:
            for pid in self._pcontext.pids().values():
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                (self._orders.folder / f"{pid}.pid").unlink(missing_ok=True)

    # ------------------------------------------------------------------------- what torch's loop asks

    def _monitor_workers(  # type: ignore[override]
        self, worker_group: WorkerGroup
    ) -> RunResult:
        """See the base class. Sleeps briefly before it checks the ranks."""
        time.sleep(_POLL_SECONDS)
        ends = self._ends(so_far=True)
        state = WorkerState.FAILED
        if first(ends.values()) is None:
            states = {
                "runs": WorkerState.HEALTHY,
                "done": WorkerState.SUCCEEDED,
                "over": WorkerState.FAILED,
            }
            state = states[self._meeting.look(len(ends) == self._orders.ranks)]
        values = dict.fromkeys(worker.global_rank for worker in worker_group.workers)
        return RunResult(state=state, return_values=values)

    def _start_workers(  # type: ignore[override]
        self, worker_group: WorkerGroup
    ) -> dict[int, Any]:
        """See the base class. Ranks start with SIGINT blocked, until they can handle it (`worker`):
        during its startup, Python would print a traceback."""
        self._ended = {}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super()._start_workers(worker_group)  # type: ignore[call-arg]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _restart_workers(  # type: ignore[override]
        self, worker_group: WorkerGroup
    ) -> None:
        """See the base class. Raises `_Over` if the ranks are not restarted."""
        meeting, orders = self._meeting, self._orders
        why = meeting.end("failed")
        self._settle()
        bad = [end for end in self._ends(so_far=True).values() if not end.is_good]
        meeting.tell(first(bad))
        self._stop_workers(worker_group)  # type: ignore[call-arg]
        self.end_groups()
        count = ""
        if why == "failed":
            ends, silent = meeting.ends(first(bad))
            meeting.failures += 1
            again = meeting.failures <= orders.restarts and mended(ends, silent)
            count = f" (restart {meeting.failures} of {orders.restarts})"
        else:  # errors of ranks are a consequence
            ends, silent = [end for end in (first(bad),) if end is not None], ()
            enough = orders.least < orders.most and orders.least < len(meeting.names)
            again = why == "grow" or enough
        cause = first(ends)
        is_here = cause is not None and cause in bad
        if not again:
            self.ending.cause, self.ending.here = cause, is_here
            self.ending.silent = tuple(silent)
            raise _Over
        sentence = self._sentence(why, cause, silent)
        self.before = f" Before, {sentence}."
        # The output of rank 0 of this machine is already visible to the user.
        stack = "" if cause is None or (is_here and cause.rank == 0) else cause.stack
        notice = f"{sentence}. All ranks are started again{count}."
        self._tell(f"{notice}\n{stack}" if stack else notice)
        self._initialize_workers(worker_group)  # type: ignore[call-arg]

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None
    ) -> None:
        """See the base class. Ranks have `grace_seconds` to end: torch 2.11 gives them 30 seconds,
        and has no option for it."""
        if isinstance(sys.exception(), SignalException):  # later failures follow from it
            with suppress(RuntimeError):
                self._meeting.end("leave")
        if self._pcontext:
            self._pcontext.close(death_sig, self._orders.grace_seconds)  # type: ignore[arg-type]
        super()._shutdown(death_sig)

    def _exit_barrier(self) -> None:
        """See the base class. `Rendezvous.look` has already established that all machines are done."""

    # ------------------------------------------------------------------------------------- an attempt

    def _settle(self) -> None:
        """Wait for ranks that have failed but are still exiting, since one of them may have failed
        first."""
        deadline = Deadline(_SETTLE_SECONDS)
        while deadline.left:
            running = set(range(self._orders.ranks)) - self._ends(so_far=True).keys()
            if not any(self._file(local, ".noted").exists() for local in running):
                break
            time.sleep(_POLL_SECONDS)

    def _sentence(self, why: str, cause: End | None, silent: Sequence[str]) -> str:
        """Why the attempt ended, without a full stop."""
        if why == "grow":
            return "a machine has come"
        if why == "leave":
            return "a machine was told to end"
        if cause is None or (silent and not cause.died):
            return f"nothing was heard from {' and '.join(silent)}"
        several = len(self._meeting.names) > 1
        return cause.failed_first(self._world_size, several)

    @property
    def _world_size(self) -> int:
        return self.get_worker_group().workers[0].world_size

    def _file(self, local: int, suffix: str) -> Path:
        return self._orders.folder / f"{self._meeting.attempt}-{local}{suffix}"

    def _ends(self, so_far: bool = False) -> dict[int, End]:
        """How the ranks of this machine ended, by local rank. `so_far`: only those that ended by
        themselves, while the others are running."""
        assert isinstance(self._pcontext, SubprocessContext)
        ended, meeting = self._ended, self._meeting
        ends: dict[int, End] = {}
        for local, handler in self._pcontext.subprocess_handlers.items():
            code = handler.proc.poll()
            if so_far and code is not None:
                ended.setdefault(local, time.monotonic_ns())
            if so_far and local not in ended:
                continue
            end = read(
                self._file(local, ".word"),
                rank=self.get_worker_group().workers[local].global_rank,
                local_rank=local,
                pid=handler.proc.pid,
                machine=meeting.names[meeting.index],
                code=-signal.SIGKILL if code is None else code,
                ended=ended.get(local),
                start=meeting.start,
            )
            silent = end.status == 0 and not self._orders.silence_fails
            ends[local] = replace(end, spoke=True) if silent else end
        return ends


class _Environment(LogsSpecs):
    """Adds to the environment of the ranks: torch's agent calls `reify` just before it starts them.
    The agent does not redirect their output: they do so themselves (stdout and stderr of one rank
    to one file, which torch does not support)."""

    def __init__(self, meeting: Rendezvous, orders: Orders) -> None:
        super().__init__()
        self._meeting = meeting
        self._orders = orders

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See the base class."""
        _answer_warnings()  # torch does so for other signals
        attempt = str(self._meeting.attempt)
        for variables in envs.values():
            variables[ATTEMPT] = variables["TORCHELASTIC_RESTART_COUNT"] = attempt
            variables["TORCHELASTIC_MAX_RESTARTS"] = str(self._orders.restarts)
            variables[SECRET] = self._orders.secret  # not readable by other users
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        return ""


def _machines(count: int) -> str:
    return f"{count} machine{'' if count == 1 else 's'}"


def _rendezvous(orders: Orders, tell: Callable[[str], None]) -> tuple[Rendezvous, str]:
    """The rendezvous of the agents, and its address in words. The store is served by this process
    for one machine, and otherwise by the first agent that starts on the machine with the address."""
    deadline = Deadline(orders.timeout_seconds)
    name = socket.gethostname()
    if orders.meeting is None:
        store = meet(LOOPBACK, 0, "host", deadline, listen=LOOPBACK)
        return Rendezvous(store, (LOOPBACK, store.port), None, name, deadline.seconds), LOOPBACK
    host, port = orders.meeting
    place = joined(host, port)
    least = f"{'' if orders.least == orders.most else 'at least '}{_machines(orders.least)}"
    tell(
        f"waiting at {place} for {least}, for {orders.timeout_seconds:g} s at the most. Start the same"
        " command on each of them."
    )
    store = meet(host, port, "first", deadline, listen=literal(host))
    store.set_timeout(timedelta(seconds=min(_MEETING_SECONDS, max(1.0, orders.timeout_seconds))))
    machines = of_machines(
        store,
        orders.secret,
        route_to(host, port),
        least=orders.least,
        most=orders.most,
        join_seconds=orders.timeout_seconds,
        last_call_seconds=LAST_CALL_SECONDS,
    )
    return Rendezvous(store, orders.meeting, machines, name, orders.timeout_seconds), place


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the logs of torch's agent, since the errors of this package cover them. If
    `LOGLEVEL`, which torch reads, is set, the logs are kept."""
    if "LOGLEVEL" in os.environ:
        yield
        return
    prefixes = ("torch.distributed.elastic", "torchelastic-events")
    logging.getLogger("torchelastic-events-null")  # torch creates it at its first event
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefixes)]
    with silenced(names, logging.CRITICAL):
        yield


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the signal handlers after the block."""
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
    """Make SIGUSR1, which Slurm is often configured to send as a warning, end the ranks as SIGTERM
    does. torch leaves this signal to the program, so it is handled only if the program has no
    handler for it."""
    if threading.current_thread() is not threading.main_thread():
        return
    if early_stop_signal.is_unanswered(signal.SIGUSR1):
        signal.signal(signal.SIGUSR1, _end_ranks)


def _end_ranks(number: int, frame: FrameType | None) -> None:
    came = signal.Signals(number)
    raise SignalException(f"{came.name} has come to process {os.getpid()}", came)
