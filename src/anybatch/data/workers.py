"""Worker processes that prefetch batches: torch's `DataLoader`, with errors that name samples.

The unit of work is a whole micro-batch, fetched and collated in the worker. A worker that hangs is
found by the watchdog of its rank. A worker exits by itself when the training process is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from anybatch.data.batch_slices import map_leaves
from anybatch.data.failure import refused_shared_memory, told, told_samples
from anybatch.data.fetch import Piece, Request, SampleFetch
from anybatch.errors import DataError
from anybatch.oom import is_memory_error

_JOIN_SECONDS = 5.0
_PARENT_SECONDS = 1.0  # between two checks of its parent by a worker


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
        self._pending: deque[Request] = deque()  # those whose batches have not been taken

    def restart(self) -> None:
        """Discards prefetched batches and calls `requests()` again.

        Raises `DataError` if the operating system refuses resources that workers need.
        """
        self._pending.clear()
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
                f" ({told(error)}): the system refuses them memory, processes or open files; use fewer"
                " num_workers, or num_workers=0, or raise its limits (ulimit -a shows them)."
            ) from error

    def _start(self) -> None:
        if self._loader is not None:
            try:
                self._batches = iter(self._loader)
                return
            except RuntimeError:  # a worker has died, or is busy with a discarded request
                self._kill()
        self._loader = DataLoader(
            _Served(self._fetch),
            batch_size=None,
            sampler=_Requests(self._requests, self._pending),
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            persistent_workers=True,
            pin_memory=self._pin_memory,
            worker_init_fn=_at_start,
            # Otherwise every start would draw from the generator that training uses.
            generator=torch.Generator(device="cpu"),
        )
        self._batches = iter(self._loader)

    def next(self) -> Any:
        """Returns the next batch.

        Raises the error of its fetch (`DataError`, or `MemoryError`), and `DataError` if a worker has
        died.
        """
        try:
            batch = next(self._batches)
        except Exception as error:
            text = str(error)
            if is_memory_error(error) and text.startswith("Caught "):
                # The text holds the worker's whole traceback; its last line is the error itself.
                raise MemoryError(
                    "a worker process that loads samples, which is under no budget, was refused memory"
                    f" ({text.splitlines()[-1]}): use fewer num_workers, or num_workers=0"
                ) from error
            # The others are raised if a worker died after it had announced its batch.
            if text.startswith("DataLoader ") or isinstance(error, OSError | EOFError):
                raise self._death(error) from error
            raise
        self._pending.popleft()
        if isinstance(batch, _Failure):
            raise batch.error from WorkerTraceback(batch.trace)
        return batch

    def _death(self, error: Exception) -> DataError:
        """Kills all workers, and returns the error to raise after one of them has died."""
        names = [(epoch, at) for epoch, indices in self._pending[0] for at in indices.tolist()]
        self._kill()
        return DataError(
            f"a worker process that loads samples has died, while {told_samples(names)} of"
            f" {self._fetch.name} or some soon after them were loaded ({error}): most often it was out"
            " of memory or shared memory (docker run --shm-size), or the data set's own code crashed;"
            " use fewer num_workers, or num_workers=0 to see the error."
        )

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
                queue._thread.join(_JOIN_SECONDS)


class _Failure(NamedTuple):
    """A `DataError` returned by a worker; if it were raised, `DataLoader` would add a traceback to its
    text."""

    error: DataError
    trace: str


@final
class _Served(Dataset[Any]):
    """A fetch wrapped as a data set for `DataLoader`: the key of an item is a whole request."""

    def __init__(self, fetch: SampleFetch) -> None:
        self._fetch = fetch

    def __getitem__(self, request: Any) -> Any:
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


def _shared(leaf: Any) -> Any:
    """Moves a tensor in host memory to shared memory, in place."""
    if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided:
        leaf.share_memory_()
    return leaf


@final
class _Requests:
    """A sampler of whole requests, which adds those that it has given to `pending`."""

    def __init__(self, requests: Callable[[], Iterator[Request]], pending: deque[Request]) -> None:
        self._requests, self._pending = requests, pending

    def __iter__(self) -> Iterator[Any]:
        for request in self._requests():
            self._pending.append(request)
            # As arrays, which are pickled; tensors would take a shared-memory file each.
            yield [(piece.epoch, piece.indices.numpy().copy()) for piece in request]


def _at_start(_worker: int) -> None:
    """Runs in a worker when it starts. torch's workers check their parent only between two batches, so
    a worker that hangs would outlive a parent that was killed."""
    # With "forkserver" this is the server, which ends with the training process.
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


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
