"""Memory of this process, as counted by the kernel and managed by the C library.

Linux reports mapped and resident memory, and can reset the peak on request; glibc can be configured
to return memory. On other systems, the functions here report that this is not available, or do
nothing.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, ClassVar

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MOST_MMAP_THRESHOLD = 32 << 20  # on 64 bits
_RETURN_FROM = 128 << 10  # glibc's thresholds at the start of a process


def has_glibc() -> bool:
    """Whether the C library is glibc, whose heap can be configured."""
    return sys.platform == "linux" and hasattr(_glibc(), "mallopt")


@functools.cache
def _glibc() -> Any:
    return ctypes.CDLL(None)


def return_freed_memory() -> None:
    """Make glibc return freed memory to the kernel: each block of 128 KiB or more is a separate
    mapping, which is unmapped when the block is freed. Has no effect with other C libraries."""
    _set_thresholds(_RETURN_FROM, _RETURN_FROM)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for reuse, as it does in a process that has used large blocks.
    Once its thresholds have been set, they no longer adapt, so they are set to the values up to
    which they would have grown (`DEFAULT_MMAP_THRESHOLD_MAX`, and twice that). Has no effect with
    other C libraries."""
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


def free_in_heap() -> int | None:
    """Bytes that the heap holds and that are not in use; None if unknown (glibc before 2.33, other
    C libraries)."""
    books = _books()
    return None if books is None else int(books.fordblks)


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


def filled_addresses() -> int:
    """Bytes of addresses of data and of shared memory, without free memory of the heap (Linux).
    `trim` does not change it."""
    return sum(statuses("VmData", "RssShmem")) - (free_in_heap() or 0)


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


def reset_peak() -> bool:
    """Reset the peak of resident memory. Returns False if the kernel does not support it."""
    if sys.platform != "linux":
        return False
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True
