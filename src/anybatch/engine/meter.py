"""Meters: measure the bytes that training uses on a device, above a baseline."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import psutil
import torch

from anybatch.process.cuda_driver import beside_bytes, release_unused, release_workspaces
from anybatch.process.process_memory import (
    InUse,
    free_in_heap,
    in_use,
    peak_and_files,
    reset_peak,
    status,
)


class Meter(ABC):
    """Measures bytes on one device, above a baseline taken at construction."""

    _most: dict[str, int]  # the peaks of previous laps, by counter

    @abstractmethod
    def peak_bytes(self) -> int:
        """Returns the peak of bytes in use since the baseline."""

    def totals(self) -> dict[str, int]:
        """Returns the peak bytes since the baseline for each counter that the device keeps; see
        `Prediction`."""
        return {"total": self.peak_bytes()}

    @abstractmethod
    def used_bytes(self) -> int:
        """Returns the bytes in use now."""

    @abstractmethod
    def begin_lap(self) -> None:
        """Start measuring a new peak; the peak so far is remembered."""

    @abstractmethod
    def drop_lap(self) -> None:
        """Forget the peak since the lap began, because the work it measured was undone."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the peak of the enclosed block; memory that it leaves allocated still counts."""
        self.peak_bytes()
        before = dict(self._most)
        try:
            yield
        finally:
            self.drop_lap()
            self._most = before

    @abstractmethod
    def lap_bytes(self) -> int:
        """Returns the peak of bytes in use since the lap began."""

    @abstractmethod
    def fragmented_bytes(self) -> int | None:
        """Returns the bytes that the allocator holds in unused pieces; None if unknown."""


class CpuMeter(Meter):
    """Measures the resident memory of this process as counted by the kernel. The kernel's own peak is
    used where it can be reset (Linux), so nothing between two readings is missed.

    Args:
        counted_bytes: memory that was in the process before and still counts.
    """

    def __init__(self, counted_bytes: int = 0) -> None:
        self._process = psutil.Process()
        self._exact = reset_peak()
        self._files = status("RssFile") if self._exact else 0
        there = self._process.memory_info().rss
        self._baseline = there - counted_bytes
        self._script = ScriptBytes(self._in_use())
        self._most = {"total": 0}
        self._lap = 0  # peak bytes of the process since the lap began, before this pass

    def peak_bytes(self) -> int:
        """See `Meter`. Without the kernel's peak, returns the largest value seen at a call."""
        if not self._script.rests:
            self._most["total"] = max(self._most["total"], self.lap_bytes())
        return self._most["total"]

    def rest(self) -> None:
        """Stop counting: memory that the script allocates and keeps from now on is excluded."""
        if not self._script.rests:
            self.peak_bytes()
            self._script.rest(self._in_use())

    def resume(self) -> None:
        """Resume counting: the script no longer runs."""
        if self._script.rests:
            self._script.resume(self._in_use())
            self.drop_lap()

    def begin_pass(self) -> None:
        """Also measure the peak of one pass."""
        self._lap = self._most_own_bytes()
        reset_peak()

    def pass_bytes(self) -> int:
        """Returns the peak of bytes in use since `begin_pass`."""
        return max(0, self._peak_of_kernel() - self._baseline - self._script.num_bytes)

    def used_bytes(self) -> int:
        return max(0, self._own_bytes() - self._baseline - self._script.num_bytes)

    def fragmented_bytes(self) -> int | None:
        """See `Meter`. Returns the free bytes in the heap."""
        return free_in_heap()

    def begin_lap(self) -> None:
        self.peak_bytes()
        self.drop_lap()

    def drop_lap(self) -> None:
        self._lap = 0
        reset_peak()

    def lap_bytes(self) -> int:
        return max(0, self._most_own_bytes() - self._baseline - self._script.num_bytes)

    def _most_own_bytes(self) -> int:
        """Returns the peak bytes of the process since the lap began."""
        return max(self._lap, self._peak_of_kernel())

    def _peak_of_kernel(self) -> int:
        """Returns the kernel's peak since it was last reset; without it, the current bytes."""
        if not self._exact:
            return self._own_bytes()
        peak, code = peak_and_files()
        return peak - (code - self._files)

    def _in_use(self) -> InUse:
        return in_use() if self._exact else InUse(self._own_bytes())

    def _own_bytes(self) -> int:
        return self._process.memory_info().rss - self._code_bytes()

    def _code_bytes(self) -> int:
        """Returns the bytes of pages of program files that were touched since the baseline. The kernel
        may drop them at any time, so training does not hold them."""
        return status("RssFile") - self._files if self._exact else 0


@final
class ScriptBytes:
    """Tracks the memory that the script of a process has allocated between two steps and keeps.

    Growth of the process while the script runs is attributed to the script. But either side may free
    what the other allocated (such as a batch that is made between two steps and dropped in one), and a
    plain sum would drift by that amount in each step. So memory attributed to the script once stays
    attributed to it, and the total never exceeds the growth of the process since the beginning.

    Args:
        start: memory of the process when its budget begins to count.

    Attributes:
        num_bytes: bytes that the script keeps.
    """

    def __init__(self, start: InUse) -> None:
        self.num_bytes: int = 0
        self._start = start
        self._now = self._most = 0
        self._begun: InUse | None = None

    @property
    def rests(self) -> bool:
        """Whether the script runs now."""
        return self._begun is not None

    def rest(self, there: InUse) -> None:
        """The script runs from now on; the process uses `there`."""
        self._begun = there

    def resume(self, there: InUse) -> None:
        """The script no longer runs, if it did; the process uses `there`."""
        if self._begun is None:
            return
        grown = max(0, there.since(self._start))
        self._now = min(max(0, self._now + there.since(self._begun)), grown)
        self._most = max(self._most, self._now)
        self.num_bytes = min(self._most, grown)
        self._begun = None


class CudaMeter(Meter):
    """Measures what torch's allocator has reserved on a device, plus what the process holds outside the
    allocator (context, kernels, libraries)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.empty(1, device=device)  # creates the context, which counts
        gc.collect()
        release_workspaces(device)
        self.beside_bytes: int = beside_bytes(device)
        self._most = {"allocated": 0, "active": 0, "reserved": 0}
        torch.cuda.reset_peak_memory_stats(device)

    def peak_bytes(self) -> int:
        return self.totals()["total"]

    def totals(self) -> dict[str, int]:
        kept = torch.cuda.memory_stats(self._device)
        for name, most in self._most.items():
            self._most[name] = max(most, kept.get(f"{name}_bytes.all.peak", 0))
        return {**self._most, "total": self.beside_bytes + self._most["reserved"]}

    def used_bytes(self) -> int:
        return self.beside_bytes + torch.cuda.memory_reserved(self._device)

    def begin_lap(self) -> None:
        """See `Meter`. Releases unused memory of the allocator, which would count toward the lap."""
        self.peak_bytes()
        release_unused(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def drop_lap(self) -> None:
        """See `Meter`. Releases the memory that the lap's tensors left unused in the allocator, which
        would otherwise count as reserved from here on."""
        release_unused(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def lap_bytes(self) -> int:
        return self.beside_bytes + torch.cuda.max_memory_reserved(self._device)

    def fragmented_bytes(self) -> int | None:
        """See `Meter`. Returns the bytes that are reserved and not allocated."""
        held = torch.cuda.memory_reserved(self._device)
        return max(0, held - torch.cuda.memory_allocated(self._device))
