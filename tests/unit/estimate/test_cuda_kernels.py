"""What CUDA's kernels take beside arguments and results: sizes that torch's allocator told of its
CUDA build (`benchmarks/allocator`), and how they follow the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.estimate.kernels import CudaKernels
from anybatch.estimate.reductions import resident_threads
from anybatch.machine import Machine

aten: Any = torch.ops.aten
KERNELS = CudaKernels(108 * 2048)
FLASH = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def heads(batch: int, number: int, length: int, width: int, dtype: torch.dtype) -> Tensor:
    """As torch's models have them: the heads of a token side by side."""
    return meta(batch, length, number, width, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "num_bytes"),
    [
        (FLASH, (64, 6, 64, 32), torch.bfloat16, 196_608 + 6_291_456),
        (FLASH, (8, 6, 100, 128), torch.bfloat16, 24_576 + 3_145_728),
        (EFFICIENT, (64, 6, 64, 32), torch.float32, 98_304 + 6_297_600),
        (EFFICIENT, (32, 4, 128, 64), torch.float32, 4_194_304 + 2 * 65_536),
        (EFFICIENT, (8, 6, 100, 80), torch.float32, 19_456 + 3_147_264),
        (EFFICIENT, (8, 6, 100, 200), torch.float32, 19_456 + 6_294_528),
        (EFFICIENT, (8, 6, 1000, 128), torch.bfloat16, 192_000 + 25_171_968),
    ],
)
def test_attention_in_backward(op: Any, shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int):
    each = heads(*shape, dtype)
    args = (each, each, each, each, each)
    assert KERNELS.scratch(op, args) == num_bytes
    assert KERNELS.copies(op, args) == ()
    turned = meta(*shape, dtype=dtype)
    assert KERNELS.copies(op, (turned, *args[1:])) == (turned.nbytes,)


def test_attention_with_fewer_heads_of_keys_makes_their_gradients_for_all():
    query, key = (heads(2, number, 128, 64, torch.bfloat16) for number in (8, 2))
    alone = KERNELS.scratch(FLASH, (query, query, query, query, query))
    grouped = KERNELS.scratch(FLASH, (query, query, key, key, query))
    assert grouped - alone == 2 * query.nbytes


@pytest.mark.parametrize(
    ("tokens", "words", "width", "dtype", "num_bytes"),
    [
        (4096, 4000, 256, torch.float32, 4_514_816 + 3 * 32_768 + 2 * 32_000 + 35_272),
        (4096, 200, 256, torch.float32, 623_616 + 3 * 32_768 + 2 * 1_600 + 4_872),
        (4000, 32_000, 64, torch.bfloat16, 1_126_400 + 5 * 32_000 + 35_200),
    ],
)
def test_an_embedding_in_backward(
    tokens: int, words: int, width: int, dtype: torch.dtype, num_bytes: int
):
    args = (meta(tokens, width, dtype=dtype), meta(tokens, dtype=torch.int64), words, -1, False)
    assert KERNELS.scratch(aten.embedding_dense_backward.default, args) == num_bytes


def test_what_lies_otherwise_is_copied_before_it_is_read():
    turned = meta(64, 32, 192).transpose(0, 1)
    assert KERNELS.copies(aten.native_layer_norm.default, (turned, [192])) == (turned.nbytes,)
    some = meta(32, 129, dtype=torch.int64)[:, :-1]
    assert KERNELS.copies(aten.embedding.default, (meta(10, 4), some)) == (32 * 128 * 8,)
    assert KERNELS.copies(aten.relu.default, (turned,)) == ()


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_a_softmax_reads_its_arguments_in_a_row(name: str):
    turned, straight = meta(64, 32).t(), meta(32, 64)
    forward, backward = (getattr(aten, name + way).default for way in ("", "_backward_data"))
    assert KERNELS.copies(forward, (turned, 1, False)) == (turned.nbytes,)
    assert KERNELS.copies(backward, (turned, straight, 1, torch.float32)) == (turned.nbytes,)


@pytest.mark.parametrize("name", ["native_layer_norm_backward", "native_group_norm_backward"])
def test_norms_in_backward_read_gradient_and_argument(name: str):
    turned = meta(8, 16, 16, 64).permute(0, 3, 1, 2)
    rest = ([64],) if "layer" in name else (None, None, None, 8, 64, 256, 4)
    copied = KERNELS.copies(getattr(aten, name).default, (turned, turned, *rest))
    assert copied == (turned.nbytes,) * 2


def test_the_bias_of_a_convolution_is_added_up_last():
    gradient, image, weight = meta(64, 192, 8, 8), meta(64, 3, 64, 64), meta(192, 3, 8, 8)
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    image = image.contiguous(memory_format=torch.channels_last)
    some = ([8, 8], [0, 0], [1, 1], False, [0, 0], 1)
    op = aten.convolution_backward.default
    without, with_bias = (
        KERNELS.scratch(op, (gradient, image, weight, [192], *some, [True, True, bias]))
        for bias in (False, True)
    )
    assert without == 0
    assert with_bias == 6_291_456  # measured


def test_a_device_that_is_not_here_has_as_many_threads_as_the_largest_of_its_kind():
    device = Machine.describe("a100-80gb").device
    assert resident_threads(device) == 108 * 2048
    assert resident_threads(replace(device, capability="")) == 132 * 2048
