"""Buffers in which CUDA's blocks of threads add up: sizes that torch's allocator told of its CUDA
build."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.estimate.reductions import buffer_bytes, reduction_bytes

aten = torch.ops.aten
THREADS = 108 * 2048  # of an A100


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# Measured on torch 2.11 (benchmarks/allocator): what was taken beside the result.
@pytest.mark.parametrize(
    ("op", "args", "num_bytes"),
    [
        (aten.sum.dim_IntList, (meta(4096, 1024), [0]), 33_554_432),
        (aten.sum.dim_IntList, (meta(4096, 256), [0]), 8_388_608),
        (aten.sum.dim_IntList, (meta(4096, 1024, dtype=torch.bfloat16), [0]), 33_554_432),
        (aten.sum.dim_IntList, (meta(4096, 2000), [0]), 65_536_000),
        (aten.sum.dim_IntList, (meta(64, 64, 576), [0, 1]), 18_874_368),
        (aten.sum.dim_IntList, (meta(4096, 2), [1]), 0),
        (aten.amax.default, (meta(4096, 512), [0]), 16_777_216),
        (aten.var.correction, (meta(4096, 512), [0]), 67_108_864),
        (aten.argmax.default, (meta(4096, 512), 0), 67_108_864),
        (aten.max.dim, (meta(4096, 512), 0), 67_108_864),
        (aten.mean.dim, (meta(64, 512, 16, 16), [2, 3]), 0),
        (aten.linalg_vector_norm.default, (meta(4096, 512), 2, [0]), 16_777_216),
        (aten.relu.default, (meta(4096, 512),), 0),
    ],
)
def test_sizes_are_those_that_torch_takes(op: object, args: tuple[object, ...], num_bytes: int):
    assert reduction_bytes(op, args, THREADS) == num_bytes


def test_images_whose_channels_lie_last_are_added_up_like_columns():
    image = meta(64, 32, 32, 32)
    assert buffer_bytes(image, [0, 2, 3], 4, THREADS) < 1 << 16
    last = image.contiguous(memory_format=torch.channels_last)
    assert buffer_bytes(last, [0, 2, 3], 4, THREADS) == buffer_bytes(
        meta(64 * 32 * 32, 32), [0], 4, THREADS
    )


@given(
    shape=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    data=st.data(),
    threads=st.sampled_from([1 << 14, THREADS, 1 << 19]),
)
def test_dimensions_of_one_change_nothing_and_a_number_needs_no_buffer(
    shape: list[int], data: st.DataObject, threads: int
):
    tensor = meta(*shape)
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    found = buffer_bytes(tensor, sorted(dims), 4, threads)
    assert found >= 0
    place = data.draw(st.integers(0, len(shape)))
    moved = sorted(dim + (dim >= place) for dim in dims)
    assert buffer_bytes(tensor.unsqueeze(place), moved, 4, threads) == found
    assert buffer_bytes(tensor[(slice(1),) * len(shape)], sorted(dims), 4, threads) == 0


def test_numbers_in_double_precision_take_twice_the_room():
    single, double = meta(4096, 1024), meta(4096, 1024, dtype=torch.float64)
    ratio = buffer_bytes(double, [0], 4, THREADS) / buffer_bytes(single, [0], 4, THREADS)
    assert ratio == pytest.approx(2, rel=0.01)


def test_what_is_empty_takes_none():
    assert buffer_bytes(meta(0, 5), [0], 4, THREADS) == 0
    assert buffer_bytes(meta(), None, 4, THREADS) == 0
