"""What kernels keep beside tensors, by the rules of the estimate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.estimate.kernels import CpuKernels

_aten = torch.ops.aten
KIB = 1 << 10


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(*shape, dtype=dtype)


def multiply(kernels: CpuKernels, m: int, k: int, n: int) -> int:
    """What stays beyond what was there before."""
    before = kernels.kept_bytes
    kernels.scratch(_aten.mm.default, (fake(m, k), fake(k, n)), fake(m, n))
    return kernels.kept_bytes - before


def test_a_product_keeps_what_each_thread_packs():
    # A slice of 192 of k: 1024 columns and 384 rows, in float32, for each of two threads.
    kept = multiply(CpuKernels(2), 4096, 1024, 1024)
    assert 0 <= kept - 2 * 4 * 192 * (1024 + 384) < 40 * KIB


def test_a_buffer_that_is_large_enough_is_used_again():
    kernels = CpuKernels(2)
    large = multiply(kernels, 1024, 256, 4000)
    assert multiply(kernels, 1024, 256, 1000) == 0
    assert multiply(kernels, 256, 256, 256) == 0
    assert kernels.kept_bytes == large


def test_a_buffer_that_is_too_small_stays_beside_the_new_one():
    kernels = CpuKernels(2)
    small = multiply(kernels, 256, 256, 256)
    large = multiply(kernels, 1024, 256, 4000)
    assert kernels.kept_bytes == small + large
    alone = CpuKernels(2)
    assert multiply(alone, 1024, 256, 4000) == large


def test_of_growing_products_no_more_than_five_buffers_are_kept():
    kernels = CpuKernels(1)
    kept = [multiply(kernels, 1024, 512, n) for n in range(64, 64 * 9, 64)]
    # The sixth takes the place of the first, and each later one that of the one before.
    assert kernels.kept_bytes == sum(kept)
    last = kernels.kept_bytes
    assert multiply(kernels, 1024, 512, 64 * 9) == 4 * 192 * 64
    assert kernels.kept_bytes == last + 4 * 192 * 64


def test_thin_products_pack_nothing():
    kernels = CpuKernels(2)
    assert multiply(kernels, 512, 256, 10) == 0
    assert multiply(kernels, 1, 256, 512) == 0


def test_products_in_half_precision_keep_kernels_and_pack_nothing():
    kernels = CpuKernels(2)
    half = torch.bfloat16
    for rows in (64, 64, 128):
        args = fake(rows, 64, dtype=half), fake(64, 64, dtype=half)
        kernels.scratch(_aten.mm.default, args, fake(rows, 64, dtype=half))
    one = CpuKernels(2)
    one.scratch(
        _aten.mm.default, (fake(64, 64, dtype=half), fake(64, 64, dtype=half)), fake(64, 64)
    )
    assert kernels.kept_bytes == one.kept_bytes  # once
    assert kernels.shape_bytes.forward + kernels.shape_bytes.backward == 2 * (
        one.shape_bytes.forward + one.shape_bytes.backward
    )


def test_a_convolution_keeps_less_for_one_gradient_than_for_two():
    image, weight, result = fake(4, 16, 8, 8), fake(16, 16, 3, 3), fake(4, 16, 8, 8)

    def kept(mask: list[bool]) -> int:
        kernels = CpuKernels(2)
        args = (result, image, weight, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
        kernels.scratch(_aten.convolution_backward.default, args, None)
        return kernels.shape_bytes.forward + kernels.shape_bytes.backward

    assert 0 < kept([False, True, False]) * 2 == kept([True, True, True])
