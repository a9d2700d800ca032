"""A crew of processes that run a test's function as ranks, with gloo between them.

Starting an interpreter with torch takes seconds, so the processes stay for all tests of a session:

    def work(rank, size, world): ...          # at the top of a test module; runs on every rank

    def test_it(crew):
        first, second = crew(2, work, world)  # what each rank returned
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

DEADLINE_SECONDS = 120.0
"""A crew that is not done by then hangs."""


class RankError(Exception):
    """A rank raised: `error` is what, `rank` which one; the text holds its traceback."""

    def __init__(self, rank: int, error: BaseException, trace: str) -> None:
        super().__init__(f"rank {rank}: {error!r}\n{trace}")
        self.rank = rank
        self.error = error


class Crew:
    """Processes that are started when they are first needed, and again after one was lost.

    Attributes:
        pids: of all crews: they outlive the test that first asked for them.
    """

    pids: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Any]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = itertools.count()

    def __call__(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(rank, size, *args)` returned on each of `size` ranks.

        Raises `RankError` for the first rank that raised.
        """
        outcomes = self.outcomes(size, function, *args)
        for rank, (error, result) in enumerate(outcomes):
            if error is not None:
                raise RankError(rank, error, result)
        return [result for _, result in outcomes]

    def outcomes(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """For each rank (None, result), or (error, traceback); `EOFError` for one that died."""
        while len(self._members) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self.pids.add(process.pid)
            theirs.close()
            self._members.append((process, ours))
        store = Path(self._folder.name) / f"store-{next(self._numbers)}"
        crew = self._members[:size]
        for rank, (_, pipe) in enumerate(crew):
            pipe.send((function, args, rank, size, str(store)))
        outcomes: list[Any] = []
        lost = False
        for process, pipe in crew:
            try:
                if not pipe.poll(DEADLINE_SECONDS):
                    raise TimeoutError(f"no answer within {DEADLINE_SECONDS} s")
                answer, usable = pipe.recv()
                outcomes.append(answer)
                lost |= not usable
            except (EOFError, OSError) as error:
                process.kill()
                lost = True
                outcomes.append((error, f"exit code {process.exitcode}"))
        if lost:
            self.close()
        store.unlink(missing_ok=True)
        return outcomes

    def close(self) -> None:
        """End all processes."""
        for process, pipe in self._members:
            pipe.close()
            process.kill()
            process.join()
            self.pids.discard(process.pid)
        self._members = []


def _serve(pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, args, rank, size, store = pipe.recv()
        except EOFError:
            return
        usable = False  # any more: groups that were not made or ended whole leave their number
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=DEADLINE_SECONDS / 4),
            )
            try:
                dist.barrier()  # none may leave while another is still on its way to it
                answer = (None, function(rank, size, *args))
            finally:
                dist.destroy_process_group()
                usable = True
        except BaseException as error:
            answer = (error, traceback.format_exc())
        try:
            pipe.send((answer, usable))
        except Exception as error:  # what does not pickle
            told = RuntimeError(f"{type(error).__name__}: {error}")
            pipe.send(((told, repr(answer)), usable))
