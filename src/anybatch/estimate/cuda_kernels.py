"""CUDA's kernels: what they take beside arguments and results, by rule.

Sizes follow from shapes, by torch's source and as its caching allocator tells of single operations
(`benchmarks/allocator/README.md`); those of reductions are exact. What cuDNN's algorithms take
for themselves is not known without a device, and counts as nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anybatch.estimate.images import CONVOLUTION_BACKWARD, IMAGES, scratch_on_cuda
from anybatch.estimate.kernels import Kernels
from anybatch.estimate.reductions import buffer_bytes, reduction_bytes
from anybatch.machine import Device

_aten: Any = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)

_RESIDENT = {  # compute capability -> threads that the largest device of it runs at once
    "7.0": 80 * 2048,
    "7.5": 72 * 1024,
    "8.0": 108 * 2048,
    "8.6": 84 * 1536,
    "8.9": 142 * 1536,
    "9.0": 132 * 2048,
    "10.0": 148 * 2048,
    "12.0": 188 * 1536,
}
"""Multiprocessors (NVIDIA's architecture papers) times threads on each (CUDA Programming Guide, "Technical
Specifications per Compute Capability")."""

_FEW_INDICES = 3072
"""Up to so many an embedding's gradient is added up without sorting them (`cuda/Embedding.cu`)."""

_ROWS_PER_PART = 10
"""Rows of gradients that one warp adds up (`cuda/EmbeddingBackwardKernel.cu`)."""

_MANY_ROWS, _PART_BYTES = 64 << 10, 4 << 20
"""From so many rows on, the gradients of a LayerNorm's weights are added up from parts, of at most so many
bytes for each of the two (`cuda/layer_norm_kernel.cu`)."""


class CudaKernels(Kernels):
    """torch's own kernels on CUDA, and its copies for those of libraries.

    Args:
        resident_threads: that the device runs at once.
    """

    def __init__(self, resident_threads: int) -> None:
        self._threads = resident_threads

    def scratch(self, op: Any, args: tuple[Any, ...], result: Any) -> int:
        """See `Kernels`."""
        if op in IMAGES:
            copies = scratch_on_cuda(op, args)
            if op is CONVOLUTION_BACKWARD and args[10][2]:  # the bias comes last, by a sum
                gradient = args[0]
                dims = [0, *range(2, gradient.dim())]
                return max(copies, buffer_bytes(gradient, dims, 4, self._threads))
            return copies
        if op in _RULES:
            return _RULES[op](*args)
        if op in _NORM_BACKWARD:
            return _layer_norm_backward(args, self._threads)
        return reduction_bytes(op, args, self._threads)


def resident_threads(device: Device) -> int:
    """Threads that `device` runs at once; where it is not here, those of the largest of its kind."""
    if device.present and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(device.index)
        return found.multi_processor_count * found.max_threads_per_multi_processor
    return _RESIDENT.get(device.capability, _RESIDENT["9.0"])


def _embedding(_weight: Tensor, indices: Tensor, *_: Any) -> int:
    return _copied(indices)


def _embedding_backward(
    gradient: Tensor, indices: Tensor, num_words: int, padding: int = -1, by_frequency: bool = False
) -> int:
    """Indices are sorted, runs of equal ones divided into parts, and each part is added up by itself. How
    many there are is data; torch takes room for the most that there can be."""
    num = indices.numel()
    copies = _copied(gradient) + _copied(indices)
    if num <= _FEW_INDICES and padding < 0 and not by_frequency:
        return copies
    words = min(num, num_words)
    parts = num // _ROWS_PER_PART + words
    places = 3 * num + 2 * words + parts
    return copies + 4 * parts * gradient.size(-1) + indices.element_size() * places


def _flash_backward(gradient: Tensor, query: Tensor, key: Tensor, *rest: Any) -> int:
    """Sums over rows, and the gradient of the queries in float32, both with lengths in steps of 128
    (`mha_bwd` in `transformers/cuda/flash_attn/flash_api.cpp`)."""
    batch, heads, length, width = query.shape
    rows = batch * heads * _up(length, 128)
    sums = 4 * rows * (1 + _up(width, 32 if width <= 128 else 64))
    grouped = 2 * batch * heads * key.size(2) * width * query.element_size()
    copies = _copied(gradient.transpose(1, 2)) + _copied(rest[1].transpose(1, 2))
    return copies + sums + (grouped if key.size(1) != heads else 0)


def _efficient_backward(gradient: Tensor, query: Tensor, *_: Any) -> int:
    """Result times gradient, summed over rows, and then the gradient of the queries, piece by piece in
    float32 with a lock for each (`transformers/cuda/attention_backward.cu`, `kernel_backward.h`)."""
    batch, heads, length, width = query.shape
    is_half = query.dtype in _HALF
    rows, columns = 128 if is_half else 64, 64 if width <= 64 and not is_half else 128
    pieces = -(-length // rows) * -(-width // columns)
    sums = _rounded(4 * batch * heads * length)
    pieces_bytes = batch * heads * pieces * (4 * rows * columns + 16)
    product = 0 if is_half else query.numel() * 4 + sums
    return _copied(gradient.transpose(1, 2)) + sums + max(product, pieces_bytes)


def _stand_in_backward(gradient: Tensor, query: Tensor, key: Tensor, *rest: Any) -> int:
    """Of the CPU's kernel, where it stands for one of the two: see `cuda`."""
    masked = len(rest) > 5 and rest[5] is not None
    way = _flash_backward if query.dtype in _HALF and not masked else _efficient_backward
    return way(gradient, query, key, *rest)


def _layer_norm(tensor: Tensor, *_: Any) -> int:
    return _copied(tensor)


def _layer_norm_backward(args: tuple[Any, ...], threads: int) -> int:
    gradient, tensor, shape = args[:3]
    copies = _copied(gradient) + _copied(tensor)
    width = torch.Size(shape).numel()
    if tensor.numel() // max(1, width) <= _MANY_ROWS or 128 * width > threads:
        return copies
    return copies + 4 * _PART_BYTES  # the parts, and the buffer in which they are added up


def _group_norm(tensor: Tensor, _weight: Any, _bias: Any, num: int, channels: int, *_: Any) -> int:
    return _copied(tensor) + 2 * 4 * num * channels


def _group_norm_backward(
    gradient: Tensor, tensor: Tensor, _mean: Any, _rstd: Any, _weight: Any, num: int, channels: int, *_: Any
) -> int:
    return _copied(gradient) + _copied(tensor) + 4 * 4 * num * channels


def _softmax_backward(gradient: Tensor, *_: Any) -> int:
    return gradient.nbytes  # times the result, a tensor of its own


def _index_put(_tensor: Tensor, indices: Any, _values: Any, accumulate: bool = False, *_: Any) -> int:
    """Where numbers are added, the places are sorted first."""
    known = [index for index in indices if index is not None]
    return 4 * 8 * max((index.numel() for index in known), default=0) if accumulate else 0


_NORM_BACKWARD = (_aten.native_layer_norm_backward.default,)
_RULES: dict[Any, Callable[..., int]] = {
    _aten.embedding.default: _embedding,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _stand_in_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten.index_put.default: _index_put,
    _aten.index_put_.default: _index_put,
    _aten._index_put_impl_.default: _index_put,
}


def _copied(tensor: Tensor) -> int:
    """A copy of what a kernel reads as contiguous."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _rounded(num_bytes: int) -> int:
    """As the allocator rounds it."""
    return _up(num_bytes, 512)
