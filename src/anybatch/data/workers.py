"""Worker processes that prefetch batches: torch's `DataLoader`, with errors that name samples.

The unit of work is a whole micro-batch, fetched and collated in the worker. Each worker keeps its
current request and the number of samples that it has loaded in shared memory, so that one that has died
or hangs is reported with its samples. Workers hang if none of them has loaded a sample for
`DEADLINE_SECONDS` while a batch is awaited. A worker exits by itself when the training process is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from anybatch.data.batch_slices import map_leaves
from anybatch.data.failure import described, format_samples, refused_shared_memory
from anybatch.data.fetch import Piece, Request, SampleFetch
from anybatch.errors import DataError
from anybatch.oom import is_memory_error

DEADLINE_SECONDS = 240.0
"""How long to wait for a batch while no worker loads any sample. Shorter than the timeout of a rank's
watchdog, so that the samples are named."""

_LOOKS = 20  # checks of the workers within the deadline
_MOST_SECONDS = 5.0  # between two checks, so that a dead worker is noticed
_PARENT_SECONDS = 1.0  # between two checks of its parent by a worker

_NONE = -1


class WorkerTraceback(Exception):
    """The traceback of a worker process, as text, used as the cause of an error that was raised
    there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@final
class WorkerPool:
    """Fetches the requests of `requests()` in order, a few ahead. `close` ends the processes.

    Args:
        fetch: the fetch that workers run.
        requests: function that returns the requests; called at each start.
        num_workers: number of processes, at least one.
        pin_memory: prepare batches for asynchronous copies to CUDA devices.
    """

    def __init__(
        self,
        fetch: SampleFetch,
        requests: Callable[[], Iterator[Request]],
        num_workers: int,
        pin_memory: bool = False,
    ) -> None:
        self._fetch, self._requests = fetch, requests
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._loader: DataLoader[Any] | None = None
        self._batches: Any = None
        self._cells: Any = ()
        self._asked: dict[int, Request] = {}  # by number, those still pending
        self._num_asked = 0
        self._num_waited_for = 0

    def restart(self) -> None:
        """Discards prefetched batches and calls `requests()` again.

        Raises `DataError` if the operating system refuses resources that workers need.
        """
        self._asked.clear()
        self._num_waited_for = self._num_asked
        try:
            with _own_signals(), warnings.catch_warnings():
                # Waiting for samples is measured: a warning about more workers than cores is redundant.
                warnings.filterwarnings("ignore", "This DataLoader will create")
                self._start()
        except (OSError, MemoryError, RuntimeError) as error:
            self.close()
            if isinstance(error, RuntimeError) and str(error) != "can't start new thread":
                raise
            raise DataError(
                f"the worker processes that load samples ({self._num_workers}) cannot be started"
                f" ({described(error)}): the system refuses them memory, processes or open files; use"
                " fewer num_workers, or num_workers=0, or raise its limits (ulimit -a shows them)."
            ) from error

    def _start(self) -> None:
        if self._loader is not None:
            try:
                self._batches = iter(self._loader)
                return
            except RuntimeError:  # a worker has died, or is busy with a discarded request
                self._kill()
        self._cells = RawArray("q", [_NONE, 0] * self._num_workers)
        self._loader = DataLoader(
            _Served(self._fetch, self._cells),
            batch_size=None,
            sampler=_Requests(self._numbered),
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            persistent_workers=True,
            pin_memory=self._pin_memory,
            worker_init_fn=_at_start,
            timeout=min(_MOST_SECONDS, DEADLINE_SECONDS / _LOOKS),
            # Otherwise every start would draw from the generator that training uses.
            generator=torch.Generator(device="cpu"),
        )
        self._batches = iter(self._loader)

    def next(self) -> Any:
        """Returns the next batch.

        Raises the error of its fetch (`DataError`, or `MemoryError`), and `DataError` if a worker has
        died or hangs.
        """
        try:
            batch = self._waited_for()
        except Exception as error:
            if not (is_memory_error(error) and str(error).startswith("Caught ")):
                raise
            # torch puts the worker's whole traceback into the text; its last line is the error itself.
            raise MemoryError(
                "a worker process that loads samples, which is under no budget, was refused memory"
                f" ({str(error).splitlines()[-1]}): use fewer num_workers, or num_workers=0"
            ) from error
        self._asked.pop(self._num_waited_for, None)
        self._num_waited_for += 1
        if isinstance(batch, _Failure):
            raise batch.error from WorkerTraceback(batch.trace)
        return batch

    def _waited_for(self) -> Any:
        before: Sequence[int] = ()
        begun = time.monotonic()
        while True:
            try:
                return next(self._batches)
            # All but RuntimeError: a worker died after it had announced its batch.
            except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
                text = str(error)
                if isinstance(error, RuntimeError) and not text.startswith("DataLoader "):
                    raise
                if is_late := text.startswith("DataLoader timed out"):
                    if before != (now := list(self._cells)):
                        before, begun = now, time.monotonic()
                    if time.monotonic() - begun < DEADLINE_SECONDS:
                        continue
                sentence = self._hang() if is_late else self._death(error)
                self._kill()
                raise DataError(sentence) from error

    def _hang(self) -> str:
        busy = [n for n, request in enumerate(self._cells[::2]) if request != _NONE]
        if not busy:
            return (
                f"a batch that is waited for has not come in {DEADLINE_SECONDS:g} s, and no worker"
                " process has anything to do: most often it cannot be pickled, which is told on"
                " standard error; num_workers=0 needs no pickling."
            )
        return (
            f"the worker process that loads {self._doing(busy) or 'samples'} has not come to the"
            f" end of any in {DEADLINE_SECONDS:g} s: look for a file or a server that does not"
            " answer, or a lock that was held when the process was forked; num_workers=0 shows"
            " where it waits."
        )

    def _death(self, error: Exception) -> str:
        sentinels = [process.sentinel for process in self._batches._workers]
        ended = multiprocessing.connection.wait(sentinels, _MOST_SECONDS)
        doing = self._doing([n for n, sentinel in enumerate(sentinels) if sentinel in ended])
        when = f" while it loaded {doing}" if doing else ""
        return (
            f"a worker process that loads samples has died{when} ({error}): most often it was out of"
            " memory or shared memory (docker run --shm-size), or the data set's own code crashed; use"
            " fewer num_workers, or num_workers=0 to see the error."
        )

    def _doing(self, workers: Sequence[int]) -> str:
        """Describes the samples in the current request of the first of `workers` that has one; empty if
        there is none."""
        for worker in workers:
            request = self._asked.get(self._cells[2 * worker], ())
            names = [(piece.epoch, index) for piece in request for index in piece.indices.tolist()]
            if names:
                return f"{format_samples(names)} of {self._fetch.name}"
        return ""

    def _kill(self) -> None:
        """Kills all workers: without one of them torch cannot use the others, and a worker that hangs
        does not react to a shutdown."""
        for process in self._batches._workers:
            process.kill()
        self.close()

    def close(self) -> None:
        """Ends the processes; `restart` would start new ones."""
        batches, self._batches, self._loader = self._batches, None, None
        if batches is None:
            return
        # Dropping the iterator is not enough: after an error, a traceback may keep it alive.
        batches._shutdown_workers()
        for queue in batches._index_queues:  # torch does not wait for their threads
            if queue._thread is not None:
                queue._thread.join(_MOST_SECONDS)

    def _numbered(self) -> Iterator[tuple[int, Request]]:
        for request in self._requests():
            number = self._num_asked
            self._num_asked += 1
            self._asked[number] = request
            yield number, request


class _Failure(NamedTuple):
    """A `DataError` returned by a worker; if it were raised, `DataLoader` would add a traceback to its
    text."""

    error: DataError
    trace: str


@final
class _Served(Dataset[Any]):
    """A fetch wrapped as a data set for `DataLoader`: the key of an item is a whole request."""

    def __init__(self, fetch: SampleFetch, cells: Any) -> None:
        self._fetch = fetch
        self._cells = cells

    def __getitem__(self, key: Any) -> Any:
        info = get_worker_info()
        assert info is not None
        self._fetch.on_sample = partial(self._count, 2 * info.id + 1)
        self._cells[2 * info.id], request = key
        try:
            batch = self._fetch([Piece(epoch, torch.from_numpy(keys)) for epoch, keys in request])
            # Otherwise the thread that sends it would do so: a refusal there loses the batch.
            map_leaves(batch, _shared)
            return batch
        except DataError as error:
            return _Failure(error, traceback.format_exc())
        except RuntimeError as error:
            if (refusal := refused_shared_memory(error)) is None:
                raise
            return _Failure(refusal, traceback.format_exc())
        finally:
            self._cells[2 * info.id] = _NONE

    def _count(self, cell: int) -> None:
        self._cells[cell] += 1


def _shared(leaf: Any) -> Any:
    """Moves a tensor in host memory to shared memory, in place."""
    if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided:
        leaf.share_memory_()
    return leaf


@final
class _Requests:
    def __init__(self, requests: Callable[[], Iterator[tuple[int, Request]]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Any]:
        for number, request in self._requests():
            # As arrays, which are pickled; tensors would take a shared-memory file each.
            yield number, [(piece.epoch, piece.indices.numpy().copy()) for piece in request]


def _at_start(_worker: int) -> None:
    """Runs in a worker when it starts. torch's workers check their parent only between two batches, so
    a worker that hangs would outlive a parent that was killed."""
    # With "forkserver" this is the server, which ends with the training process.
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    # Sending the first tensor starts a thread. If it were refused memory, the worker would wait for it
    # forever: see `process.threads`.
    ForkingPickler.dumps(torch.zeros(1))


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os._exit(1)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Restores the SIGCHLD handler after workers are started. torch's handler would make the main
    thread raise an error at an arbitrary point when a worker dies, for example between two ranks'
    halves of a collective. Here `next` detects it."""
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


def _as_it_is(batch: Any) -> Any:
    return batch
