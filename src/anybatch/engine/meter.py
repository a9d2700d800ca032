"""Meters: bytes that training uses on a device, above a baseline."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import psutil
import torch

from anybatch.process.cuda_driver import beside_bytes, release_unused, release_workspaces
from anybatch.process.process_memory import filled_addresses, free_in_heap, reset_peak, status


class Meter(ABC):
    """Bytes on one device, above a baseline taken when the meter was made."""

    _most: dict[str, int]  # the peaks of the laps before this one, by account

    @abstractmethod
    def peak_bytes(self) -> int:
        """Most bytes in use at any time since the baseline."""

    def totals(self) -> dict[str, int]:
        """Most bytes at any time since the baseline, by each account of the device's memory that is
        kept; see `Prediction`."""
        return {"total": self.peak_bytes()}

    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes in use now."""

    def kept_bytes(self) -> int:
        """Bytes in use now, without what an allocator only holds."""
        return self.used_bytes()

    @abstractmethod
    def begin_lap(self) -> None:
        """Measure the peak from here on, too; the one before is remembered."""

    @abstractmethod
    def drop_lap(self) -> None:
        """Forget the peak since the lap began: what it was measured for was undone."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The peak of what is done inside does not count; what it leaves behind does."""
        self.peak_bytes()
        before = dict(self._most)
        try:
            yield
        finally:
            self.drop_lap()
            self._most = before

    @abstractmethod
    def lap_bytes(self) -> int:
        """Most bytes in use since the lap began."""

    @abstractmethod
    def fragmented_bytes(self) -> int | None:
        """Bytes that the allocator holds in pieces that nobody uses; None where it does not tell."""


class CpuMeter(Meter):
    """Resident memory of this process as the kernel counts it. The kernel's own peak is used where it
    can be reset (Linux), so nothing between two looks is missed.

    Args:
        counted_bytes: what was in the process before and counts all the same.
    """

    def __init__(self, counted_bytes: int = 0) -> None:
        self._process = psutil.Process()
        self._exact = reset_peak()
        self._files = status("RssFile") if self._exact else 0
        there = self._process.memory_info().rss
        self._baseline = there - counted_bytes
        self._script = ScriptBytes(self._filled())
        self._most = {"total": 0}
        self._lap = 0  # most bytes of the process since the lap began, before this pass

    def peak_bytes(self) -> int:
        """See `Meter`. Without the kernel's peak: the largest value seen at a call."""
        if not self._script.rests:
            self._most["total"] = max(self._most["total"], self.lap_bytes())
        return self._most["total"]

    def rest(self) -> None:
        """From now on the process is its script's: what is taken, and kept, does not count."""
        if not self._script.rests:
            self.peak_bytes()
            self._script.rest(self._filled())

    def resume(self) -> None:
        """It is no more."""
        if self._script.rests:
            self._script.resume(self._filled())
            self.drop_lap()

    def begin_pass(self) -> None:
        """Measure the peak of one pass, too."""
        self._lap = self._most_own_bytes()
        reset_peak()

    def pass_bytes(self) -> int:
        """Most bytes in use since `begin_pass`."""
        return max(0, self._peak_of_kernel() - self._baseline - self._script.num_bytes)

    def used_bytes(self) -> int:
        return max(0, self._own_bytes() - self._baseline - self._script.num_bytes)

    def fragmented_bytes(self) -> int | None:
        """See `Meter`: what the heap holds free."""
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
        """Since the lap began."""
        return max(self._lap, self._peak_of_kernel())

    def _peak_of_kernel(self) -> int:
        """Since it was reset; without it, the bytes of now."""
        return status("VmHWM") - self._code_bytes() if self._exact else self._own_bytes()

    def _filled(self) -> int:
        """What grows by what the script takes, and not by the pages of free memory that it uses."""
        return filled_addresses() if self._exact else self._own_bytes()

    def _own_bytes(self) -> int:
        return self._process.memory_info().rss - self._code_bytes()

    def _code_bytes(self) -> int:
        """Pages of program files that were touched since: the kernel may drop them at any time, so
        they are not memory that training holds."""
        return status("RssFile") - self._files if self._exact else 0


@final
class ScriptBytes:
    """What the script of a process has taken between two steps, and keeps.

    What the process grows by while the script has it is the script's. But either side may free what the
    other took (a batch that is made between two steps and dropped in one), and a plain sum would drift
    by so much with each step. So what was the script's once stays so, and it is never more than the
    process has grown by since the beginning.

    Args:
        start: what the process holds when its budget begins to count.

    Attributes:
        num_bytes: that the script keeps.
    """

    def __init__(self, start: int) -> None:
        self.num_bytes: int = 0
        self._start = start
        self._now = self._most = 0
        self._begun: int | None = None

    @property
    def rests(self) -> bool:
        """Whether the process is the script's now."""
        return self._begun is not None

    def rest(self, there: int) -> None:
        """The process, which holds so many bytes, is the script's from now on."""
        self._begun = there

    def resume(self, there: int) -> None:
        """It is the script's no more, if it was, and holds so many."""
        if self._begun is None:
            return
        grown = max(0, there - self._start)
        self._now = min(max(0, self._now + there - self._begun), grown)
        self._most = max(self._most, self._now)
        self.num_bytes = min(self._most, grown)
        self._begun = None


class CudaMeter(Meter):
    """What torch's allocator has reserved on a device, and what the process holds beside it (the
    context, the kernels, libraries)."""

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

    def kept_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def begin_lap(self) -> None:
        """See `Meter`. What the allocator keeps and nobody uses is given back, so that it is not taken
        for the lap's."""
        self.peak_bytes()
        release_unused(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def drop_lap(self) -> None:
        """See `Meter`. What the lap's tensors left free in the allocator is given back, or it would
        count as reserved from here on."""
        release_unused(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def lap_bytes(self) -> int:
        return self.beside_bytes + torch.cuda.max_memory_reserved(self._device)

    def fragmented_bytes(self) -> int | None:
        """See `Meter`: what is reserved and not allocated."""
        held = torch.cuda.memory_reserved(self._device)
        return max(0, held - torch.cuda.memory_allocated(self._device))
