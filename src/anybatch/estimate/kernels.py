"""Memory that kernels take beyond their arguments and results, which a trace does not see.

On a CPU only what follows from the semantics of torch's operators is counted; what oneDNN and MKL keep
is not, since a plan for a CPU that is here is rehearsed. On CUDA the scratch that grows with the batch
is counted, by torch's source and as its caching allocator tells of single operations
(`benchmarks/allocator/README.md`). Workspaces of cuDNN are not.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
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
_CONTIGUOUS = {  # operation -> which of its arguments it reads as contiguous
    _aten.native_layer_norm.default: (0,),
    _aten.native_layer_norm_backward.default: (0, 1),
    _aten.native_group_norm.default: (0,),
    _aten.native_group_norm_backward.default: (0, 1),
    _aten._softmax.default: (0,),
    _aten._softmax_backward_data.default: (0, 1),
    _aten._log_softmax.default: (0,),
    _aten._log_softmax_backward_data.default: (0, 1),
}
_PROMOTING = {
    packet.Tensor for packet in (_aten.add, _aten.sub, _aten.mul, _aten.div, _aten.add_, _aten.mul_)
} | {_aten.where.self}
_HALF = (torch.bfloat16, torch.float16)


class Kernels(ABC):
    """Memory of the kernels of one kind of device."""

    @abstractmethod
    def scratch(self, op: Any, args: tuple[Any, ...], result: Any) -> int:
        """Bytes that `op` takes and gives back while it runs."""

    def copies(self, op: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Bytes of each copy of an argument that `op` makes before its result and frees after it, in
        addition to its scratch."""
        return ()

    def workspace(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """A result whose shape does not tell its bytes, and those bytes."""
        return None


class CpuKernels(Kernels):
    """Copies that torch's own operators make on a CPU, by their semantics."""

    def scratch(self, op: Any, args: tuple[Any, ...], result: Any) -> int:
        """See `Kernels`."""
        if op in _PROMOTING:
            return _promoted_bytes(args, result)
        if op in _CONTIGUOUS:
            return sum(_bytes(args[i]) for i in _CONTIGUOUS[op] if not args[i].is_contiguous())
        return 0

    def workspace(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """See `Kernels`: an LSTM saves four gates and a cell of each step for backward."""
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


def _promoted_bytes(args: tuple[Any, ...], result: Tensor) -> int:
    """Copies of the operands that do not have the common dtype; scalars are converted on the way."""
    operands = [a for a in args if isinstance(a, Tensor) and a.dim() and a.dtype != torch.bool]
    common = result.dtype
    for operand in operands:
        common = _common(common, operand.dtype)
    return sum(a.numel() * common.itemsize for a in operands if a.dtype != common)


@functools.cache  # while a step is traced, torch's takes 0.3 ms: it goes through the tracer
def _common(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return torch.promote_types(one, other)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class CudaKernels(Kernels):
    """torch's own kernels on CUDA, and its copies for those of libraries.

    Args:
        threads: that the device runs at once, see `reductions.resident_threads`.
    """

    def __init__(self, threads: int = MOST_RESIDENT) -> None:
        self._threads = threads

    def scratch(self, op: Any, args: tuple[Any, ...], result: Any) -> int:
        """See `Kernels`."""
        if (rule := _RULES.get(op)) is not None:
            return rule(*args)
        if op is _CONVOLUTION_BACKWARD:  # the gradient of the bias is a sum
            dims = [0, *range(2, args[0].dim())]
            return buffer_bytes(args[0], dims, 4, self._threads) if args[10][2] else 0
        return reduction_bytes(op, args, self._threads)

    def copies(self, op: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """See `Kernels`: of what is not laid out as the operation reads it."""
        read = _READ.get(op)
        return () if read is None else tuple(filter(None, map(_copied, read(args))))

    def workspace(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """See `Kernels`. Where a layer of oneDNN's LSTM stands for one of cuDNN's: gates, cells and
        outputs, the least that its backward needs."""
        return (result[3], 6 * result[0].nbytes) if op is _LSTM else None


def _embedding_backward(gradient: Tensor, indices: Tensor, num_words: int, *_: Any) -> int:
    """Indices are sorted, and runs of equal ones are summed in parts of 10 rows
    (`cuda/EmbeddingBackwardKernel.cu`). How many runs there are is data; torch reserves the most."""
    num = indices.numel()
    words = min(num, num_words)
    parts = num // 10 + words
    return 4 * parts * gradient.size(-1) + indices.element_size() * (3 * num + 2 * words + parts)


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


def _softmax_backward(gradient: Tensor, *_: Any) -> int:
    return gradient.nbytes  # times the result, a tensor of its own


def _index_put(
    _tensor: Tensor, indices: Any, _values: Any, accumulate: bool = False, *_: Any
) -> int:
    """Where numbers are added, the places are sorted first."""
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
    """A copy of what a kernel reads as contiguous."""
    return 0 if tensor.is_contiguous() else _bytes(tensor)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _rounded(num_bytes: int) -> int:
    """As the allocator rounds it."""
    return _up(num_bytes, 512)
