"""PyTorch's CUDA caching allocator: the memory that it takes for the blocks of a trace.

It rounds block sizes, and keeps holes between blocks that it cannot release. Replaying the
allocations and frees of a trace through a model of it accounts for both. On a CPU the live bytes
are summed.

`PYTORCH_ALLOC_CONF`, formerly `PYTORCH_CUDA_ALLOC_CONF`, sets options of the allocator (PyTorch
documentation, "Optimizing memory usage"). `expandable_segments` is modeled; plans report the others.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from anybatch.estimate.trace import COPIED, Block, Timeline

_SCRATCH = -1  # key of scratch memory, among the keys of blocks

CUDA_BLOCK = 512
CUDA_SMALL = 1 << 20
CUDA_SMALL_SEGMENT = 2 << 20
CUDA_LARGE = 10 << 20
CUDA_MIDDLE_SEGMENT = 20 << 20


@dataclass(frozen=True, slots=True)
class Taken:
    """Memory taken while a timeline is replayed.

    A caching allocator keeps unused memory, so the memory that it holds never shrinks, and its peak
    may occur when little is in use. What the memory is needed for shows at the moment when most is
    in use.

    Attributes:
        peak_bytes: maximum memory held at any time (torch: "reserved").
        allocated_bytes: maximum memory in blocks after rounding, scratch included (torch:
            "allocated", and on one stream "active").
        moment: first moment at which `allocated_bytes` is reached.
        requested_bytes: memory in blocks at that moment before rounding, scratch included.
        curve: memory held at each moment.
    """

    peak_bytes: int
    allocated_bytes: int
    moment: int
    requested_bytes: int
    curve: tuple[int, ...]

    @property
    def overhead_bytes(self) -> int:
        """Difference between the peak and the requested bytes: rounding, holes, and cached memory."""
        return self.peak_bytes - self.requested_bytes


def replay(timeline: Timeline, cache: CudaCache | None) -> Taken:
    """Return the memory taken when `timeline` is replayed: that reserved by `cache`, which is new,
    or the live bytes without one."""
    requested = allocated = held = 0
    curve: list[int] = []
    most = moment_of_most = requested_then = -1
    births, deaths = _by_moment(timeline)
    released, end = timeline.released, timeline.num_moments + 2
    # The step comes twice, since the holes that it leaves in the cache were not there when it began.
    for first in (0,) if released is None else (0, released + 1):
        again = first > 0
        for moment in range(first, end):
            for block in births.get(moment, ()):
                size = block.num_bytes
                if size and not (again and block.died is None):
                    requested += size
                    if cache is not None:
                        size = cache.take(id(block), size, block.phase == COPIED)
                    allocated += size
            scratch = taken = timeline.scratch.get(moment, 0)
            if scratch and cache is not None:
                taken = cache.take(_SCRATCH, scratch)
            held = allocated + taken if cache is None else cache.reserved_bytes
            if not again:
                curve.append(held)
                if allocated + taken > most:
                    most, moment_of_most = allocated + taken, moment
                    requested_then = requested + scratch
            if scratch and cache is not None:
                cache.give(_SCRATCH)
            for block in deaths.get(moment, ()):
                if block.num_bytes and not (again and block.born < first):
                    requested -= block.num_bytes
                    allocated -= block.num_bytes if cache is None else cache.give(id(block))
            if moment == released and cache is not None:
                cache.release()
    return Taken(max(*curve, held), most, moment_of_most, requested_then, tuple(curve))


def _by_moment(timeline: Timeline) -> tuple[dict[int, list[Block]], dict[int, list[Block]]]:
    """Return the blocks allocated at each moment, and those freed at each moment."""
    births: dict[int, list[Block]] = {}
    deaths: dict[int, list[Block]] = {}
    for block in timeline.blocks:
        births.setdefault(block.born, []).append(block)
        if block.died is not None:
            deaths.setdefault(block.died, []).append(block)
    return births, deaths


@dataclass(slots=True, eq=False)
class _Pool:
    """Free chunks of one size class, small or large blocks. Each stream has its own pools: batches
    are copied on a separate stream.

    Attributes:
        small: whether the pool serves small blocks.
        begin: start address of its expandable segment.
        free: size and start of each free chunk, sorted by size, then by start.
        last: last chunk of the expandable segment.
    """

    small: bool
    begin: int
    free: list[tuple[int, int]] = field(default_factory=list)
    last: _Chunk | None = None


@dataclass(slots=True, eq=False)
class _Chunk:
    """A part of a segment, allocated or free."""

    start: int
    size: int
    pool: _Pool
    free: bool = False
    before: _Chunk | None = None
    after: _Chunk | None = None


class CudaCache:
    """PyTorch's CUDA caching allocator, with one compute stream and one stream that copies batches
    (PyTorch documentation, "CUDA semantics: memory management";
    `c10/cuda/CUDACachingAllocator.cpp`).

    Block sizes are rounded up to 512 bytes. Blocks of up to 1 MiB come from small segments of
    2 MiB, larger blocks below 10 MiB from segments of 20 MiB, and each block of 10 MiB or more from
    its own segment, in multiples of 2 MiB.

    The smallest free block that fits is used. Its remainder is split off if it is large enough: at
    least 512 bytes for small blocks, more than 1 MiB for large blocks. Adjacent free blocks are
    merged. Segments stay with the allocator until the limit is reached; then segments that are
    completely free are released.

    Args:
        expandable: `expandable_segments`: one segment per pool grows in place, in steps of 2 or
            20 MiB, and any remainder is split off.
        limit_bytes: maximum reserved memory, or None for no limit. Memory required beyond the limit
            is still counted.
    """

    def __init__(self, expandable: bool = False, limit_bytes: int | None = None) -> None:
        self.reserved_bytes: int = 0
        self._expandable = expandable
        self._limit = limit_bytes
        self._taken: dict[int, _Chunk] = {}
        # For each stream, the pool of large blocks and the pool of small blocks.
        self._pools = tuple(
            (_Pool(False, (2 * i + 1) << 60), _Pool(True, (2 * i + 2) << 60)) for i in range(2)
        )
        self._at: dict[int, _Chunk] = {}  # start -> free chunk
        self._line = 0

    def take(self, key: int, num_bytes: int, copied: bool = False) -> int:
        """Allocate a block and return its size. `copied`: use the stream that copies to the device."""
        size = _round_up(num_bytes, CUDA_BLOCK)
        pool = self._pools[copied][size <= CUDA_SMALL]
        i = bisect_left(pool.free, (size, 0))
        if i < len(pool.free):
            chunk = self._at.pop(pool.free.pop(i)[1])
        else:
            chunk = self._grown(size, pool) if self._expandable else self._segment(size, pool)
        least = CUDA_BLOCK if pool.small or self._expandable else CUDA_SMALL + 1
        if chunk.size - size >= least:
            rest = _Chunk(chunk.start + size, chunk.size - size, pool, True, chunk, chunk.after)
            if rest.after is not None:
                rest.after.before = rest
            chunk.size, chunk.after = size, rest
            if pool.last is chunk:
                pool.last = rest
            self._put(rest)
        chunk.free = False
        self._taken[key] = chunk
        return chunk.size

    def give(self, key: int) -> int:
        """Free a block and return its size."""
        chunk = self._taken.pop(key)
        size = chunk.size
        for other in (chunk.before, chunk.after):
            if other is not None and other.free:
                self._drop(other)
                chunk = self._joined(chunk, other)
        chunk.free = True
        self._put(chunk)
        return size

    def _segment(self, size: int, pool: _Pool) -> _Chunk:
        if pool.small:
            whole = CUDA_SMALL_SEGMENT
        elif size < CUDA_LARGE:
            whole = CUDA_MIDDLE_SEGMENT
        else:
            whole = _round_up(size, CUDA_SMALL_SEGMENT)
        self._reserve(whole)
        chunk = _Chunk(self._line, whole, pool)
        self._line += whole + CUDA_BLOCK  # the gap keeps chunks of different segments apart
        return chunk

    def _grown(self, size: int, pool: _Pool) -> _Chunk:
        """Return the end of the pool's expandable segment, grown until it holds `size`."""
        last = pool.last
        step = CUDA_SMALL_SEGMENT if pool.small else CUDA_MIDDLE_SEGMENT
        if last is not None and last.free:
            self._drop(last)  # first, so that it is not released at the limit
            more = _round_up(size - last.size, step)
            self._reserve(more)
            last.size += more
            return last
        more = _round_up(size, step)
        self._reserve(more)
        start = last.start + last.size if last is not None else pool.begin
        chunk = _Chunk(start, more, pool, before=last)
        if last is not None:
            last.after = chunk
        pool.last = chunk
        return chunk

    def _reserve(self, size: int) -> None:
        if self._limit is not None and self.reserved_bytes + size > self._limit:
            self.release()
        self.reserved_bytes += size

    def release(self) -> None:
        """Release segments that are completely free (of expandable segments, the free ends)."""
        for chunk in list(self._at.values()):
            if chunk.after is None and (chunk.before is None or self._expandable):
                self._drop(chunk)
                self.reserved_bytes -= chunk.size
                if chunk.before is not None:
                    chunk.before.after = None
                if chunk.pool.last is chunk:
                    chunk.pool.last = chunk.before

    def _joined(self, one: _Chunk, other: _Chunk) -> _Chunk:
        first, second = (one, other) if one.start < other.start else (other, one)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if first.pool.last is second:
            first.pool.last = first
        return first

    def _put(self, chunk: _Chunk) -> None:
        insort(chunk.pool.free, (chunk.size, chunk.start))
        self._at[chunk.start] = chunk

    def _drop(self, chunk: _Chunk) -> None:
        chunks = chunk.pool.free
        del chunks[bisect_left(chunks, (chunk.size, chunk.start))]
        del self._at[chunk.start]


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_OPTION = re.compile(r"([a-z_0-9]+)\s*:\s*(\[[^\]]*\]|[^,]*)")


def _settings() -> tuple[str, dict[str, str]]:
    """Return the variable that sets options of the allocator here, and the options."""
    name = next((name for name in _NAMES if os.environ.get(name)), "")
    return name, dict(_OPTION.findall(os.environ.get(name, "").replace(" ", "")))


def is_expandable() -> bool:
    """Return whether segments are expandable in this environment."""
    return _settings()[1].get("expandable_segments") == "True"


def allocator_notices() -> Iterator[str]:
    """Yield the notices about allocator settings in plans for CUDA."""
    name, options = _settings()
    if options.pop("expandable_segments", "") == "True":
        yield (
            f"Bytes are those of an allocator under expandable_segments, which {name} sets here. Set it"
            " the same where you train."
        )
    ignored = [f"{key}:{value}" for key, value in options.items()]
    if ignored and ignored != ["backend:native"]:
        yield (
            f"{name} sets {', '.join(ignored)}, which the prediction of bytes does not follow: more may"
            " be reserved than predicted."
        )
