"""Worker processes that fetch ahead, on torch's `DataLoader`, which keeps processes and queues.

The unit of work is a whole micro-batch, fetched and collated in the worker. Workers live as long as
the run; a new beginning only discards what they had fetched ahead.

A worker may die (killed for want of memory, a crash in the data set's own code) or hang (a file system
that does not answer). So each keeps a few numbers in memory that this process reads:

    worker 0   pid, request 4, 17 samples loaded     <- next() waits for request 4
    worker 1   pid, request 5,  9 samples loaded

Who has died is known within seconds (torch looks every five), and what it was loading is named. If all
workers together have not loaded a single sample for `DEADLINE_SECONDS`, while a batch is waited for,
they are ended. And a worker ends by itself when the process that trains is gone, however it went.

Under a budget for memory the first of these starts and ends with the limit lifted (`Beside`):

    this process    a thread for each worker, which sends it requests; the lookout
    worker          a copy of this process, and what loading takes; the threads that send batches

Where a thread is refused memory in its first moment, `threading.Thread.start` waits for it without end,
and threads of queues are started in that way. So the room for all of them is looked for before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.sharedctypes import RawArray
from typing import Any, TypeVar, final

import psutil
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from anybatch.data.failure import Bad, BadSamples, told, told_samples
from anybatch.data.fetch import Piece, Request, SampleFetch
from anybatch.data.shared_memory import check_shared_memory
from anybatch.errors import DataError
from anybatch.oom import is_memory_error
from anybatch.process.threads import begin, has_room, small_stacks

DEADLINE_SECONDS = 240.0
"""How long a batch is waited for while no worker loads any sample. Less than the watchdog of a rank
waits, so that the samples are named."""

_LOOKS = 20  # at the workers, within the deadline
_PARENT_SECONDS = 1.0  # between two looks of a worker at its parent
# In which a process ends whose sockets are closed, or a thread whose queue is.
_LAST_MOMENT_SECONDS = 2.0

T = TypeVar("T")

Beside = Callable[[], AbstractContextManager[None]]
"""Makes what stands around the start and the end of processes: inside, no budget refuses them memory,
nor this process what it takes to speak to them."""

_PID, _REQUEST, _LOADED, _REFUSED, _WIDTH = 0, 1, 2, 3, 4
_NONE = -1
_REFUSED_MEMORY = (
    "a worker process that loads samples, which is under no budget, was refused memory ({}): use fewer"
    " num_workers, or num_workers=0"
)
_NO_THREAD = "can't start new thread"  # as Python says it


class WorkerTraceback(Exception):
    """The traceback of a worker process, as text: the cause of an error that was raised there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """torch says four lines about more workers than cores, at every start. They suit a slow disk, and
    whether steps wait for samples is measured (`events.Starved`)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


@final
class WorkerPool:
    """Fetches the requests of `requests()` in order, a few ahead. `close` ends the processes.

    Args:
        fetch: what workers do.
        requests: called at each start.
        num_workers: at least one.
        pin_memory: make batches ready for asynchronous copies to CUDA devices.
        deadline_seconds: how long workers may load without an end to any sample; None:
            `DEADLINE_SECONDS`.
        beside: stands around their start and their end.
    """

    def __init__(
        self,
        fetch: SampleFetch,
        requests: Callable[[], Iterator[Request]],
        num_workers: int,
        pin_memory: bool = False,
        deadline_seconds: float | None = None,
        beside: Beside = nullcontext,
    ) -> None:
        self._fetch, self._requests = fetch, requests
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._deadline = DEADLINE_SECONDS if deadline_seconds is None else deadline_seconds
        self._beside = beside
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None
        self._board = _Board(num_workers)
        self._lookout: _Lookout | None = None
        self._asked: dict[int, Request] = {}  # by number, those that have not come back
        self._num_asked = 0
        self._num_waited_for = 0

    @_without_advice()
    def restart(self) -> None:
        """Discards what was fetched ahead and asks `requests()` anew.

        Raises `DataError` if the operating system refuses what workers need, or `/dev/shm` has no room
        for what they hand over.
        """
        if self._loader is None and (first := next(self._requests(), None)) is not None:
            check_shared_memory(self._fetch, first, self._num_workers)
        try:
            with self._beside(), small_stacks() as stack_bytes:
                if self._loader is None:
                    self._loader = self._opened(stack_bytes)
                self._asked.clear()
                self._num_waited_for = self._num_asked
                self._batches = self._guarded(self._loader.__iter__)
        except (OSError, MemoryError, RuntimeError) as error:
            self.close()
            if isinstance(error, RuntimeError) and str(error) != _NO_THREAD:
                raise
            raise DataError(
                f"the worker processes that load samples ({self._num_workers}) cannot be started"
                f" ({told(error)}): the system refuses them memory, processes or open files, or this"
                " process the threads that speak to them; use fewer num_workers, or num_workers=0, or"
                " raise its limits (ulimit -a shows them)."
            ) from error

    def _opened(self, stack_bytes: int) -> DataLoader[Any]:
        """The loader of workers that are still to be started, and are looked after."""
        if not has_room(self._num_workers + 1 + self._pin_memory):
            raise MemoryError("no room for another thread")
        self._board = _Board(self._num_workers)
        self._lookout = _Lookout(self._board, self._deadline)
        return DataLoader(
            _Served(self._fetch, self._board),
            batch_size=None,
            sampler=_Requests(self._numbered),
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            persistent_workers=True,
            pin_memory=self._pin_memory,
            worker_init_fn=_Beginning(self._board, stack_bytes),
            # Otherwise every start would draw from the generator that training draws from.
            generator=torch.Generator(device="cpu"),
        )

    def next(self) -> Any:
        """The next batch.

        Raises what its fetch raised (`DataError`, or `MemoryError`), and `DataError` if a worker has
        died, or hangs.
        """
        if self._batches is None:
            raise RuntimeError("the workers are not started")
        try:
            batch = self._guarded(self._batches.__next__)
        except Exception as error:
            if not (is_memory_error(error) and str(error).startswith("Caught ")):
                raise
            # torch puts the worker's whole traceback into the text; what was refused is at its end.
            raise MemoryError(_REFUSED_MEMORY.format(str(error).splitlines()[-1])) from error
        self._asked.pop(self._num_waited_for, None)
        self._num_waited_for += 1
        if isinstance(batch, _Failure):
            raise batch.error() from WorkerTraceback(batch.trace)
        return batch

    def close(self) -> None:
        """Ends the processes; `restart` would start new ones."""
        if self._loader is None and self._lookout is None:
            return
        # Letting go of the iterator would do, but for a traceback that holds it after an error.
        shutdown = getattr(self._batches, "_shutdown_workers", None)
        queues: Sequence[Any] = getattr(self._batches, "_index_queues", ())
        self._batches = self._loader = None
        self._asked.clear()
        lookout, self._lookout = self._lookout, None
        # Whoever was never sent a request is sent the end by a new thread.
        with self._beside(), small_stacks():
            if lookout is not None:
                lookout.close()
            if shutdown is not None:
                shutdown()
            for queue in queues:  # torch waits for none of their threads, whose memory goes now
                if (sender := getattr(queue, "_thread", None)) is not None:
                    sender.join(_LAST_MOMENT_SECONDS)

    def _guarded(self, ask: Callable[[], T]) -> T:
        """What the workers answer to `ask`. Raises `DataError` if one has died, or hangs."""
        assert self._lookout is not None
        try:
            with _own_signals(), self._lookout:
                return ask()
        except RuntimeError as error:
            if is_memory_error(error) or not str(error).startswith("DataLoader worker"):
                raise
            sentence, is_refused = self._told(error), self._board.is_refused
            self._end()
            if is_refused:
                raise MemoryError(_REFUSED_MEMORY.format("it could not start a thread")) from error
            raise DataError(sentence) from error
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            # A batch is fetched from the memory of its worker, which may have died since it said that
            # the batch is there.
            if not self._has_lost_one():
                raise
            sentence = self._told(error)
            self._end()
            raise DataError(sentence) from error

    def _has_lost_one(self) -> bool:
        """Whether a worker has died, or does so in the next moment."""
        end = time.monotonic() + _LAST_MOMENT_SECONDS
        while all(pid == _NONE or _is_alive(pid) for pid in self._board.pids):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def _told(self, error: Exception) -> str:
        """The sentence for a worker that is gone."""
        if self._lookout is not None and self._lookout.victims:
            if all(self._board.requests[worker] == _NONE for worker in self._lookout.victims):
                return (
                    f"a batch that is waited for has not come in {self._deadline:g} s, and no worker"
                    " process has anything to do: most often it cannot be pickled, which is told on"
                    " standard error; num_workers=0 needs no pickling."
                )
            doing = [what for worker in self._lookout.victims if (what := self._doing(worker))]
            return (
                f"the worker process that loads {doing[0] if doing else 'samples'} has not come to the"
                f" end of any in {self._deadline:g} s: look for a file or a server that does not"
                " answer, or a lock that was held when the process was forked; num_workers=0 shows"
                " where it waits."
            )
        gone = [n for n, pid in enumerate(self._board.pids) if pid != _NONE and not _is_alive(pid)]
        doing = [what for worker in gone if (what := self._doing(worker))]
        when = f" while it loaded {doing[0]}" if doing else ""
        return (
            f"a worker process that loads samples has died{when} ({error}): most often it was out of"
            " memory or shared memory, or the data set's own code crashed; use fewer num_workers, or"
            " num_workers=0 to see the error."
        )

    def _doing(self, worker: int) -> str:
        """The samples of the request that `worker` is at, in words; empty: not known."""
        request = self._asked.get(self._board.requests[worker], ())
        names = [(piece.epoch, index) for piece in request for index in piece.indices.tolist()]
        return f"{told_samples(names)} of {self._fetch.name}" if names else ""

    def _end(self) -> None:
        """Kill all workers: with one gone, torch cannot use the others either, and one that hangs
        would not hear that it is to end."""
        for pid in self._board.pids:
            _kill(pid)
        self.close()

    def _numbered(self) -> Iterator[tuple[int, Request]]:
        for request in self._requests():
            number = self._num_asked
            self._num_asked += 1
            self._asked[number] = request
            yield number, request


@final
class _Board:
    """What workers are doing: a few numbers in memory that they share with this process."""

    def __init__(self, num_workers: int) -> None:
        self._cells: Any = RawArray("q", [_NONE] * (_WIDTH * num_workers))

    @property
    def pids(self) -> Sequence[int]:
        """Of the workers that have begun."""
        return self._cells[_PID::_WIDTH]

    @property
    def requests(self) -> Sequence[int]:
        """The number of the request that each is at."""
        return self._cells[_REQUEST::_WIDTH]

    @property
    def moves(self) -> Sequence[int]:
        """Something that changes when any of them gets on."""
        return [*self.requests, *self._cells[_LOADED::_WIDTH]]

    @property
    def is_refused(self) -> bool:
        """Whether one was refused memory, and has ended."""
        return 1 in self._cells[_REFUSED::_WIDTH]

    def enter(self, worker: int) -> None:
        """Called in a worker that begins."""
        self._cells[_WIDTH * worker + _PID] = os.getpid()

    def refuse(self, worker: int) -> None:
        """Called in a worker that ends since it was refused memory."""
        self._cells[_WIDTH * worker + _REFUSED] = 1

    def begin(self, worker: int, request: int) -> None:
        """Called in the worker, with `_NONE` at the end of a request."""
        self._cells[_WIDTH * worker + _REQUEST] = request

    def count(self, worker: int) -> None:
        """Called in the worker: a sample is loaded."""
        self._cells[_WIDTH * worker + _LOADED] += 1


@final
class _Lookout:
    """A thread that ends workers which hang, while somebody waits for them: inside `with`.

    Attributes:
        victims: the workers that it has ended.

    Raises `MemoryError` if the thread cannot be begun.
    """

    def __init__(self, board: _Board, deadline_seconds: float) -> None:
        self.victims: list[int] = []
        self._board = board
        self._deadline = deadline_seconds
        self._wait: int | None = None  # the number of the one under way
        self._num_waits = 0
        self._over = threading.Event()
        self._ended = begin(self._look)
        if self._ended is None:
            raise MemoryError(_NO_THREAD)

    def __enter__(self) -> None:
        self._num_waits += 1
        self._wait = self._num_waits

    def __exit__(self, *_: object) -> None:
        self._wait = None

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        if self._ended is not None:
            self._ended.wait()

    def _look(self) -> None:
        before: tuple[int | None, Sequence[int]] = None, ()
        still = 0  # looks that found all as it was; while the machine sleeps nobody looks
        while not self._over.wait(self._deadline / _LOOKS):
            now = self._wait, self._board.moves
            still = still + 1 if now == before and self._wait is not None else 0
            before = now
            if still <= _LOOKS:
                continue
            requests = self._board.requests
            busy = [n for n, request in enumerate(requests) if request != _NONE]
            # Where none has anything to do, a request or a batch was lost on its way.
            self.victims = busy or list(range(len(requests)))
            for worker in self.victims:
                _kill(self._board.pids[worker])
            return


@final
class _Failure:
    """A `DataError` on its way out of a worker; `DataLoader` would add a traceback to its text."""

    def __init__(self, message: str, trace: str, bad: Sequence[Bad]) -> None:
        self.message = message
        self.trace = trace
        self.bad = bad

    def error(self) -> DataError:
        """The error again."""
        return BadSamples(self.message, self.bad) if self.bad else DataError(self.message)


@final
class _Served(Dataset[Any]):
    """A fetch in the shape `DataLoader` asks for: the key of an item is a whole request. Writes on the
    board what it is doing."""

    def __init__(self, fetch: SampleFetch, board: _Board) -> None:
        self._fetch = fetch
        self._board = board
        self._worker = _NONE

    def __getitem__(self, key: Any) -> Any:
        number, request = key
        if self._worker == _NONE:
            info = get_worker_info()
            assert info is not None
            self._worker = info.id
            self._fetch.on_sample = partial(self._board.count, info.id)
        self._board.begin(self._worker, number)
        try:
            return self._fetch([Piece(epoch, torch.from_numpy(keys)) for epoch, keys in request])
        except DataError as error:
            bad = error.bad if isinstance(error, BadSamples) else ()
            return _Failure(str(error), traceback.format_exc(), bad)
        finally:
            self._board.begin(self._worker, _NONE)


@final
class _Requests(Iterable[Any]):
    def __init__(self, requests: Callable[[], Iterator[tuple[int, Request]]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Any]:
        for number, request in self._requests():
            # As arrays, which are pickled; tensors would take a shared-memory file each.
            yield number, [(piece.epoch, piece.indices.numpy().copy()) for piece in request]


@final
class _Beginning:
    """Run in a worker when it starts: enters it on the board, and lets it end when its parent has.
    torch's workers look only between two batches, so one that hangs would outlive a parent that was
    killed. It ends, too, where a thread that is to send batches was refused memory, which Python would
    wait for without end. `stack_bytes`: of the threads of the data set, and of the queue, which pickles
    batches."""

    def __init__(self, board: _Board, stack_bytes: int) -> None:
        self._board = board
        self._stack_bytes = stack_bytes

    def __call__(self, worker: int) -> None:
        self._board.enter(worker)
        # Under "forkserver" this is the server, which ends with the process that trains.
        watched = begin(partial(self._watch, worker, os.getppid()))
        threading.stack_size(self._stack_bytes)
        if watched is None:
            os._exit(1)  # none to send batches either; a death is told in a sentence

    def _watch(self, worker: int, parent: int) -> None:
        starting: set[threading.Thread] = set()
        try:
            while os.getppid() == parent:
                time.sleep(_PARENT_SECONDS)
                before = starting
                starting = {thread for thread in threading.enumerate() if thread.ident is None}
                if starting & before:
                    self._board.refuse(worker)
                    break
        except MemoryError:
            self._board.refuse(worker)
        os._exit(1)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Around the start of workers. torch would have the main thread raise an error wherever it is when
    a worker dies: between two ranks' halves of a collective, say. Here `next` finds out."""
    number = getattr(signal, "SIGCHLD", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if signal.getsignal(number) is not before:
            signal.signal(number, signal.SIG_DFL if before is None else before)


def _kill(pid: int) -> None:
    if pid != _NONE:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))


def _is_alive(pid: int) -> bool:
    try:
        return (
            psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        )  # ended, and nobody has asked how
    except psutil.NoSuchProcess:
        return False


def _as_it_is(batch: Any) -> Any:
    return batch
