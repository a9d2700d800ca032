"""Memory that kernels take in addition to their arguments and results, which a trace does not see.

On a CPU only what an LSTM saves is counted, since a plan for a CPU that is present is rehearsed. On
CUDA the scratch memory that grows with the batch is counted, based on PyTorch's source and on what
its caching allocator reports for single operations (`benchmarks/allocator/README.md`). Workspaces
of cuDNN are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anybatch.errors import InputError
from anybatch.estimate.reductions import MOST_RESIDENT, buffer_bytes, reduction_bytes
from anybatch.machine import cpu_computes_in

_aten: Any = torch.ops.aten
_LSTM = _aten.mkldnn_rnn_layer.default
_CONVOLUTION_BACKWARD = _aten.convolution_backward.default
_HALF = (torch.bfloat16, torch.float16)


class Kernels:
    """Memory taken by the kernels of a CPU."""

    def scratch(self, op: Any, args: tuple[Any, ...]) -> int:
        """Return the bytes that `op` allocates and frees while it runs."""
        return 0

    def copies(self, op: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the bytes of each copy of an argument that `op` makes before its result and frees
        after it, in addition to its scratch memory."""
        return ()

    def workspace(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """Return a result whose size does not follow from its shape, and its bytes, or None. An LSTM
        saves four gates and a cell per step for backward."""
        if op is not _LSTM:
            return None
        inputs, recurrent = args[0], args[2]
        if inputs.dtype in _HALF and not cpu_computes_in(inputs.dtype):
            name = str(inputs.dtype).removeprefix("torch.")
            raise InputError(
                f"the model has an LSTM, which torch computes in {name} under autocast by oneDNN alone,"
                f" and oneDNN only on CPUs with instructions for {name}, of which this is none: use"
                " precision fp32."
            )
        gates = inputs.size(0) * inputs.size(1) * recurrent.size(0) * inputs.element_size()
        return result[3], gates + gates // 4


class CudaKernels(Kernels):
    """PyTorch's own kernels on CUDA, and the copies that it makes for kernels of libraries.

    Args:
        threads: number of threads that the device runs at once, see `reductions.resident_threads`.
    """

    def __init__(self, threads: int = MOST_RESIDENT) -> None:
        self._threads = threads

    def scratch(self, op: Any, args: tuple[Any, ...]) -> int:
        """See `Kernels`."""
        if (rule := _RULES.get(op)) is not None:
            return rule(*args)
        if op is _CONVOLUTION_BACKWARD:  # the gradient of the bias is a sum
            dims = [0, *range(2, args[0].dim())]
            return buffer_bytes(args[0], dims, 4, self._threads) if args[10][2] else 0
        return reduction_bytes(op, args, self._threads)

    def copies(self, op: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """See `Kernels`: copies of arguments that do not have the layout that the operation reads."""
        read = _READ.get(op)
        return () if read is None else tuple(filter(None, map(_copied, read(args))))

    def workspace(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """See `Kernels`. If oneDNN's LSTM layer represents cuDNN's: gates, cells and outputs,
        the minimum that its backward needs."""
        return (result[3], 6 * result[0].nbytes) if op is _LSTM else None


def _embedding_backward(gradient: Tensor, indices: Tensor, num_words: int, *_: Any) -> int:
    """Scratch memory of an embedding's backward: indices are sorted, and runs of equal indices are
    summed in parts of 10 rows (`cuda/EmbeddingBackwardKernel.cu`). The number of runs depends on
    data; PyTorch reserves the maximum."""
    num = indices.numel()
    words = min(num, num_words)
    parts = num // 10 + words
    return 4 * parts * gradient.size(-1) + indices.element_size() * (3 * num + 2 * words + parts)


def _flash_backward(_gradient: Tensor, query: Tensor, key: Tensor, *_: Any) -> int:
    """Scratch memory of flash attention's backward: sums over rows, and the gradient of the queries
    in float32, both with lengths rounded up to 128 (`mha_bwd` in
    `transformers/cuda/flash_attn/flash_api.cpp`)."""
    batch, heads, length, width = query.shape
    rows = batch * heads * _up(length, 128)
    sums = 4 * rows * (1 + _up(width, 32 if width <= 128 else 64))
    grouped = 2 * batch * heads * key.size(2) * width * query.element_size()
    return sums + (grouped if key.size(1) != heads else 0)


def _efficient_backward(_gradient: Tensor, query: Tensor, *_: Any) -> int:
    """Scratch memory of memory-efficient attention's backward: result times gradient, summed over
    rows, then the gradient of the queries, in float32 tiles with a lock for each
    (`transformers/cuda/attention_backward.cu`, `kernel_backward.h`)."""
    batch, heads, length, width = query.shape
    is_half = query.dtype in _HALF
    rows, columns = 128 if is_half else 64, 64 if width <= 64 and not is_half else 128
    pieces = -(-length // rows) * -(-width // columns)
    sums = _rounded(4 * batch * heads * length)
    pieces_bytes = batch * heads * pieces * (4 * rows * columns + 16)
    product = 0 if is_half else query.numel() * 4 + sums
    return sums + max(product, pieces_bytes)


def _stand_in_backward(*args: Any) -> int:
    """Scratch memory of the CPU kernel's backward if it represents one of the two: see
    `cuda`."""
    return _flash_backward(*args) if _stands_for_flash(args) else _efficient_backward(*args)


def _stands_for_flash(args: tuple[Any, ...]) -> bool:
    """Return whether the CPU kernel represents flash attention. In half precision with a mask it
    does not, but a trace does not show this."""
    return args[1].dtype in _HALF


def _softmax_backward(gradient: Tensor, *_: Any) -> int:
    return gradient.nbytes  # gradient times result is a separate tensor


def _index_put(
    _tensor: Tensor, indices: Any, _values: Any, accumulate: bool = False, *_: Any
) -> int:
    """Scratch memory of `index_put`: to accumulate values, it first sorts the indices."""
    known = [index for index in indices if index is not None]
    return 4 * 8 * max((index.numel() for index in known), default=0) if accumulate else 0


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
    _aten.native_layer_norm_backward.default: lambda args: args[:2],
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


_RULES: dict[Any, Callable[..., int]] = {
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _stand_in_backward,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten.index_put.default: _index_put,
    _aten.index_put_.default: _index_put,
    _aten._index_put_impl_.default: _index_put,
}


def _copied(tensor: Tensor) -> int:
    """Return the bytes of the copy of an argument that a kernel reads as contiguous."""
    return 0 if tensor.is_contiguous() else tensor.nbytes


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _rounded(num_bytes: int) -> int:
    """Round as the allocator does."""
    return _up(num_bytes, 512)
