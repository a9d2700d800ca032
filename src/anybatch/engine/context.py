"""Context: the objects that the passes of one rank share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from anybatch.compute import Replica
from anybatch.engine.limit import Limit
from anybatch.engine.meter import Meter
from anybatch.engine.randomness import Randomness
from anybatch.engine.rollback import SavedBuffers
from anybatch.engine.step_thread import StepThread
from anybatch.parallel import Group


class ComputeTimer:
    """Measures the seconds spent inside `running`. On CUDA this is device time, and is known one step
    late, since reading it at once would block on the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._marks: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._cuda is None:
            begun = time.perf_counter()
            yield
            self._seconds = time.perf_counter() - begun
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(self._cuda))
        yield
        end.record(torch.cuda.current_stream(self._cuda))
        self._marks = begin, end

    @property
    def last_seconds(self) -> float:
        """The latest known time; 0 before the first one."""
        if self._marks is not None and self._marks[1].query():
            begin, end = self._marks
            self._seconds = begin.elapsed_time(end) / 1e3
            self._marks = None
        return self._seconds

    def wait(self) -> float:
        """Returns the latest time; waits for the device."""
        if self._marks is not None:
            self._marks[1].synchronize()
        return self.last_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """One replica and the objects that its passes share, in steps and in rehearsals. `limit` is
    already entered."""

    replica: Replica
    group: Group
    device: torch.device
    randomness: Randomness
    limit: Limit
    meter: Meter
    thread: StepThread
    buffers: SavedBuffers
    timer: ComputeTimer
