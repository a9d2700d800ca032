"""Kernels: the memory that operations take beside their arguments and results.

A trace sees arguments and results only. What a kernel takes beside them, for as long as it runs or for
good, stands here, by rule. The rules for CPUs were found by running single operations in fresh
processes and reading the kernel's own peak (`benchmarks/memory/README.md` tells how, and how near they
come). Three libraries matter:

- oneDNN computes convolutions on layouts of its own, so tensors are copied into them and back; keeps
  what it generated for each shape; and gives LSTM a workspace for backward that torch's shapes do not
  tell.
- MKL packs the matrices of a product into buffers, one per thread, and keeps them.
- torch's own element-wise kernels first copy an operand whose dtype is not the common one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten
_node: Any = torch._C._current_autograd_node
_CONVOLUTION = _aten.convolution.default
_CONVOLUTION_BACKWARD = _aten.convolution_backward.default
_LSTM = _aten.mkldnn_rnn_layer.default
_LSTM_BACKWARD = _aten.mkldnn_rnn_layer_backward.default
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SAFE_SOFTMAX = _aten._safe_softmax.default
_NORMS = {  # operation -> which of its arguments it reads as contiguous
    _aten.native_layer_norm.default: (0,),
    _aten.native_layer_norm_backward.default: (0, 1),
    _aten.native_group_norm.default: (0,),
    _aten.native_group_norm_backward.default: (0, 1),
}
_MEANS = (_aten.mean.dim, _aten.mean.default)
_PRODUCTS = {  # operation -> where its two matrices are among its arguments
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
}
_PROMOTING = {
    packet.Tensor for packet in (_aten.add, _aten.sub, _aten.mul, _aten.div, _aten.add_, _aten.mul_)
} | {_aten.where.self}
_HALF = (torch.bfloat16, torch.float16)

BLOCK = 16
"""Channels per block of oneDNN's layouts, with 512-bit vectors."""

PRIMITIVE_BYTES: dict[str, int] = {
    "product": 560 << 10,
    "first": 260 << 10,
    "convolution": 110 << 10,
    "convolution backward": 200 << 10,
    "lstm": 4250 << 10,
    "lstm backward": 1050 << 10,
    "attention": 700 << 10,
    "attention backward": 3100 << 10,
}
"""What oneDNN keeps in the heap, and as generated code, for each shape that it computed with once:
by resident memory before and after the first call, over 2 to 20 shapes each (oneDNN 3.12, AVX-512).
`first` comes with the first product of half precision; attention counts in half precision only."""

_PACKED_DEPTH = 192
_PACKED_ROWS = 400
_PACKED_COLUMNS_BYTES = 3200 << 10
_WARM_PACKED_BYTES = 400 << 10
"""What the engine's warm-up, a product of 256 x 256, has left with MKL before a baseline is taken."""

_PACKED_FACTOR = 1.34
"""What MKL kept by the bytes that the rule says: by resident memory around the products of a decoder
(1024 tokens, width 256, 4000 words; 2 threads) 1564 by 1168 KiB after the first, 9368 by 6992 after
all."""


@dataclass(frozen=True, slots=True)
class ShapeBytes:
    """What is kept for the shapes of one size of batch: of forward, and of backward beside it."""

    forward: int = 0
    backward: int = 0


class Kernels(ABC):
    """What the kernels of one kind of device take. One object sees one trace."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay with the process once all operations seen so far have run, whatever their
        shapes."""
        return 0

    @property
    def shape_bytes(self) -> ShapeBytes:
        """Bytes that stay for the shapes seen so far, and again for those of every other batch size."""
        return ShapeBytes()

    @abstractmethod
    def scratch(self, op: Any, args: tuple[Any, ...], result: Any) -> int:
        """Bytes that `op` takes and gives back while it runs."""

    def workspace(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """A result whose shape does not tell its bytes, and those."""
        return None


class NoKernels(Kernels):
    """Nothing beside arguments and results."""

    def scratch(self, op: Any, args: tuple[Any, ...], result: Any) -> int:
        """See `Kernels`."""
        return 0


class CpuKernels(Kernels):
    """oneDNN, MKL, and torch's own on a CPU with so many threads."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._forward: dict[Hashable, int] = {}
        self._backward: dict[Hashable, int] = {}
        self._first = 0
        self._packed = _Packed(num_threads)

    @property
    def kept_bytes(self) -> int:
        """See `Kernels`."""
        return self._first + self._packed.kept_bytes

    @property
    def shape_bytes(self) -> ShapeBytes:
        """See `Kernels`."""
        return ShapeBytes(sum(self._forward.values()), sum(self._backward.values()))

    def scratch(self, op: Any, args: tuple[Any, ...], result: Any) -> int:
        """See `Kernels`."""
        if op in _PRODUCTS:
            at = _PRODUCTS[op]
            self._product(args[at], args[at + 1])
            return 0
        if op is _CONVOLUTION:
            self._primitive("convolution", args[0], args[1], args[3])
            return _convolution(args[0], args[1], result)
        if op is _CONVOLUTION_BACKWARD:
            self._primitive("convolution backward", args[1], args[2], args[4])
            return _convolution_backward(args[0], args[1], args[2], strided=max(args[4]) > 1)
        if op in _PROMOTING:
            return _casts(args, result)
        if op in _MEANS and args[0].dtype in _HALF:
            return args[0].numel() * 4  # summed in float32, from a copy in float32
        if op in _NORMS:
            tensors = [args[i] for i in _NORMS[op]]
            return sum(_bytes(t) for t in tensors if not t.is_contiguous())
        if op is _SAFE_SOFTMAX:
            return args[0].numel()  # which numbers are minus infinity
        if op is _ATTENTION:
            if args[0].dtype in _HALF:
                self._primitive("attention", args[0], args[1], None)
            return self._num_threads * _attention_bytes(args[0], args[1])
        if op is _ATTENTION_BACKWARD:
            if args[0].dtype in _HALF:
                self._primitive("attention backward", args[1], args[2], None)
            return 0
        if op is _LSTM:
            self._primitive("lstm", args[0], args[1], None)
            return _gate_bytes(args[0], args[2]) + _bytes(args[1]) + _bytes(args[2])
        if op is _LSTM_BACKWARD:
            self._primitive("lstm backward", args[0], args[1], None)
            # Not more than this: parts of it are taken in turn.
            inputs = _bytes(args[0]) * 3 // 2
            return 2 * _gate_bytes(args[0], args[2]) + inputs + _bytes(args[1]) + _bytes(args[2])
        return 0

    def workspace(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """See `Kernels`. oneDNN's LSTM keeps its gates, and its cells with the one before the first."""
        if op is not _LSTM:
            return None
        gates = _gate_bytes(args[0], args[2])
        length = args[0].size(0)
        return result[3], gates + gates // 4 * (length + 1) // length

    def _product(self, left: Tensor, right: Tensor) -> None:
        if left.dtype in _HALF:
            self._first = PRIMITIVE_BYTES["first"]
            self._primitive("product", left, right, None)
        elif left.dtype == torch.float32 and left.dim() == 2:
            self._packed.take(left.size(0), left.size(1), right.size(1))

    def _primitive(self, name: str, left: Tensor, right: Tensor, more: Any) -> None:
        tensors = tuple((tuple(t.shape), _is_turned(t), t.dtype) for t in (left, right))
        key = name, tensors, str(more)
        backward = name.endswith("backward") or _node() is not None
        kept = self._backward if backward and key not in self._forward else self._forward
        kept[key] = PRIMITIVE_BYTES[name]


class _Packed:
    """MKL's buffers for a product of `[m, k]` and `[k, n]`: of each thread, the columns of a slice of k
    and some rows. They are kept, and used again where they are large enough."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._largest = _WARM_PACKED_BYTES
        self._taken = 0

    @property
    def kept_bytes(self) -> int:
        """What they have come to."""
        return round(self._taken * _PACKED_FACTOR)

    def take(self, m: int, k: int, n: int) -> None:
        depth = k if k <= _PACKED_DEPTH else -(-k // 2) if k < 2 * _PACKED_DEPTH else _PACKED_DEPTH
        rows = min(-(-m // self._num_threads) + 16, _PACKED_ROWS)
        columns = min(n * depth * 4, _PACKED_COLUMNS_BYTES)
        need = self._num_threads * (columns + rows * depth * 4)
        if need > self._largest:
            self._largest = need
            self._taken += need


def kernels_on(kind: str) -> Kernels:
    """The kernels of a kind of device."""
    return CpuKernels(torch.get_num_threads()) if kind == "cpu" else NoKernels()


def _convolution(image: Tensor, weight: Tensor, result: Tensor) -> int:
    """Image and weight are copied into blocks, and the result is computed into blocks; then the copies
    are gone, and the result is copied out, whose pages nobody had touched before."""
    blocked = _blocked_bytes(result)
    computing = _read_bytes(image) + _bytes(weight) + blocked - _bytes(result)
    return max(computing, blocked, 0)


def _convolution_backward(gradient: Tensor, image: Tensor, weight: Tensor, strided: bool) -> int:
    """The gradient of the weight takes most: image and gradient in blocks, and in half precision a sum
    in float32. With a stride the larger one stands there twice."""
    pair = _blocked_bytes(gradient) + _read_bytes(image)
    if strided:
        larger = image if image.numel() > gradient.numel() else gradient
        pair = _read_bytes(image) + _blocked_bytes(larger)
    sums = weight.numel() * 4 if weight.dtype in _HALF else 0
    return max(pair + sums, _bytes(weight))


def _casts(args: tuple[Any, ...], result: Tensor) -> int:
    """Copies of the operands that do not have the common dtype; scalars are converted on the way."""
    operands = [a for a in args if isinstance(a, Tensor) and a.dim() and a.dtype != torch.bool]
    common = result.dtype
    for operand in operands:
        common = torch.promote_types(common, operand.dtype)
    return sum(a.numel() * common.itemsize for a in operands if a.dtype != common)


def _attention_bytes(query: Tensor, key: Tensor) -> int:
    """One thread's piece of the scores, in float32, with its maxima, sums and results. Queries
    `[batch, heads, length, width]` are taken in pieces that grow with their number, keys by 512."""
    length, width = query.size(-2), query.size(-1)
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return 4 * rows * (min(512, key.size(-2)) + 2 + width)


def _gate_bytes(inputs: Tensor, recurrent: Tensor) -> int:
    """The four gates of an LSTM over a sequence `[length, batch, width]`."""
    return inputs.size(0) * inputs.size(1) * recurrent.size(0) * inputs.element_size()


def _read_bytes(image: Tensor) -> int:
    """An image of one to four channels is read as it is."""
    return 0 if image.size(1) <= 4 else _blocked_bytes(image)


def _blocked_bytes(tensor: Tensor) -> int:
    """In blocks of channels, the last one padded."""
    channels = tensor.size(1)
    padded = -(-channels // BLOCK) * BLOCK
    return tensor.numel() // channels * padded * tensor.element_size()


def _is_turned(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and tensor.stride(-1) != 1


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
