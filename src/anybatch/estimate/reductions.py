"""Buffers of CUDA's reductions, in addition to a reduction's argument and result.

If columns are reduced, as in the gradient of a bias, and there are fewer results than thread blocks
that fit on the device, several blocks work on one result. They write partial results to a buffer,
which can be larger than the matrix itself: PyTorch reserves space for each thread of a block where
one result would be enough (`setReduceConfig` and `ReduceConfig::global_memory_size` in
`aten/src/ATen/native/cuda/Reduce.cuh`, of torch 2.11).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.machine import Device

_aten: Any = torch.ops.aten
_WARP, _MOST_THREADS = 32, 512
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Minimum and maximum number of values that a thread reduces: below the minimum no more threads are
used, above the maximum more blocks are used."""

REDUCTIONS: dict[Any, int] = {
    **dict.fromkeys(
        (
            *(_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim),
            *(_aten.prod.default, _aten.prod.dim_int, _aten.amax.default, _aten.amin.default),
            *(_aten.linalg_vector_norm.default, _aten.logsumexp.default),
        ),
        4,
    ),
    **dict.fromkeys(  # a value and its index; mean, squares and counts
        (
            *(_aten.argmax.default, _aten.argmin.default, _aten.max.dim, _aten.min.dim),
            *(_aten.var.correction, _aten.std.correction),
            *(_aten.var_mean.correction, _aten.std_mean.correction),
        ),
        16,
    ),
}
"""Reductions, and the bytes of a partial result for elements of at most 4 bytes."""

MOST_RESIDENT = 132 * 2048
_RESIDENT = {  # compute capability -> threads that its largest device runs at once
    "7.0": 80 * 2048,
    "7.5": 72 * 1024,
    "8.0": 108 * 2048,
    "8.6": 84 * 1536,
    "8.9": 142 * 1536,
    "9.0": MOST_RESIDENT,
    "10.0": 148 * 2048,
    "12.0": 188 * 1536,
}
"""Multiprocessors (NVIDIA's architecture papers) times threads on each (CUDA Programming Guide,
"Technical Specifications per Compute Capability")."""

_AT = {_aten.linalg_vector_norm.default: 2}
"""Position of the dims among the arguments, if it is not 1."""


def reduction_bytes(op: Any, args: tuple[Any, ...], resident_threads: int) -> int:
    """Return the bytes of the buffer of `op` on a device that runs `resident_threads` threads at
    once, or 0 if `op` is not a reduction. (Its semaphores, four bytes for each block of results,
    are not counted.)"""
    part = REDUCTIONS.get(op)
    if part is None:
        return 0
    at = _AT.get(op, 1)
    return buffer_bytes(args[0], args[at] if len(args) > at else None, part, resident_threads)


def buffer_bytes(
    tensor: Tensor, dims: int | Sequence[int] | None, part_bytes: int, resident_threads: int
) -> int:
    """Return the bytes of the buffer for reducing `tensor` over `dims` (None or empty: all of
    them). Rows, which are adjacent in memory, need at most a few kilobytes, which are not counted."""
    given = range(tensor.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    reduced = {dim % tensor.dim() for dim in given or range(tensor.dim())} if tensor.dim() else ()
    sizes = list(zip(tensor.stride(), tensor.shape, range(tensor.dim()), strict=True))[::-1]
    inner = [(stride, size) for stride, size, dim in sizes if dim in reduced and size > 1]
    outer = [(stride, size) for stride, size, dim in sizes if dim not in reduced and size > 1]
    if tensor.numel() == 0 or not outer or (inner and min(inner)[0] < outer[0][0]):
        return 0
    inputs, outputs = (math.prod(size for _, size in dims) for dims in (inner, outer))
    adjacent = 1
    for stride, size in outer:
        if stride != adjacent:
            break
        adjacent *= size
    vector = next(v for v in (4, 2, 1) if adjacent % v == 0)  # results that a thread reads at once
    most = _MOST_THREADS // vector
    width = min(1 << (outputs // vector).bit_length() - 1, _WARP)
    grid = -(-(outputs // vector) // width)
    values = -(-inputs // (most // width))
    blocks = resident_threads // most
    if values < _MOST_VALUES or grid > blocks:
        return 0
    shares = max(min(-(-blocks // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    wide = max(4, tensor.element_size()) // 4 if tensor.is_floating_point() else 1
    return part_bytes * wide * outputs * shares * width * vector if shares > 1 else 0


def resident_threads(device: Device) -> int:
    """Return the number of threads that `device` runs at once. If it is not present, this is the
    number for the largest device of its compute capability."""
    if device.present and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(device.index)
        return found.multi_processor_count * found.max_threads_per_multi_processor
    return _RESIDENT.get(device.capability, MOST_RESIDENT)
