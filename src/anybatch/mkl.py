"""MKL, which multiplies matrices in float32 on x86 CPUs, and keeps the memory it took for it.

A thread packs its matrices into buffers and keeps these for the next product. How much it packs at a
time depends on the CPU, and is nowhere told, so it is found by a product. The symbols are those of a
torch that MKL is linked into, or lies beside.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

_DEPTHS = (192, 384)
"""Rows of the right matrix that are packed at a time, on CPUs seen so far: with 1 MiB and with 2 MiB of
second-level cache."""

_ROWS, _COLUMNS = 1536, 256
"""Of the product by which it is found: some milliseconds."""


def free_product_buffers() -> None:
    """Have MKL give back what it packed the matrices of earlier products into (builds with MKL)."""
    free = _function("mkl_serv_free_buffers", "MKL_Free_Buffers")
    if free is not None:
        free()


def product_buffer_bytes() -> int | None:
    """Bytes that MKL holds, by its own books; None where there is no MKL, or its books are closed."""
    books = _function("mkl_serv_mem_stat", "MKL_Mem_Stat")
    if books is None:
        return None
    books.restype = ctypes.c_longlong
    return books(ctypes.byref(ctypes.c_int()))


@functools.cache
def packed_depth() -> int:
    """How many rows of the right matrix of a product MKL packs at a time on this CPU, of products that
    have more; the lowest number seen where there is no MKL, or its books are closed."""
    left, right = torch.ones(_ROWS, _DEPTHS[-1]), torch.ones(_DEPTHS[-1], _COLUMNS)
    free_product_buffers()
    before = product_buffer_bytes()
    if before is None:
        return _DEPTHS[0]
    torch.mm(left, right)
    taken = (product_buffer_bytes() or before) - before
    free_product_buffers()
    per_row = 4 * torch.get_num_threads() * (_COLUMNS + 2 * _DEPTHS[-1])  # as the lower depth asks
    return _DEPTHS[taken > 1.5 * _DEPTHS[0] * per_row]


def _function(*names: str) -> Any:
    """The first of `names` that the libraries of torch have; None: none of them."""
    if not torch.backends.mkl.is_available():
        return None
    return next((f for name in names if (f := getattr(_library(), name, None)) is not None), None)


@functools.cache
def _library() -> Any:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return ctypes.CDLL(str(path) if path.exists() else None)
