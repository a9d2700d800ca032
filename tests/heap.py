"""Fills what glibc's heap holds free, so that what is asked for next comes from the kernel."""

from __future__ import annotations

import ctypes
from typing import Any

MIB = 1 << 20
_M_MMAP_MAX, _MMAP_MAX = -4, 1 << 16  # glibc's own


def fill_heap(largest: int, least: int) -> list[int]:
    """Take blocks of the heap, of `largest` bytes and then of half as many, until even `least` are
    refused. Returns their addresses, for `free_all`."""
    library = _glibc()
    held: list[int] = []
    library.mallopt(_M_MMAP_MAX, 0)  # no block becomes a mapping of its own
    try:
        size = largest
        while size >= least:
            address = library.malloc(ctypes.c_size_t(size))
            if address is None:
                size //= 2
            else:
                held.append(address)
    finally:
        library.mallopt(_M_MMAP_MAX, _MMAP_MAX)
    return held


def free_all(held: list[int]) -> None:
    """Free the blocks, and forget them."""
    while held:
        _glibc().free(ctypes.c_void_p(held.pop()))


def _glibc() -> Any:
    library: Any = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    return library
