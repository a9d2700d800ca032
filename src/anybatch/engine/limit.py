"""The memory budget held for real, and what training really used.

On CUDA the caching allocator refuses beyond a fraction of the device. On Linux the kernel refuses: the
soft `RLIMIT_DATA` counts private writable mappings, so an allocation over the budget fails at once, as
it would on a device, instead of waking the killer of processes.

Memory on a CPU is measured relative to `enter`. First uses that stay (thread pools, the parts of torch
that load late) are made before it, with a budget and without one, so that the measurement does not
depend on what the process has done already.

glibc keeps freed memory for reuse, which is fast and leaves holes, or returns it to the kernel, which
costs a page fault for each page of each later block. Which of them is part of the plan
(`Choice.freed_memory`); the last budget that ends leaves glibc as a process with large blocks has it.
What is kept counts. So before a pass that would not have room beside it, it is returned once.

The generator of oneDNN's kernels does not survive being refused memory (see `anybatch.oom`; some
kernels then jump to address zero). Kernels are generated when a shape is computed for the first time.
So the first passes of each shape run with the limit lifted and are measured: one that went over the
budget counts as out of memory. Libraries reserve addresses that they do not fill, which the kernel
counts. The first passes show how many, and the limit is raised by them.

On CUDA, cuDNN may try its algorithms for a shape when it first meets it. What they take for that, up
to all that is free, is given back after the pass and not measured: no prediction knows it, no later
pass needs it, and it gives way to a budget by itself.

A process may hold several budgets, as two `Step`s that take turns do. Each counts what the process has
taken since it was entered, whichever of them took it; the strictest holds, and to lift one is to lift
all.

Between two steps the process is its script's, which evaluates, draws samples, saves: nothing is refused
there, and what it takes and keeps counts for no budget.

    at work    | step |            | step |                 | evaluation |
    at rest           | the script |      | the script ... |
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.compute.low_bit_optimizers import parts_of
from anybatch.data import map_leaves
from anybatch.engine.meter import CpuMeter, CudaMeter, Meter
from anybatch.engine.process import (
    filled_addresses,
    keep_freed_memory,
    new_peak_of_addresses,
    return_freed_memory,
    status,
    trim,
    use_one_heap,
)
from anybatch.engine.script_bytes import ScriptBytes
from anybatch.engine.shared_limit import SharedLimit
from anybatch.errors import InputError
from anybatch.plans import FreedMemory, Plan
from anybatch.process.cuda_driver import release_unused
from anybatch.process.host_memory import host_memory
from anybatch.units import format_bytes

if sys.platform != "win32":
    import resource


_SLACK_BYTES = 16 << 20
"""Addresses beyond the budget that the kernel does not refuse: libraries reserve some at any time that
they do not fill. What is in use is measured."""

_PASSES = 2
"""Passes of each shape that run with the limit lifted and are measured."""


class OverBudget(MemoryError):
    """A pass that was not held to the budget was measured to go over it.

    Attributes:
        used_bytes: most that was in use.
    """

    def __init__(self, used_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"a first pass was measured to use {format_bytes(used_bytes)}, more than the budget of"
            f" {format_bytes(budget_bytes)}"
        )
        self.used_bytes: int = used_bytes


class Limit(ABC):
    """Holds a budget between `enter` and `leave`.

    Attributes:
        is_ours: the operating system's limit on this process is this one, and can be lifted.
    """

    is_ours: bool = False
    _tuning: _Tuning | None = None  # while cuDNN tries its algorithms

    @abstractmethod
    def enter(self) -> Meter:
        """Take the baseline, begin to hold the budget, and return the meter of what is used."""

    @abstractmethod
    def leave(self) -> None:
        """Hold it no longer."""

    def follow(self, freed_memory: FreedMemory) -> None:
        """Keep or return freed memory from now on, where the C library can be told."""
        del freed_memory

    def first_pass(self, kind: object, batch: Any) -> AbstractContextManager[None]:
        """Around a pass of a `kind` over `batch`, which may be the first over its shapes.

        Raises `OverBudget` at the end if the pass went over the budget.
        """
        return nullcontext() if self._tuning is None else self._tuning.first_pass(kind, batch)

    def lifted(self) -> AbstractContextManager[None]:
        """What is taken inside, and stays, does not count."""
        return nullcontext()

    def waived(self) -> AbstractContextManager[None]:
        """Around what must not be refused memory, though what it takes and keeps does count."""
        return nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        """Around the start and the end of other processes. They are under the limits that this one had
        before; what it takes to speak to them, and keeps, does not count."""
        return nullcontext()


class _Tuning:
    """First passes over shapes for which cuDNN tries its algorithms. `meter`: of the device."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self._device = device
        self._meter = meter
        self._met: set[Hashable] = set()

    def first_pass(self, kind: object, batch: Any) -> AbstractContextManager[None]:
        """See `Limit`."""
        shape = kind, shapes_of(batch)
        if shape in self._met:
            return nullcontext()
        self._met.add(shape)
        return self._unmeasured()

    @contextmanager
    def _unmeasured(self) -> Iterator[None]:
        with self._meter.aside():
            try:
                yield
            finally:
                release_unused(self._device)


class Unlimited(Limit):
    """No budget is held; only measured. `tunes`: cuDNN tries its algorithms."""

    def __init__(self, device: torch.device, tunes: bool = False) -> None:
        self._device = device
        self._tunes = tunes

    def enter(self) -> Meter:
        """See `Limit`."""
        if self._device.type == "cuda":
            meter = CudaMeter(self._device)
            self._tuning = _Tuning(self._device, meter) if self._tunes else None
            return meter
        with uncounted():
            _warm_up_once()
        trim()
        return CpuMeter()

    def leave(self) -> None:
        """See `Limit`."""


class CudaLimit(Limit):
    """Held by torch's caching allocator, as a fraction of the device. `tunes`: see `Unlimited`."""

    def __init__(self, device: torch.device, budget_bytes: int, tunes: bool = False) -> None:
        self._device = device
        self._budget = budget_bytes
        self._tunes = tunes
        self._fraction: SharedLimit[CudaLimit] | None = None

    def enter(self) -> Meter:
        """See `Limit`. Raises `InputError` if more than the budget is held already."""
        meter = CudaMeter(self._device)
        self._tuning = _Tuning(self._device, meter) if self._tunes else None
        if meter.used_bytes() >= self._budget:
            raise InputError(
                f"this process holds {format_bytes(meter.used_bytes())} of {self._device} already, its"
                f" CUDA context among it, and the budget is {format_bytes(self._budget)}: free what"
                " the script has left there, or give more memory."
            )
        _, total = torch.cuda.mem_get_info(self._device)
        fraction = (self._budget - meter.beside_bytes) / total
        index = self._device.index
        self._fraction = _fraction_of(torch.cuda.current_device() if index is None else index)
        self._fraction.hold(self, min(max(fraction, 0.0), 1.0))
        return meter

    def leave(self) -> None:
        """See `Limit`."""
        if self._fraction is not None:
            self._fraction.give_up(self)


@functools.cache
def _fraction_of(index: int) -> SharedLimit[CudaLimit]:
    """What the allocator may have of the device with that number."""

    def write(fraction: float) -> None:
        torch.cuda.set_per_process_memory_fraction(fraction, index)

    return SharedLimit(lambda: torch.cuda.get_per_process_memory_fraction(index), write)


class ProcessLimit(Limit):
    """Held by the kernel for this process (Linux).

    Args:
        budget_bytes: what training may add.
        counted_bytes: part of the budget that is in the process already, such as the parameters of a
            model that was built before.
        reserve_bytes: part of the budget that freed memory which is kept does not fill.
    """

    is_ours: bool = True

    def __init__(self, budget_bytes: int, counted_bytes: int = 0, reserve_bytes: int = 0) -> None:
        self._budget = budget_bytes
        self._counted = counted_bytes
        self._room = budget_bytes - reserve_bytes
        self.returns: bool = False  # freed memory to the kernel
        self._soft = 0
        self._empty = 0  # most addresses that were empty at the peak of a pass
        self._beside = self._most_beside = 0  # bytes for other processes: now, and so far
        self._script = ScriptBytes(0)
        self._measured_passes: Counter[Hashable] = Counter()
        self._growth: dict[Hashable, int] = {}  # of a pass that begins with nothing kept

    def enter(self) -> Meter:
        """See `Limit`."""
        _REST.end()
        with uncounted():
            warm_up()
            use_one_heap()
            gc.collect()
        trim()
        self._meter = CpuMeter(self._counted)
        there = status("VmData")
        self._empty = _empty_addresses()
        self._script = ScriptBytes(filled_addresses())
        self._set(there + self._budget - self._counted)
        _follow_holders()
        return self._meter

    def leave(self) -> None:
        """See `Limit`."""
        _DATA.give_up(self)
        if not _DATA.holders:
            _REST.end()
        _follow_holders()

    def follow(self, freed_memory: FreedMemory) -> None:
        """See `Limit`. If several limits are held, memory is returned if one of them asks for it."""
        self.returns = freed_memory == "returned"
        _follow_holders()

    def first_pass(self, kind: object, batch: Any) -> AbstractContextManager[None]:
        """See `Limit`."""
        shape = kind, shapes_of(batch)
        is_measured = self._measured_passes[shape] < _PASSES
        if is_measured or self._meter.used_bytes() + self._growth[shape] > self._room:
            trim()
        return self._measured(shape) if is_measured else nullcontext()

    @contextmanager
    def _measured(self, shape: Hashable) -> Iterator[None]:
        self._meter.begin_lap()
        empty, others = _empty_addresses(), _other_addresses()
        with _let_go():
            with new_peak_of_addresses():
                size = status("VmPeak")
                yield
            grown = status("VmPeak") - size - max(0, _other_addresses() - others)
        growth = self._meter.lap_growth()
        self._growth[shape] = max(growth, self._growth.get(shape, 0))
        at_peak = empty + grown - growth
        for limit in _DATA.holders:
            limit.allow(at_peak)
        used = self._meter.lap_bytes()
        if used > self._budget:
            self._meter.drop_lap()
            raise OverBudget(used, self._budget)
        self._measured_passes[shape] += 1

    def lifted(self) -> AbstractContextManager[None]:
        """See `Limit`."""
        return uncounted()

    def waived(self) -> AbstractContextManager[None]:
        """See `Limit`."""
        return _let_go()

    def beside(self) -> AbstractContextManager[None]:
        """See `Limit`. May stand inside anything, and inside itself: an iterator that is let go of ends
        its processes wherever the program is."""
        return _BESIDE.entered(_DATA.before)

    def allow(self, empty: int) -> None:
        """Do not count so many addresses, which were empty at the peak of a pass."""
        more = max(0, empty - self._empty)
        self._empty += more
        self._set(self._soft + more)

    def exempt(self, num_bytes: int) -> None:
        """Count so many bytes no more."""
        self._set(self._soft + num_bytes)

    def grow_beside(self, taken: int) -> None:
        """What it takes to speak to other processes has become so much more, or less."""
        # Threads and their stacks come and go: room that was given once is there for the next.
        self._beside = max(0, self._beside + taken)
        more = max(0, self._beside - self._most_beside)
        self._most_beside += more
        self._set(self._soft + more)

    def rest(self) -> None:
        """What is taken from now on is the script's."""
        self._meter.rest()
        self._script.rest(filled_addresses())

    def resume(self) -> None:
        """It is so no more."""
        self._meter.resume()
        self._script.resume(filled_addresses())
        self._set(self._soft)

    def _set(self, soft: int) -> None:
        self._soft = soft
        _DATA.hold(self, soft + self._script.num_bytes + _SLACK_BYTES)


@contextmanager
def at_work() -> Iterator[None]:
    """Around what is done under the budgets that this process is held to, from the first on. May stand
    inside itself. Between two such blocks nobody is held to any."""
    with _REST.interrupted():
        yield


def uncounted() -> AbstractContextManager[None]:
    """What is taken inside, and stays, counts for no limit that this process is held to by `Limit`s."""
    return _LIFTED.entered(None if _DATA.before is None else _most())


def _empty_addresses() -> int:
    """Addresses that count as data, of pages that nobody has written to."""
    return status("VmData") - status("RssAnon")


def _other_addresses() -> int:
    """Addresses that no limit on data counts, as those of program files."""
    return status("VmSize") - status("VmData")


def _follow_holders() -> None:
    """Have glibc do with freed memory what the plans of all limits allow."""
    if any(limit.returns for limit in _DATA.holders):
        return_freed_memory()
    else:
        keep_freed_memory()


def _let_go() -> AbstractContextManager[None]:
    return nullcontext() if _DATA.before is None else _DATA.instead(_most())


def _most() -> int:
    """What the machine has: going on there would wake the killer of processes."""
    return status("VmData") + int(host_memory(limits=False).free_bytes * 0.9)


def _exempt(num_bytes: int) -> None:
    for limit in _DATA.holders:
        limit.exempt(num_bytes)


def _grow_beside(taken: int) -> None:
    for limit in _DATA.holders:
        limit.grow_beside(taken)


def _read() -> int:
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def _write(soft: float) -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (int(soft if hard < 0 else min(soft, hard)), hard))


class _Region:
    """Where something else is in place of the limits. Regions may lie within each other, and in several
    threads.

    Args:
        grow: told of the bytes that were taken from the first one's begin to the last one's end, and
            stay.
    """

    def __init__(self, grow: Callable[[int], None]) -> None:
        self._grow = grow
        self._depth = self._start = 0
        self._lock = threading.Lock()

    @contextmanager
    def entered(self, value: float | None) -> Iterator[None]:
        """Around a region, where `value` is in place of the limits; None: there is none."""
        if value is None:
            yield
            return
        with self._lock:
            if self._depth == 0:
                self._start = status("VmData")
            self._depth += 1
        with _DATA.instead(value):
            try:
                yield
            finally:
                with self._lock:
                    self._depth -= 1
                    if self._depth == 0:
                        self._grow(status("VmData") - self._start)


class _Rest:
    """The times in which nobody is at work; see `at_work`."""

    def __init__(self) -> None:
        self._num_at_work = 0
        self._is_now = False
        self._limits = ExitStack()  # those that it had before, while this is now
        self._lock = threading.RLock()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Around work."""
        with self._lock:
            self.end()
            self._num_at_work += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_at_work -= 1
                if not self._num_at_work:
                    self._begin()

    def end(self) -> None:
        """Somebody is at work, or nobody holds a budget any more."""
        with self._lock:
            if self._is_now:
                self._is_now = False
                for limit in _DATA.holders:
                    limit.resume()
                self._limits.close()

    def _begin(self) -> None:
        before = _DATA.before
        if before is not None and _DATA.holders:
            for limit in _DATA.holders:
                limit.rest()
            self._limits.enter_context(_DATA.instead(before))
            self._is_now = True


_DATA: SharedLimit[ProcessLimit] = SharedLimit(_read, _write)
_REST = _Rest()
_LIFTED = _Region(lambda taken: _exempt(max(0, taken)))
_BESIDE = _Region(_grow_beside)


def make_limit(plan: Plan, device: torch.device, counted: Iterable[object] = ()) -> Limit:
    """What holds the budget of `plan` on `device`.

    Args:
        plan: its budget, and whether it is to be enforced.
        device: of this rank.
        counted: modules and optimizers that were built before: what they hold is in the process
            already, and in the budget. Anything else in it is passed over.
    """
    tunes = plan.kernels.autotune and device.type == "cuda"
    if not plan.enforced or plan.budget_bytes is None:
        return Unlimited(device, tunes)
    if device.type == "cuda":
        return CudaLimit(device, plan.budget_bytes, tunes)
    return ProcessLimit(plan.budget_bytes, held_bytes(counted), plan.reserve_bytes)


def held_bytes(owners: Iterable[object]) -> int:
    """Bytes of the modules and optimizers among `owners`."""
    tensors = [tensor for owner in owners for tensor in _tensors_of(owner)]
    there = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(there.values())


def _tensors_of(owner: object) -> list[Tensor]:
    if isinstance(owner, nn.Module):
        return [*owner.parameters(), *owner.buffers()]
    if isinstance(owner, Optimizer):
        values = [value for state in owner.state.values() for value in state.values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        return [part for tensor in tensors for part in parts_of(tensor).values()]
    return []


def shapes_of(batch: Any) -> tuple[Any, ...]:
    """The shapes and dtypes of the tensors in `batch`: what kernels are generated for."""
    shapes: list[Any] = []

    def look(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            shapes.append((tuple(leaf.shape), leaf.dtype))
        return leaf

    map_leaves(batch, look)
    return tuple(shapes)


def warm_up() -> None:
    """Make the first uses that stay with the process: the thread pool, and what the first convolution,
    norm, attention, backward and optimizer load (together tens of MiB), so that they are not taken for
    training's."""
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


@functools.cache
def _warm_up_once() -> None:
    """As `warm_up`, where nothing depends on the last MiB: a session without a budget has to open at
    once."""
    warm_up()
