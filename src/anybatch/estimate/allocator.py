"""Allocators: from the blocks that a trace saw to the bytes that a device takes.

torch's CUDA allocator rounds, and keeps holes between blocks that it cannot give back. Replaying the
trace's births and deaths through a model of it finds both. On a CPU the live bytes are summed.

`PYTORCH_ALLOC_CONF`, or `PYTORCH_CUDA_ALLOC_CONF` as it was called first, lists options of the
allocator (torch's documentation, "Optimizing memory usage"). Those that move the peak most are
followed; of others the plan tells.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from anybatch.estimate.trace import COPIED, Block, Timeline

_SCRATCH = -1  # stands for it among the keys of blocks

CUDA_BLOCK = 512
CUDA_SMALL = 1 << 20
CUDA_SMALL_SEGMENT = 2 << 20
CUDA_LARGE = 10 << 20
CUDA_MIDDLE_SEGMENT = 20 << 20


@dataclass(frozen=True, slots=True)
class Taken:
    """What an allocator took.

    What it holds never falls while it keeps what nobody uses, so its peak may come when little is in
    use. What memory is needed for shows where most of it is in use.

    Attributes:
        peak_bytes: the most that it held at any time (torch: "reserved").
        allocated_bytes: the most in blocks, as they are rounded, and in scratch (torch: "allocated",
            and on one stream "active").
        moment: when that was, the first time.
        requested_bytes: in blocks at that moment, as they were asked for, and in scratch.
        curve: what was held at each moment.
    """

    peak_bytes: int
    allocated_bytes: int
    moment: int
    requested_bytes: int
    curve: tuple[int, ...]

    @property
    def overhead_bytes(self) -> int:
        """What the peak has beyond what was asked for: rounding, holes, and what is kept for later."""
        return self.peak_bytes - self.requested_bytes


class _Books:
    """What becomes of `Taken` while a timeline plays."""

    def __init__(self) -> None:
        self._curve: list[int] = []
        self._most = (-1, 0, 0)  # allocated, moment, requested
        self._held = 0

    def note(self, moment: int, allocated: int, requested: int, held: int) -> None:
        """The figures of a moment, scratch included."""
        self._curve.append(held)
        if allocated > self._most[0]:
            self._most = allocated, moment, requested

    def hold(self, held: int) -> None:
        """What is held in the end, in steps that are like the last one."""
        self._held = max(self._held, held)

    def taken(self) -> Taken:
        allocated, moment, requested = self._most
        curve = tuple(self._curve)
        return Taken(max(*curve, self._held), allocated, moment, requested, curve)


class Allocator(ABC):
    """A model of one allocator. `replay` may be called any number of times."""

    @abstractmethod
    def replay(self, timeline: Timeline) -> Taken:
        """What the allocator takes while the timeline plays."""


class LiveBytes(Allocator):
    """An allocator that takes what is asked for, and gives back at once what is freed: the plain sum of
    the live bytes. Stands for the host's."""

    def replay(self, timeline: Timeline) -> Taken:
        """See `Allocator`."""
        requested = 0
        books = _Books()
        for moment, births, deaths in _moments(timeline):
            requested += sum(block.num_bytes for block in births)
            now = requested + timeline.scratch.get(moment, 0)
            books.note(moment, now, now, now)
            requested -= sum(block.num_bytes for block in deaths)
        return books.taken()


class CudaCache(Allocator):
    """torch's CUDA caching allocator, with one stream that computes and one that copies batches
    (torch's documentation, "CUDA semantics: memory management"; `c10/cuda/CUDACachingAllocator.cpp`).

    A block is rounded to 512 bytes. Those of up to 1 MiB come from small segments, of 2 MiB; those
    below 10 MiB from segments of 20 MiB; each larger one from a segment of its own, in multiples of
    2 MiB.
    The smallest free block that fits is taken, and what is left of it is split off if it is worth
    keeping: 512 bytes among small ones, more than 1 MiB among large ones. Neighbours that are free are
    joined. A segment stays with the allocator, until the limit is met: then those that are wholly free
    are given back.

    Args:
        expandable: `expandable_segments`: one segment per pool grows in place, by steps of 2 and
            20 MiB, and any rest is split off.
        max_split_bytes: `max_split_size_mb`: larger blocks are never split, and only taken for
            requests that need nearly all of them.
        limit_bytes: most that may be reserved; None: no limit. What cannot do without more is counted
            all the same.
    """

    def __init__(
        self,
        expandable: bool = False,
        max_split_bytes: int | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self._expandable = expandable
        self._max_split = max_split_bytes
        self._limit = limit_bytes

    def replay(self, timeline: Timeline) -> Taken:
        """See `Allocator`. What is taken is what is reserved."""
        cache = _Cache(self._expandable, self._max_split, self._limit)
        requested = allocated = 0
        books = _Books()
        for again, moment, births, deaths in _repeated(timeline):
            for block in births:
                if block.num_bytes:
                    requested += block.num_bytes
                    allocated += cache.take(id(block), block.num_bytes, block.phase == COPIED)
            scratch = timeline.scratch.get(moment, 0)
            taken = cache.take(_SCRATCH, scratch) if scratch else 0
            if not again:
                books.note(moment, allocated + taken, requested + scratch, cache.reserved_bytes)
            if scratch:
                cache.give(_SCRATCH)
            for block in deaths:
                if block.num_bytes:
                    requested -= block.num_bytes
                    allocated -= cache.give(id(block))
            if moment == timeline.released:
                cache.release()
        books.hold(cache.reserved_bytes)
        return books.taken()


@dataclass(slots=True, eq=False)
class _Pool:
    """Where free chunks are looked for, of small blocks or of large ones. A stream has its own: batches
    are copied on another one than everything else runs on.

    Attributes:
        small: whether it has the small blocks.
        begin: where its expandable segment begins.
        free: size and start of the chunks that are free, in that order.
        last: chunk of the expandable segment.
    """

    small: bool
    begin: int
    free: list[tuple[int, int]] = field(default_factory=list)
    last: _Chunk | None = None


@dataclass(slots=True, eq=False)
class _Chunk:
    """A part of a segment, taken or free."""

    start: int
    size: int
    pool: _Pool
    free: bool = False
    before: _Chunk | None = None
    after: _Chunk | None = None


class _Cache:
    """Segments of a CUDA cache, on one line of addresses with gaps between them."""

    def __init__(self, expandable: bool, max_split: int | None, limit: int | None) -> None:
        self.reserved_bytes = 0
        self._expandable = expandable
        self._max_split = max_split
        self._limit = limit
        self._taken: dict[int, _Chunk] = {}
        # By stream, and in it for large blocks and for small ones.
        self._pools = tuple(
            (_Pool(False, (2 * i + 1) << 60), _Pool(True, (2 * i + 2) << 60)) for i in range(2)
        )
        self._at: dict[int, _Chunk] = {}  # start -> free chunk
        self._line = 0

    def take(self, key: int, num_bytes: int, copied: bool = False) -> int:
        """Take a block; returns its size. `copied`: of the stream that copies to the device."""
        size = _round_up(num_bytes, CUDA_BLOCK)
        pool = self._pools[copied][size <= CUDA_SMALL]
        chunk = self._fitting(size, pool)
        if chunk is None:
            chunk = self._grown(size, pool) if self._expandable else self._segment(size, pool)
        if self._is_worth_splitting(chunk.size - size, size, pool):
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
        """Give a block back; returns its size."""
        chunk = self._taken.pop(key)
        size = chunk.size
        for other in (chunk.before, chunk.after):
            if other is not None and other.free:
                self._drop(other)
                chunk = self._joined(chunk, other)
        chunk.free = True
        self._put(chunk)
        return size

    def _fitting(self, size: int, pool: _Pool) -> _Chunk | None:
        i = bisect_left(pool.free, (size, 0))
        if i == len(pool.free):
            return None
        found = self._at[pool.free[i][1]]
        if self._max_split is not None and not pool.small:
            if size < self._max_split <= found.size:
                return None
            if size >= self._max_split and found.size >= size + CUDA_MIDDLE_SEGMENT:
                return None
        self._drop(found)
        return found

    def _segment(self, size: int, pool: _Pool) -> _Chunk:
        if pool.small:
            whole = CUDA_SMALL_SEGMENT
        elif size < CUDA_LARGE:
            whole = CUDA_MIDDLE_SEGMENT
        else:
            whole = _round_up(size, CUDA_SMALL_SEGMENT)
        self._reserve(whole)
        chunk = _Chunk(self._line, whole, pool)
        self._line += whole + CUDA_BLOCK  # the gap: no chunk of one segment touches another's
        return chunk

    def _grown(self, size: int, pool: _Pool) -> _Chunk:
        """The end of the pool's one segment, grown until it holds `size`."""
        last = pool.last
        step = CUDA_SMALL_SEGMENT if pool.small else CUDA_MIDDLE_SEGMENT
        there = last.size if last is not None and last.free else 0
        more = _round_up(size - there, step)
        self._reserve(more)
        if last is not None and last.free:
            self._drop(last)
            last.size += more
            return last
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
        """Give back the segments that are wholly free (of expandable ones their free ends)."""
        for chunk in list(self._at.values()):
            if chunk.after is None and (chunk.before is None or self._expandable):
                self._drop(chunk)
                self.reserved_bytes -= chunk.size
                if chunk.before is not None:
                    chunk.before.after = None
                if chunk.pool.last is chunk:
                    chunk.pool.last = chunk.before

    def _is_worth_splitting(self, rest: int, size: int, pool: _Pool) -> bool:
        if pool.small or self._expandable:
            return rest >= CUDA_BLOCK
        return rest > CUDA_SMALL and (self._max_split is None or size < self._max_split)

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


def _moments(timeline: Timeline) -> Iterator[tuple[int, Sequence[Block], Sequence[Block]]]:
    """Every moment with the blocks born at it and, after those, the blocks that died at it."""
    births: dict[int, list[Block]] = {}
    deaths: dict[int, list[Block]] = {}
    for block in timeline.blocks:
        births.setdefault(block.born, []).append(block)
        if block.died is not None:
            deaths.setdefault(block.died, []).append(block)
    for moment in range(timeline.num_moments + 2):
        yield moment, births.get(moment, ()), deaths.get(moment, ())


def _repeated(
    timeline: Timeline,
) -> Iterator[tuple[bool, int, Sequence[Block], Sequence[Block]]]:
    """The moments, and once more those of the step after what was released: a cache in which a step has
    left its holes is not the one in which it began. Whether a moment comes again stands before each."""
    moments = list(_moments(timeline))
    yield from ((False, *one) for one in moments)
    if timeline.released is None:
        return
    for moment, births, deaths in moments[timeline.released + 1 :]:
        yield (
            True,
            moment,
            [block for block in births if block.died is not None],
            [block for block in deaths if block.born > timeline.released],
        )


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_OPTION = re.compile(r"([a-z_0-9]+)\s*:\s*(\[[^\]]*\]|[^,]*)")


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What `CudaCache` is told.

    Attributes:
        expandable: `expandable_segments`.
        max_split_bytes: `max_split_size_mb`; None: no limit.
        ignored: options that may change what is reserved, and are not followed.
    """

    expandable: bool = False
    max_split_bytes: int | None = None
    ignored: tuple[str, ...] = ()


def settings_here() -> AllocatorSettings:
    """As the environment has them. What torch would not understand is left to torch."""
    told = next((os.environ[name] for name in _NAMES if os.environ.get(name)), "")
    expandable, most, ignored = False, None, list[str]()
    for name, value in _OPTION.findall(told.replace(" ", "")):
        if name == "expandable_segments":
            expandable = value == "True"
        elif name == "max_split_size_mb" and value.isdecimal():
            most = int(value) << 20
        elif (name, value) != ("backend", "native"):
            ignored.append(f"{name}:{value}")
    return AllocatorSettings(expandable, most, tuple(ignored))


def allocator_notices() -> Iterator[str]:
    """What to say of settings in plans for CUDA: sentences."""
    here = settings_here()
    followed = ["expandable_segments"] if here.expandable else []
    followed += ["max_split_size_mb"] if here.max_split_bytes is not None else []
    name = next((name for name in _NAMES if os.environ.get(name)), "")
    if followed:
        yield (
            f"Bytes are those of an allocator under {' and '.join(followed)}, which {name} sets here."
            " Set it the same where you train."
        )
    if here.ignored:
        yield (
            f"{name} sets {', '.join(here.ignored)}, which the prediction of bytes does not follow:"
            " more may be reserved than is told."
        )
