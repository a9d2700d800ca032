"""Reductions: the buffer that CUDA's thread blocks use in addition to a reduction's argument and
result.

PyTorch distributes each sum, mean, norm or maximum over thread blocks. If there are fewer results
than thread blocks that fit on the device, several blocks work on one result and write partial
results to a buffer, which the last block adds up. If columns are reduced, as in the gradient of a
bias, the buffer can be larger than the matrix itself: PyTorch reserves space for each thread of a
block where one result would be enough.

The distribution depends only on shape, strides and dtype (`setReduceConfig` and
`ReduceConfig::global_memory_size` in `aten/src/ATen/native/cuda/Reduce.cuh`, of torch 2.11); this
module reproduces that arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.machine import Device

_aten: Any = torch.ops.aten
_WARP, _MOST_THREADS, _VECTOR = 32, 512, 4
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Minimum and maximum number of values that a thread reduces: below the minimum no more threads are
used, above the maximum more blocks are used."""

_FLOAT, _PAIR, _MOMENTS = 4, 16, 16
"""Bytes of a partial result, for elements of at most 4 bytes: a sum; a value and its index; mean,
squares and counts."""

_OWN = 0
"""As large as an element of the argument."""

REDUCTIONS: dict[Any, int] = {  # operation -> bytes of a partial result
    _aten.sum.default: _FLOAT,
    _aten.sum.dim_IntList: _FLOAT,
    _aten.mean.default: _FLOAT,
    _aten.mean.dim: _FLOAT,
    _aten.prod.default: _FLOAT,
    _aten.prod.dim_int: _FLOAT,
    _aten.linalg_vector_norm.default: _FLOAT,
    _aten.logsumexp.default: _FLOAT,
    _aten.amax.default: _OWN,
    _aten.amin.default: _OWN,
    _aten.max.default: _OWN,
    _aten.min.default: _OWN,
    _aten.argmax.default: _PAIR,
    _aten.argmin.default: _PAIR,
    _aten.max.dim: _PAIR,
    _aten.min.dim: _PAIR,
    _aten.var.correction: _MOMENTS,
    _aten.std.correction: _MOMENTS,
    _aten.var_mean.correction: _MOMENTS,
    _aten.std_mean.correction: _MOMENTS,
}
"""Operations that are reductions."""

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
    them)."""
    if tensor.numel() == 0:
        return 0
    wide = tensor.element_size() // _FLOAT if tensor.is_floating_point() else 1
    part_bytes = part_bytes * max(1, wide) or tensor.element_size()
    given = range(tensor.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    reduced = (
        {dim % tensor.dim() for dim in given or range(tensor.dim())} if tensor.dim() else set()
    )
    return _divided(_Geometry.of(tensor, reduced), part_bytes, resident_threads)


def resident_threads(device: Device) -> int:
    """Return the number of threads that `device` runs at once. If it is not present, this is the
    number for the largest device of its compute capability."""
    if device.present and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(device.index)
        return found.multi_processor_count * found.max_threads_per_multi_processor
    return _RESIDENT.get(device.capability, MOST_RESIDENT)


class _Geometry(NamedTuple):
    """Dimensions of a reduction, fastest first, adjacent ones merged; strides in elements."""

    reduced: list[tuple[int, int]]  # (stride, size)
    kept: list[tuple[int, int]]

    @classmethod
    def of(cls, tensor: Tensor, reduced: Collection[int]) -> _Geometry:
        sizes = list(zip(tensor.stride(), tensor.shape, strict=True))
        inner = sorted(pair for dim, pair in enumerate(sizes) if dim in reduced and pair[1] > 1)
        outer = [pair for dim, pair in enumerate(sizes) if dim not in reduced and pair[1] > 1]
        return cls(_joined(inner), _joined(outer[::-1]))  # in the order of the result's dimensions


def _joined(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for stride, size in dims:
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = found[-1][0], found[-1][1] * size
        else:
            found.append((stride, size))
    return found


def _divided(geometry: _Geometry, part_bytes: int, resident_threads: int) -> int:
    inputs, outputs = _product(geometry.reduced), _product(geometry.kept)
    along = _is_along_the_fastest(geometry)
    vector = 1
    width, height = (inputs, outputs) if along else (outputs, inputs)
    if along:
        if (
            geometry.reduced
            and geometry.reduced[0][0] == 1
            and len(geometry.reduced) == 1
            and width >= 128
        ):
            width //= _VECTOR
    elif geometry.kept[0][0] == 1:
        vector = _vector(geometry)
        width //= vector
    block_width, block_height = _block(width, height, _MOST_THREADS // vector)

    # 1. Number of values per thread, across lanes and warps.
    step_input = block_width if along else 1
    step_output = 1 if along else block_width
    across_warps = -(-inputs // step_input) >= min(block_height * 16, _MOST_VALUES)
    if across_warps:
        step_input *= block_height
    else:
        step_output *= block_height

    # 2. Number of blocks per result.
    blocks = resident_threads // (block_width * block_height)
    grid = -(-(outputs // vector) // step_output)
    values = -(-inputs // step_input)
    if not (across_warps and values >= _MOST_VALUES and grid <= blocks):
        return 0
    shares = max(min(-(-blocks // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    if shares <= 1:
        return 0
    return part_bytes * outputs * shares * (1 if along else block_width * vector)


def _is_along_the_fastest(geometry: _Geometry) -> bool:
    """Return whether the fastest dimension, in which neighbors are adjacent in memory, is reduced."""
    if not geometry.kept or not geometry.reduced:
        return not geometry.kept
    return geometry.reduced[0][0] < geometry.kept[0][0]


def _vector(geometry: _Geometry) -> int:
    """Return the number of results that a thread reads at once."""
    vector = _VECTOR
    strides = [stride for stride, _ in (*geometry.reduced, *geometry.kept[1:])]
    for number in (geometry.kept[0][1], *strides):
        while number % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    wide, high = (_power_of_two(size) if size < most else most for size in (width, height))
    block_width = min(wide, _WARP)
    block_height = min(high, most // block_width)
    return min(wide, most // block_height), block_height


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most `number`."""
    return 1 << max(0, number.bit_length() - 1)


def _product(dims: list[tuple[int, int]]) -> int:
    product = 1
    for _, size in dims:
        product *= size
    return product
