"""CUDA's kernels: what they take beside arguments and results, by rule.

Sizes follow from shapes, by torch's source and as its caching allocator tells of single operations
(`benchmarks/allocator/README.md`); those of reductions are exact. What cuDNN's algorithms take,
and copies into the layout that they read, are not known without a device, and not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.estimate.kernels import CTC_BACKWARD, Kernels, Scratch
from anybatch.estimate.reductions import REDUCTIONS, buffer_bytes, reduction_bytes
from anybatch.machine import Device

_aten: Any = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_CONVOLUTION_BACKWARD = _aten.convolution_backward.default
_LSTM = _aten.mkldnn_rnn_layer.default

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
"""Multiprocessors (NVIDIA's architecture papers) times threads on each (CUDA Programming Guide,
"Technical Specifications per Compute Capability")."""

_FEW_INDICES = 3072
"""Up to so many an embedding's gradient is added up without sorting them (`cuda/Embedding.cu`)."""

_ROWS_PER_PART = 10
"""Rows of gradients that one warp adds up (`cuda/EmbeddingBackwardKernel.cu`)."""

_MANY_ROWS, _PART_BYTES = 64 << 10, 4 << 20
"""From so many rows on, the gradients of a LayerNorm's weights are added up from parts, of at most so
many bytes for each of the two (`cuda/layer_norm_kernel.cu`)."""


class CudaKernels(Kernels):
    """torch's own kernels on CUDA, and its copies for those of libraries.

    Args:
        resident_threads: that the device runs at once.
    """

    def __init__(self, resident_threads: int) -> None:
        self._threads = resident_threads

    def scratch(self, op: Any, args: tuple[Any, ...], result: Any) -> int:
        """See `Kernels`."""
        if op not in _TAKING:  # asked for every operation of a trace
            return 0
        if op is _CONVOLUTION_BACKWARD:  # the gradient of the bias is a sum
            gradient = args[0]
            dims = [0, *range(2, gradient.dim())]
            return buffer_bytes(gradient, dims, 4, self._threads) if args[10][2] else 0
        if op in _RULES:
            return _RULES[op](*args)
        if op is _LAYER_NORM_BACKWARD:
            return _layer_norm_backward(args[1], args[2], self._threads)
        return reduction_bytes(op, args, self._threads)

    def copies(self, op: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """See `Kernels`: of what is not laid out as the operation reads it."""
        read = _READ.get(op)
        return () if read is None else tuple(filter(None, map(_copied, read(args))))

    def workspace(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """See `Kernels`. Where a layer of oneDNN's LSTM stands for one of cuDNN's: gates, cells and
        outputs, the least that its backward needs."""
        return (result[3], 6 * result[0].nbytes) if op is _LSTM else None


def resident_threads(device: Device) -> int:
    """Threads that `device` runs at once; where it is not here, those of the largest of its kind."""
    if device.present and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(device.index)
        return found.multi_processor_count * found.max_threads_per_multi_processor
    return _RESIDENT.get(device.capability, _RESIDENT["9.0"])


def _embedding_backward(
    gradient: Tensor, indices: Tensor, num_words: int, padding: int = -1, by_frequency: bool = False
) -> int:
    """Indices are sorted, runs of equal ones divided into parts, and each part is added up by itself.
    How many there are is data; torch takes room for the most that there can be."""
    alone = padding >= 0 or by_frequency
    return Scratch(
        _embedding_backward_bytes,
        *(indices.numel(), num_words, gradient.size(-1), indices.element_size(), int(alone)),
    )


def _embedding_backward_bytes(
    num: int, num_words: int, width: int, place_bytes: int, sorted_anyhow: int
) -> int:
    if num <= _FEW_INDICES and not sorted_anyhow:
        return 0
    words = min(num, num_words)
    parts = num // _ROWS_PER_PART + words
    return 4 * parts * width + place_bytes * (3 * num + 2 * words + parts)


def _flash_backward(_gradient: Tensor, query: Tensor, key: Tensor, *_: Any) -> int:
    """Sums over rows, and the gradient of the queries in float32, both with lengths in steps of 128
    (`mha_bwd` in `transformers/cuda/flash_attn/flash_api.cpp`)."""
    batch, heads, length, width = query.shape
    rows = batch * heads * _up(length, 128)
    sums = 4 * rows * (1 + _up(width, 32 if width <= 128 else 64))
    grouped = 2 * batch * heads * key.size(2) * width * query.element_size()
    return sums + (grouped if key.size(1) != heads else 0)


def _efficient_backward(_gradient: Tensor, query: Tensor, *_: Any) -> int:
    """Result times gradient, summed over rows, and then the gradient of the queries, piece by piece in
    float32 with a lock for each (`transformers/cuda/attention_backward.cu`, `kernel_backward.h`)."""
    batch, heads, length, width = query.shape
    is_half = query.dtype in _HALF
    rows, columns = 128 if is_half else 64, 64 if width <= 64 and not is_half else 128
    pieces = -(-length // rows) * -(-width // columns)
    sums = _rounded(4 * batch * heads * length)
    pieces_bytes = batch * heads * pieces * (4 * rows * columns + 16)
    product = 0 if is_half else query.numel() * 4 + sums
    return sums + max(product, pieces_bytes)


def _stand_in_backward(*args: Any) -> int:
    """Of the CPU's kernel, where it stands for one of the two: see `cuda`."""
    return _flash_backward(*args) if _stands_for_flash(args) else _efficient_backward(*args)


def _stands_for_flash(args: tuple[Any, ...]) -> bool:
    """Whether it does; in half precision under a mask it does not, but a trace does not tell."""
    return args[1].dtype in _HALF


def _layer_norm_backward(tensor: Tensor, shape: Sequence[int], threads: int) -> int:
    """Of many narrow rows the gradients of weight and bias are added up in parts, and those by a
    sum."""
    width = torch.Size(shape).numel()
    if tensor.numel() // max(1, width) <= _MANY_ROWS or 128 * width > threads:
        return 0
    return 4 * _PART_BYTES


def _group_norm(_tensor: Tensor, _weight: Any, _bias: Any, num: int, channels: int, *_: Any) -> int:
    return 2 * 4 * num * channels


def _group_norm_backward(
    _gradient: Tensor,
    _tensor: Tensor,
    _mean: Any,
    _rstd: Any,
    _weight: Any,
    num: int,
    channels: int,
    *_: Any,
) -> int:
    return 4 * 4 * num * channels


def _softmax_backward(gradient: Tensor, *_: Any) -> int:
    return gradient.nbytes  # times the result, a tensor of its own


def _index_put(
    _tensor: Tensor, indices: Any, _values: Any, accumulate: bool = False, *_: Any
) -> int:
    """Where numbers are added, the places are sorted first."""
    known = [index for index in indices if index is not None]
    return 4 * 8 * max((index.numel() for index in known), default=0) if accumulate else 0


_LAYER_NORM_BACKWARD = _aten.native_layer_norm_backward.default


def _by_flash(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return args[0].transpose(1, 2), args[4].transpose(1, 2)  # gradient and result


def _by_efficient(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return (args[0].transpose(1, 2),)


def _by_stand_in(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return _by_flash(args) if _stands_for_flash(args) else _by_efficient(args)


_READ: dict[Any, Callable[[tuple[Any, ...]], tuple[Tensor, ...]]] = {  # what is read as contiguous
    _aten.embedding.default: lambda args: args[1:2],
    _aten.embedding_dense_backward.default: lambda args: args[:2],
    _aten.native_layer_norm.default: lambda args: args[:1],
    _LAYER_NORM_BACKWARD: lambda args: args[:2],
    _aten.native_group_norm.default: lambda args: args[:1],
    _aten.native_group_norm_backward.default: lambda args: args[:2],
    _aten._softmax.default: lambda args: args[:1],
    _aten._softmax_backward_data.default: lambda args: args[:2],
    _aten._log_softmax.default: lambda args: args[:1],
    _aten._log_softmax_backward_data.default: lambda args: args[:2],
    _aten._scaled_dot_product_flash_attention_backward.default: _by_flash,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _by_flash,
    _aten._scaled_dot_product_efficient_attention_backward.default: _by_efficient,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _by_stand_in,
}


def _ctc_backward(*args: Any) -> int:
    """Paths from their ends, as many as those from their beginnings."""
    return args[6].nbytes


_RULES: dict[Any, Callable[..., int]] = {
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _stand_in_backward,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten._softmax_backward_data.default: _softmax_backward,
    **dict.fromkeys(CTC_BACKWARD, _ctc_backward),
    _aten.index_put.default: _index_put,
    _aten.index_put_.default: _index_put,
    _aten._index_put_impl_.default: _index_put,
}

_TAKING = frozenset((_CONVOLUTION_BACKWARD, *_RULES, _LAYER_NORM_BACKWARD, *REDUCTIONS))
"""Operations that take anything beside copies."""


def _copied(tensor: Tensor) -> int:
    """A copy of what a kernel reads as contiguous."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _rounded(num_bytes: int) -> int:
    """As the allocator rounds it."""
    return _up(num_bytes, 512)
