"""Limit: enforces the memory budget and provides the meter of what training uses.

On CUDA the caching allocator refuses memory beyond a fraction of the device. On CPU the kernel measures
the peak of each pass: a pass that exceeds the budget raises `OverBudget`, an out-of-memory error like
any other, and its step is redone under a leaner plan.

CPU memory is measured relative to `enter()`, after first-use allocations that stay with the process
(thread pools, parts of torch that load late). What the script allocates between two steps, and keeps,
counts toward no budget. Work that happens once and whose memory no later pass needs is not measured:
cuDNN's benchmarks of a new shape, and on CPU what `torch.compile` compiles within a pass.
"""

from __future__ import annotations

import functools
import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.compute.low_bit_optimizers import parts_of
from anybatch.data import map_leaves
from anybatch.engine.meter import CpuMeter, CudaMeter, Meter
from anybatch.errors import InputError
from anybatch.plans import FreedMemory, Plan
from anybatch.process import compilation
from anybatch.process.cuda_driver import release_unused
from anybatch.process.process_memory import (
    keep_freed_memory,
    return_freed_memory,
    trim,
    use_one_heap,
)
from anybatch.units import format_bytes


class OverBudget(MemoryError):
    """Raised when the measured memory of a pass exceeds the budget.

    Attributes:
        used_bytes: peak bytes in use.
    """

    def __init__(self, used_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"a pass was measured to use {format_bytes(used_bytes)}, more than the budget of"
            f" {format_bytes(budget_bytes)}"
        )
        self.used_bytes: int = used_bytes


class Limit(ABC):
    """Enforces a budget, if there is one, between `enter` and `leave`."""

    @abstractmethod
    def enter(self) -> Meter:
        """Take the baseline, start to enforce the budget, and return the meter of the memory in use."""

    @abstractmethod
    def leave(self) -> None:
        """Stop enforcing the budget."""

    @abstractmethod
    def watched(self, kind: object, batch: Any) -> AbstractContextManager[None]:
        """Context manager for a pass of a `kind` over `batch`. Raises `OverBudget` at the end if the
        pass exceeded the budget."""

    def follow(self, freed_memory: FreedMemory) -> None:
        """Keep or return freed memory from now on, where the C library supports it."""
        del freed_memory

    def reserve(self, num_bytes: int) -> None:
        """Raises a memory error if there is no room for `num_bytes` more."""
        del num_bytes


@final
class CpuLimit(Limit):
    """Enforces the budget by measuring each pass.

    Args:
        budget_bytes: memory that training may add; None: memory is only measured.
        counted_bytes: part of the budget that is already in the process, such as the parameters of a
            model that was built before.
        compiles: whether `torch.compile` may compile during a pass.
    """

    def __init__(
        self, budget_bytes: int | None = None, counted_bytes: int = 0, compiles: bool = False
    ) -> None:
        self._budget = budget_bytes
        self._counted = counted_bytes
        self._compiles = compiles
        self._meter: CpuMeter | None = None
        self._growth: dict[Hashable, int] = {}  # largest growth during a pass, by shape

    def enter(self) -> Meter:
        with uncounted():
            warm_up()
            if self._budget is not None:
                use_one_heap()
                if self._compiles:
                    exclude_compiler()
                gc.collect()
        trim()
        self._meter = CpuMeter(self._counted)
        if self._budget is not None:
            _WORK.meters[self] = self._meter
        return self._meter

    def leave(self) -> None:
        if _WORK.meters.pop(self, None) is not None:
            keep_freed_memory()

    def follow(self, freed_memory: FreedMemory) -> None:
        if self._budget is not None:
            return_freed_memory() if freed_memory == "returned" else keep_freed_memory()

    @contextmanager
    def watched(self, kind: object, batch: Any) -> Iterator[None]:
        if self._budget is None or self._meter is None:
            yield
            return
        shape = kind, shapes_of(batch)
        growth, before = self._growth.get(shape), self._meter.used_bytes()
        if growth is None or before + growth > self._budget:
            trim()  # otherwise freed memory in the heap adds to what the pass takes
            before = self._meter.used_bytes()
        self._meter.begin_pass()
        yield
        peak = self._meter.pass_bytes()
        self._growth[shape] = max(growth or 0, peak - before)
        if peak > self._budget:
            trim()  # the peak begins anew, without what the pass has left free in the heap
            self._meter.drop_lap()
            raise OverBudget(peak, self._budget)

    def reserve(self, num_bytes: int) -> None:
        if self._budget is None or self._meter is None:
            return
        if self._meter.used_bytes() + num_bytes > self._budget:
            trim()
            if (needed := self._meter.used_bytes() + num_bytes) > self._budget:
                raise OverBudget(needed, self._budget)


@final
class CudaLimit(Limit):
    """Enforces the budget with torch's caching allocator, as a fraction of the device memory.

    Args:
        device: device whose memory is limited.
        budget_bytes: budget of this process; None: memory is only measured.
        tunes: whether cuDNN benchmarks its algorithms.
    """

    def __init__(
        self, device: torch.device, budget_bytes: int | None = None, tunes: bool = False
    ) -> None:
        self._device = device
        self._budget = budget_bytes
        self._tunes = tunes
        self._met: set[Hashable] = set()  # shapes for which cuDNN has benchmarked its algorithms
        self._meter: CudaMeter | None = None

    def enter(self) -> Meter:
        """See `Limit`. Raises `InputError` if the process already holds the budget or more."""
        meter = self._meter = CudaMeter(self._device)
        if self._budget is None:
            return meter
        if meter.used_bytes() >= self._budget:
            raise InputError(
                f"this process holds {format_bytes(meter.used_bytes())} of {self._device} already, its"
                f" CUDA context among it, and the budget is {format_bytes(self._budget)}: free what"
                " the script has left there, or give more memory."
            )
        _, total = torch.cuda.mem_get_info(self._device)
        fraction = (self._budget - meter.beside_bytes) / total
        _fraction_of(_index(self._device)).hold(self, min(max(fraction, 0.0), 1.0))
        return meter

    def leave(self) -> None:
        if self._budget is not None:
            _fraction_of(_index(self._device)).give_up(self)

    def watched(self, kind: object, batch: Any) -> AbstractContextManager[None]:
        """See `Limit`. The budget is enforced by the allocator, in the middle of a pass."""
        shape = kind, shapes_of(batch) if self._tunes else None
        if not self._tunes or shape in self._met:
            return nullcontext()
        self._met.add(shape)
        return self._unmeasured()

    @contextmanager
    def _unmeasured(self) -> Iterator[None]:
        assert self._meter is not None
        with self._meter.aside():
            try:
                yield
            finally:
                release_unused(self._device)


class _Fraction:
    """Memory fraction of the allocator on a CUDA device. Several `Step`s may hold one at once: the
    smallest applies. When the last one is released, the original fraction is restored."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._before: float | None = None  # the original fraction
        # A limit that was dropped without `leave` no longer holds a fraction.
        self._held: WeakKeyDictionary[CudaLimit, float] = WeakKeyDictionary()

    def hold(self, holder: CudaLimit, fraction: float) -> None:
        if self._before is None:
            self._before = torch.cuda.get_per_process_memory_fraction(self._index)
        self._held[holder] = fraction
        self._write()

    def give_up(self, holder: CudaLimit) -> None:
        if self._held.pop(holder, None) is not None:
            self._write()

    def _write(self) -> None:
        fraction = min(self._held.values(), default=self._before)
        if fraction is not None:
            torch.cuda.set_per_process_memory_fraction(fraction, self._index)
        if not self._held:
            self._before = None


_fraction_of = functools.cache(_Fraction)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class _Work:
    """Tracks whether the process works under its CPU budgets or runs the script, for all of them."""

    def __init__(self) -> None:
        # A limit that was dropped without `leave` is no longer counted.
        self.meters: WeakKeyDictionary[CpuLimit, CpuMeter] = WeakKeyDictionary()
        self._num_at_work = self._num_aside = 0
        self._lock = threading.Lock()

    def change(self, at_work: int = 0, aside: int = 0) -> None:
        """Add to the numbers of entered blocks of work and of uncounted blocks (`aside`)."""
        with self._lock:
            self._num_at_work += at_work
            self._num_aside += aside
            for meter in list(self.meters.values()):
                if self._num_at_work and not self._num_aside:
                    meter.resume()
                else:
                    meter.rest()


_WORK = _Work()


@contextmanager
def at_work() -> Iterator[None]:
    """Context manager for work that counts toward the CPU budgets of this process. Can be nested.
    Memory allocated between two such blocks counts toward no budget."""
    _WORK.change(at_work=1)
    try:
        yield
    finally:
        _WORK.change(at_work=-1)


@contextmanager
def uncounted() -> Iterator[None]:
    """Context manager in which memory that is allocated and kept counts toward no CPU budget."""
    _WORK.change(aside=1)
    try:
        yield
    finally:
        _WORK.change(aside=-1)


@functools.cache
def exclude_compiler() -> None:
    """Make what `torch.compile` allocates and keeps count toward no CPU budget of this process."""
    compilation.on_compilation(lambda: _WORK.change(aside=1), lambda: _WORK.change(aside=-1))


def make_limit(plan: Plan, device: torch.device, counted: Iterable[object] = ()) -> Limit:
    """Returns the limit that enforces the budget of `plan` on `device`.

    Args:
        plan: provides the budget and whether it is enforced.
        device: device of this rank.
        counted: modules and optimizers that were built before: their memory is already in the process
            and counts as memory of training. Other objects are ignored.
    """
    budget = plan.budget_bytes if plan.enforced else None
    if device.type == "cuda":
        return CudaLimit(device, budget, plan.kernels.autotune)
    compiles = plan.kernels.compile or compilation.is_loaded()
    return CpuLimit(budget, held_bytes(counted), compiles)


def held_bytes(owners: Iterable[object]) -> int:
    """Returns the bytes held by the modules and optimizers among `owners`."""
    tensors = [tensor for owner in owners for tensor in _tensors_of(owner)]
    there = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(there.values())


def _tensors_of(owner: object) -> list[Tensor]:
    values: list[Any] = []
    if isinstance(owner, nn.Module):
        values += [*owner.parameters(), *owner.buffers()]
    if isinstance(owner, Optimizer):
        values += [value for state in owner.state.values() for value in state.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [part for tensor in tensors for part in parts_of(tensor).values()]


def shapes_of(batch: Any) -> tuple[Any, ...]:
    """Returns the shapes and dtypes of the tensors in `batch`, by which kernels are selected."""
    shapes: list[Any] = []

    def look(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            shapes.append((tuple(leaf.shape), leaf.dtype))
        return leaf

    map_leaves(batch, look)
    return tuple(shapes)


@functools.cache
def warm_up() -> None:
    """Trigger the first-use allocations that stay with the process: the thread pool, and what the first
    convolution, norm, attention, backward and optimizer step load (tens of MiB in total), so that they
    are not attributed to training."""
    with torch.random.fork_rng(devices=[]):
        images, tokens = torch.randn(64, 1, 8, 8), torch.randint(8, (8, 16))
        convolutions = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        attention = nn.Sequential(
            nn.Embedding(8, 16),
            nn.TransformerEncoderLayer(16, 2, 32, 0.1, "gelu", batch_first=True),
        )
        layers = nn.ModuleList([convolutions, attention, nn.Linear(72, 16)])
        optimizer = torch.optim.AdamW(layers.parameters())
        with torch.enable_grad():
            logits = torch.cat([layers[2](convolutions(images)), attention(tokens).flatten(0, 1)])
            loss = nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
            (loss + (torch.randn(256, 256) @ torch.randn(256, 256)).sum()).backward()
        optimizer.step()
