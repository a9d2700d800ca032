"""Memory of this process, as its kernel counts it and its C library manages it.

Linux counts what a process has mapped and what is resident, and can begin a new peak on request; glibc
can be told when to give memory back. Elsewhere these say so, or do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from typing import Any, ClassVar

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_MMAP_MAX = 1 << 16  # glibc's own
_MOST_MMAP_THRESHOLD = 32 << 20  # on 64 bits
_RETURN_FROM = 128 << 10  # glibc's thresholds at the start of a process


def has_glibc() -> bool:
    """Whether the C library is glibc, whose heap can be told what to do."""
    return sys.platform == "linux" and hasattr(_glibc(), "mallopt")


@functools.cache
def _glibc() -> Any:
    library: Any = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    return library


def return_freed_memory() -> None:
    """Make glibc return freed memory to the kernel: each block from 128 KiB on is a mapping of its own,
    which ends when it is freed. Elsewhere nothing."""
    _set_thresholds(_RETURN_FROM, _RETURN_FROM)
    _HOLES.fill()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for reuse, as it does in a process that has used large blocks. Its
    thresholds no longer move by themselves once they were set, so they get the values up to which they
    would have moved (`DEFAULT_MMAP_THRESHOLD_MAX`, and twice that). Elsewhere nothing."""
    _HOLES.empty()
    _set_thresholds(_MOST_MMAP_THRESHOLD, 2 * _MOST_MMAP_THRESHOLD)


def _set_thresholds(mmap_from: int, trim_from: int) -> None:
    if has_glibc():
        _glibc().mallopt(_M_MMAP_THRESHOLD, mmap_from)
        _glibc().mallopt(_M_TRIM_THRESHOLD, trim_from)


def use_one_heap() -> None:
    """Let all threads that start from now on have one heap in common (glibc), so that what one has
    freed is there for any of them. To be called before libraries start theirs."""
    if has_glibc():
        _glibc().mallopt(_M_ARENA_MAX, 1)


class _Holes:
    """Holes of 128 KiB and more that glibc's heap has got while freed memory was kept. It prefers them
    to new mappings, and pages in them do not go back to the kernel. So they are filled with blocks that
    nobody writes to, which take addresses and no memory."""

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._lock = threading.Lock()
        self.num_bytes: int = 0

    def fill(self) -> None:
        """Fill those that there are."""
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
                    _free(address)  # from the end of the heap, which grew: no hole is so long
                    size //= 2
            finally:
                library.mallopt(_M_MMAP_MAX, _MMAP_MAX)

    def empty(self) -> None:
        """Leave them to the heap again."""
        with self._lock:
            for address in self._blocks:
                _free(address)
            self._blocks.clear()
            self.num_bytes = 0


_HOLES = _Holes()


def _free(address: int | None) -> None:
    _glibc().free(ctypes.c_void_p(address))


def free_in_heap() -> int | None:
    """Bytes that the heap holds and nobody uses; None where it does not tell (glibc before 2.33, other
    C libraries)."""
    books = _books()
    return None if books is None else int(books.fordblks) + _HOLES.num_bytes


def _books() -> Any:
    """What glibc says of its heap; None where it does not."""
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


def filled_addresses() -> int:
    """Addresses of data and of shared memory, without those that the heap has free (Linux). `trim` does
    not change it."""
    return status("VmData") - (free_in_heap() or 0) + status("RssShmem")


def trim() -> None:
    """Give back the pages that the heap keeps free (glibc)."""
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def status(field: str) -> int:
    """A field of this process's status, in bytes (Linux)."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    raise KeyError(field)


def reset_peak() -> bool:
    """Begin a new peak of resident memory. False where the kernel cannot."""
    if sys.platform != "linux":
        return False
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True
