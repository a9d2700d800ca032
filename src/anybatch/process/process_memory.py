"""Memory of this process, as counted by the kernel and managed by the C library.

Linux reports mapped and resident memory, and can reset the peak on request; glibc can be configured
to return memory. On other systems, the functions here report that this is not available, or do
nothing.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_MMAP_MAX = 1 << 16  # glibc's default
_MOST_MMAP_THRESHOLD = 32 << 20  # on 64 bits
_RETURN_FROM = 128 << 10  # glibc's thresholds at the start of a process
_NEAR = 1 << 20  # the kernel keeps some pages of each thread out of its quick counters


def has_glibc() -> bool:
    """Whether the C library is glibc, whose heap can be configured."""
    return sys.platform == "linux" and hasattr(_glibc(), "mallopt")


@functools.cache
def _glibc() -> Any:
    library: Any = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    return library


def return_freed_memory() -> None:
    """Make glibc return freed memory to the kernel: each block of 128 KiB or more is a separate
    mapping, which is unmapped when the block is freed. Has no effect with other C libraries."""
    _set_thresholds(_RETURN_FROM, _RETURN_FROM)
    _HOLES.fill()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for reuse, as it does in a process that has used large blocks.
    Once its thresholds have been set, they no longer adapt, so they are set to the values up to
    which they would have grown (`DEFAULT_MMAP_THRESHOLD_MAX`, and twice that). Has no effect with
    other C libraries."""
    _HOLES.empty()
    _set_thresholds(_MOST_MMAP_THRESHOLD, 2 * _MOST_MMAP_THRESHOLD)


def _set_thresholds(mmap_from: int, trim_from: int) -> None:
    if has_glibc():
        _glibc().mallopt(_M_MMAP_THRESHOLD, mmap_from)
        _glibc().mallopt(_M_TRIM_THRESHOLD, trim_from)


def use_one_heap() -> None:
    """Make all threads that start from now on share one heap (glibc), so that memory that one
    thread has freed is available to all of them. Has to be called before libraries start their
    threads."""
    if has_glibc():
        _glibc().mallopt(_M_ARENA_MAX, 1)


class _Holes:
    """Holes of 128 KiB and more that glibc's heap has acquired while freed memory was kept. glibc
    prefers them to new mappings, and their pages are not returned to the kernel. So they are filled
    with blocks that are never written to, which take addresses but no memory."""

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._lock = threading.Lock()
        self.num_bytes: int = 0

    def fill(self) -> None:
        """Fill the existing holes."""
        if free_in_heap() is None:
            return
        trim()
        library = _glibc()
        with self._lock:
            library.mallopt(_M_MMAP_MAX, 0)
            try:
                size = _MOST_MMAP_THRESHOLD
                while size >= _RETURN_FROM:
                    before = _books().arena
                    address = library.malloc(ctypes.c_size_t(size))
                    if address is not None and _books().arena == before:
                        self._blocks.append(address)
                        self.num_bytes += size
                        continue
                    _free(address)  # from the end of the heap, which grew: no hole is this long
                    size //= 2
            finally:
                library.mallopt(_M_MMAP_MAX, _MMAP_MAX)

    def empty(self) -> None:
        """Return the filled holes to the heap."""
        with self._lock:
            for address in self._blocks:
                _free(address)
            self._blocks.clear()
            self.num_bytes = 0


_HOLES = _Holes()


def _free(address: int | None) -> None:
    _glibc().free(ctypes.c_void_p(address))


def free_in_heap() -> int | None:
    """Bytes that the heap holds and that are not in use; None if unknown (glibc before 2.33, other
    C libraries)."""
    books = _books()
    return None if books is None else int(books.fordblks) + _HOLES.num_bytes


def _books() -> Any:
    """Statistics of glibc's heap; None if they are not available."""
    ask: Any = getattr(_glibc(), "mallinfo2", None) if has_glibc() else None
    if ask is None:
        return None
    ask.restype = _MallInfo
    return ask()


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of <malloc.h>."""

    _fields_: ClassVar[Any] = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@dataclass(frozen=True, slots=True)
class InUse:
    """Memory of this process at one moment, in bytes.

    Attributes:
        allocated: handed out by malloc, and shared memory.
        others: addresses of other mappings for data: the objects of Python, but also stacks of
            threads and code that libraries generate, of which little is ever touched.
        free: held by malloc and not handed out; part of it is resident.
        resident: data in memory.
    """

    allocated: int
    others: int = 0
    free: int = 0
    resident: int = 0

    def since(self, before: InUse) -> int:
        """Bytes that came into use since `before`. Of other mappings, only what must be resident
        counts, even if all free memory of the heap has become resident."""
        allocated, others = self.allocated - before.allocated, self.others - before.others
        touched = self.resident - before.resident - allocated - self.free
        return allocated + min(others, max(0, touched))


def in_use() -> InUse:
    """Memory of this process now (Linux)."""
    data, shared, resident = statuses("VmData", "RssShmem", "RssAnon")
    heap = free = 0
    if (books := _books()) is not None:
        heap, free = int(books.arena + books.hblkhd), int(books.fordblks) + _HOLES.num_bytes
    return InUse(heap - free + shared, data - heap, free, resident)


def trim() -> None:
    """Return the pages that the heap keeps free to the kernel (glibc)."""
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def status(field: str) -> int:
    """A field of this process's status, in bytes (Linux)."""
    return statuses(field)[0]


def statuses(*fields: str) -> list[int]:
    """Fields of this process's status at one moment, in bytes (Linux)."""
    with open("/proc/self/status", "rb", buffering=0) as file:
        text = file.read().decode("ascii", "replace")
    return [int(text.partition(f"\n{field}:")[2].split(None, 1)[0]) << 10 for field in fields]


_peak_known: tuple[int, int, int] | None = None
"""The kernel's peak by `getrusage`, and what `peak_and_files` returned for it."""


def peak_and_files() -> tuple[int, int]:
    """The peak of resident memory, and the resident pages of program files when the peak was last
    found to have changed, in bytes (Linux)."""
    global _peak_known
    import resource

    # Reading the status takes 50 us, and the peak seldom changes. This counter does not go below the
    # peak of a process that started this one, so it is used only where it agrees with the status.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    if _peak_known is None or _peak_known[0] != most:
        peak, files = statuses("VmHWM", "RssFile")
        known = most, peak, files
        _peak_known = known if abs(peak - most) < _NEAR else None
        return peak, files
    return _peak_known[1:]


def reset_peak() -> bool:
    """Reset the peak of resident memory. Returns False if the kernel does not support it."""
    global _peak_known
    _peak_known = None
    if sys.platform != "linux":
        return False
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True
