"""Kernels: the memory that operations take beside their arguments and results.

A trace sees arguments and results only. What a kernel takes beside them, for as long as it runs or for
good, stands here, by rule. The rules for CPUs were found by running single operations in fresh
processes and reading the kernel's own peak (`benchmarks/memory/README.md` tells how, and how near they
come). Three libraries matter:

- oneDNN computes convolutions on layouts of its own, so tensors are copied into them and back, unless
  their channels lie last; keeps what it generated for each shape; and gives LSTM a workspace for
  backward that torch's shapes do not tell.
- MKL packs the matrices of a product into buffers and keeps them (`products`). (The engine has it free
  them before a baseline is taken, so that a run begins with none.)
- torch's own element-wise kernels first copy an operand whose dtype is not the common one.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from anybatch.errors import InputError
from anybatch.estimate.images import (
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    IMAGES,
    Convolved,
    scratch_on_cpu,
)
from anybatch.estimate.products import Product, Products
from anybatch.processor import Processor, this_processor

_aten: Any = torch.ops.aten
_node: Any = torch._C._current_autograd_node
_LSTM = _aten.mkldnn_rnn_layer.default
_LSTM_BACKWARD = _aten.mkldnn_rnn_layer_backward.default
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SAFE_SOFTMAX = _aten._safe_softmax.default
CTC_BACKWARD = (_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor)
_READ = {  # operation -> which of its arguments it reads as contiguous
    _aten.native_layer_norm.default: (0,),
    _aten.native_layer_norm_backward.default: (0, 1),
    _aten.native_group_norm.default: (0,),
    _aten.native_group_norm_backward.default: (0, 1),
    _aten._softmax.default: (0,),
    _aten._softmax_backward_data.default: (0, 1),
    _aten._log_softmax.default: (0,),
    _aten._log_softmax_backward_data.default: (0, 1),
}
_MEANS = (_aten.mean.dim, _aten.mean.default)
_PRODUCTS = {  # operation -> where its two matrices are among its arguments
    **dict.fromkeys((_aten.mm.default, _aten.mm.out, _aten.bmm.default, _aten.bmm.out), 0),
    **dict.fromkeys((_aten.addmm.default, _aten.addmm.out, _aten.addmm_.default), 1),
    **dict.fromkeys((_aten.baddbmm.default, _aten.baddbmm.out, _aten.baddbmm_.default), 1),
}
_PROMOTING = {
    packet.Tensor for packet in (_aten.add, _aten.sub, _aten.mul, _aten.div, _aten.add_, _aten.mul_)
} | {_aten.where.self}
_HALF = (torch.bfloat16, torch.float16)

PRIMITIVE_BYTES: dict[str, int] = {
    "product": 590 << 10,
    "first in half": 80 << 10,
    "convolution": 85 << 10,
    "convolution transposed": 210 << 10,
    "convolution backward": 65 << 10,
    "convolution backward strided": 111 << 10,
    "convolution backward transposed": 125 << 10,
    "own products": 3600 << 10,
    "first lstm in half": 300 << 10,
    "lstm": 300 << 10,
    "lstm backward": 200 << 10,
    "attention product": 600 << 10,
}
"""What oneDNN keeps in the heap, and as generated code, for each shape that it computed with once:
by resident memory before and after the first call, over 2 to 20 shapes each (oneDNN 3.12, AVX-512).
`first in half` comes with the first product of half precision, `own products` is the code of oneDNN's
products in float32, with the first LSTM; an attention's products are those of its backward in half
precision. Convolutions are means, to within 30 KiB, over those of VGG16, ResNets and U-Nets; their
backward counts for each of its two gradients."""

_TILED_BYTES = {
    "convolution": 137 << 10,
    "convolution transposed": 103 << 10,
    "convolution backward": 160 << 10,
    "convolution backward strided": 92 << 10,
    "convolution backward transposed": 162 << 10,
    "first in half": 600 << 10,
    "first lstm in half": 450 << 10,
}
"""The same in bfloat16 on a processor with tiles (AMX), where they are others: means over 3 to 14
shapes, within 80 KiB but for few."""

_NARROW_BYTES = {
    "convolution": 92 << 10,
    "convolution transposed": 170 << 10,
    "convolution backward": 69 << 10,
    "convolution backward strided": 118 << 10,
    "convolution backward transposed": 104 << 10,
    "convolution backward by product": 28 << 10,
    "own products": 1990 << 10,
    "lstm": 140 << 10,
    "lstm backward": 120 << 10,
}
"""The same in float32 on a processor with vectors of 256 bits (AVX2): means over 4 to 8 shapes."""

_KEYS = 512
"""That a thread of attention takes at a time."""

_LEAST_PRODUCT = 16**3
"""Half-precision products of up to so many multiplications are not oneDNN's."""


@dataclass(frozen=True, slots=True)
class ShapeBytes:
    """What is kept for the shapes of one size of batch: of forward, and of backward beside it."""

    forward: int = 0
    backward: int = 0


class Scratch(int):
    """Bytes that follow from sizes by a rule, so that what lies between two of them can be told
    though it does not lie on a line.

    Attributes:
        rule: makes the bytes of the sizes.
        sizes: whole numbers.
    """

    rule: Callable[..., int]
    sizes: tuple[int, ...]

    def __new__(cls, rule: Callable[..., int], *sizes: int) -> Scratch:
        """`rule(*sizes)`."""
        made = super().__new__(cls, rule(*sizes))
        made.rule, made.sizes = rule, sizes
        return made

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """A copy, and what is stored, is the number alone."""
        return int, (int(self),)

    def between(self, other: int, part: float) -> int:
        """Bytes for sizes that lie between these (0) and those of `other` (1), or beyond them, at
        `part`."""
        if isinstance(other, Scratch) and (self.rule, len(self.sizes)) == (
            other.rule,
            len(other.sizes),
        ):
            sizes = [
                round(a + (b - a) * part) for a, b in zip(self.sizes, other.sizes, strict=True)
            ]
            return self.rule(*sizes)
        return max(0, round(self + (other - self) * part))


class Kernels(ABC):
    """What the kernels of one kind of device take. One object sees one trace."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay with the process once all operations seen so far have run, whatever their
        shapes, beside those for `products`."""
        return 0

    @property
    def products(self) -> Products:
        """The products that were seen, as far as buffers for them are kept."""
        return Products()

    @property
    def shape_bytes(self) -> ShapeBytes:
        """Bytes that stay for the shapes seen so far, and again for those of every other batch size."""
        return ShapeBytes()

    @abstractmethod
    def scratch(self, op: Any, args: tuple[Any, ...], result: Any) -> int:
        """Bytes that `op` takes and gives back while it runs; a `Scratch` where they are not in
        proportion to the batch."""

    def copies(self, op: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Bytes of each copy of an argument that `op` makes before its result, and gives back after it,
        beside its scratch."""
        return ()

    def workspace(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """A result whose shape does not tell its bytes, and those."""
        return None


class CpuKernels(Kernels):
    """oneDNN, MKL, and torch's own on a CPU with so many threads and these instructions; for
    `packed_depth` see `mkl`."""

    def __init__(
        self, num_threads: int, packed_depth: int = 192, processor: Processor | None = None
    ) -> None:
        self._num_threads = num_threads
        self._processor = processor or Processor()
        self._forward: dict[Hashable, int] = {}
        self._backward: dict[Hashable, int] = {}
        self._first: dict[str, int] = {}
        self._attended: dict[Hashable, int] = {}
        self._packed_depth = packed_depth
        self._products: list[Product] = []
        self._scores_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """See `Kernels`."""
        return sum((*self._first.values(), *self._attended.values())) + self._scores_bytes

    @property
    def products(self) -> Products:
        """See `Kernels`."""
        return Products(tuple(self._products), self._num_threads, self._packed_depth)

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
        if op is CONVOLUTION and self._processor.computes(args[0].dtype):
            name = "convolution transposed" if args[6] else "convolution"
            self._primitive(name, args[0], args[1], args[3])
        if op is CONVOLUTION_BACKWARD and self._processor.computes(args[0].dtype):
            self._convolution_backward(args)
        if op in IMAGES:
            return scratch_on_cpu(op, args, result, self._processor, self._num_threads)
        if op in _PROMOTING:
            return _casts(args, result)
        if op in _MEANS and args[0].dtype in _HALF:
            return args[0].numel() * 4  # summed in float32, from a copy in float32
        if op in _READ:
            tensors = [args[i] for i in _READ[op]]
            return sum(_bytes(t) for t in tensors if not t.is_contiguous())
        if op is _SAFE_SOFTMAX:
            return args[0].numel()  # which numbers are minus infinity
        if op in CTC_BACKWARD:
            return _bytes(args[6])  # paths again, from their ends
        if op is _ATTENTION:
            return self._attention(args[0], args[1])
        if op is _ATTENTION_BACKWARD:
            self._attention_backward(args[1], args[2])
            return 0
        if op is _LSTM:
            self._check_lstm(args[0].dtype)
            self._once("first lstm in half" if args[0].dtype in _HALF else "own products")
            self._primitive("lstm", args[0], args[1], None)
            return _lstm(args)
        if op is _LSTM_BACKWARD:
            self._primitive("lstm backward", args[0], args[1], None)
            return _lstm_backward(args)
        return 0

    def workspace(self, op: Any, args: tuple[Any, ...], result: Any) -> tuple[Tensor, int] | None:
        """See `Kernels`."""
        return (result[3], _lstm_workspace(args)) if op is _LSTM else None

    def _convolution_backward(self, args: tuple[Any, ...]) -> None:
        way = " transposed" if args[7] else " strided" if max(args[4]) > 1 else ""
        of_image, of_weight, _ = args[10]
        if of_image:
            self._primitive(f"convolution backward{way}", args[1], args[2], (args[4], "image"))
        if of_weight:
            if Convolved.backward(args).is_product(self._processor):
                self._once("own products")
                way = " by product"
            self._primitive(f"convolution backward{way}", args[1], args[2], (args[4], "weight"))

    def _check_lstm(self, dtype: torch.dtype) -> None:
        if not self._processor.computes(dtype):
            name = str(dtype).removeprefix("torch.")
            raise InputError(
                f"the model has an LSTM, which torch computes in {name} under autocast by oneDNN alone,"
                f" and oneDNN only on CPUs with instructions for {name}, of which this is none: use"
                " precision fp32."
            )

    def _product(self, left: Tensor, right: Tensor) -> None:
        if left.dtype in _HALF and self._processor.computes(left.dtype):
            if left.numel() * right.size(-1) > _LEAST_PRODUCT:
                self._once("first in half")
                self._primitive("product", left, right, None)
        elif left.dtype in (torch.float32, *_HALF):  # of many matrices each thread takes whole ones
            sizes = left.size(-2), left.size(-1), right.size(-1)
            self._products.append(Product(*sizes, _is_turned(right), left.dim() == 3))

    def _attention(self, query: Tensor, key: Tensor) -> int:
        rows, keys, width = _attention_block(query, key)
        if query.dtype in _HALF:
            packed = self._num_threads * _packed_scores(rows, keys, width)
            self._scores_bytes = max(self._scores_bytes, packed)
        else:
            self._products += _inner((rows, width, keys), (rows, keys, width))
        # One thread's piece of the scores, in float32, with its maxima, sums and results.
        return self._num_threads * 4 * rows * (keys + 2 + width)

    def _attention_backward(self, query: Tensor, key: Tensor) -> None:
        rows, keys, width = _attention_block(query, key)
        if query.dtype in _HALF and self._processor.computes(query.dtype):
            # Three products for each pair of sizes that pieces of queries and keys have.
            pairs = product(_pieces(query.size(-2), rows), _pieces(key.size(-2), keys))
            num_pairs = sum(
                min(m, n, width) > 1 and m * n * width > _LEAST_PRODUCT for m, n in pairs
            )
            # Threads that meet a shape at the same moment make its kernel twice, and keep both.
            twice = -(-num_pairs // 2) if self._num_threads > 1 else 0
            size = (3 * num_pairs + twice) * PRIMITIVE_BYTES["attention product"]
            self._attended[query.size(-2), key.size(-2), width, query.dtype] = size
        else:
            self._products += _inner((rows, width, keys), (keys, rows, width), (rows, keys, width))

    def _once(self, name: str) -> None:
        self._first[name] = self._primitive_bytes(name, "half" in name)

    def _primitive(self, name: str, left: Tensor, right: Tensor, more: Any) -> None:
        tensors = tuple((tuple(t.shape), _is_turned(t), t.dtype) for t in (left, right))
        key = name, tensors, str(more)
        backward = "backward" in name or _node() is not None
        kept = self._backward if backward and key not in self._forward else self._forward
        is_tiled = left.dtype is torch.bfloat16 and self._processor.tiles
        more = _of_tiles(left, right) if is_tiled and name == "product" else 0
        kept[key] = self._primitive_bytes(name, left.dtype is torch.bfloat16) + more

    def _primitive_bytes(self, name: str, is_half: bool) -> int:
        others = _TILED_BYTES if is_half and self._processor.tiles else {}
        if not is_half and self._processor.vector_bytes < 64:
            others = _NARROW_BYTES
        return (others if name in others else PRIMITIVE_BYTES)[name]


def made_for_sizes(precision: str) -> bool:
    """Whether products of that precision are by kernels that are made for their sizes."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision.partition("-")[0])
    return dtype is not None and this_processor().computes(dtype)


def _casts(args: tuple[Any, ...], result: Tensor) -> int:
    """Copies of the operands that do not have the common dtype; scalars are converted on the way."""
    operands = [a for a in args if isinstance(a, Tensor) and a.dim() and a.dtype != torch.bool]
    common = result.dtype
    for operand in operands:
        common = _common(common, operand.dtype)
    return sum(a.numel() * common.itemsize for a in operands if a.dtype != common)


@functools.cache  # while a step is traced, torch's takes 0.3 ms: it goes through the tracer
def _common(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return torch.promote_types(one, other)


def _attention_block(query: Tensor, key: Tensor) -> tuple[int, int, int]:
    """What one thread multiplies at a time: queries `[batch, heads, length, width]` in pieces that grow
    with their number, keys by 512; and the width."""
    length, width = query.size(-2), query.size(-1)
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(_KEYS, key.size(-2)), width


def _inner(*sizes: tuple[int, int, int]) -> Iterator[Product]:
    """Attention's products, each by one thread."""
    return (Product(*each, is_whole=True, is_inner=True) for each in sizes)


def _pieces(length: int, size: int) -> set[int]:
    """The sizes of its pieces."""
    return {size, length % size or size}


def _packed_scores(rows: int, keys: int, width: int) -> int:
    """What MKL keeps of one thread's products of half precision with results in float32: fitted to
    resident memory over 35 shapes, to within 100 KiB."""
    long = (160 << 10) + 1024 * keys if rows > 64 else 0
    return (60 << 10) + 9 * keys * width + long


def _gate_bytes(inputs: Tensor, recurrent: Tensor) -> int:
    """The four gates of an LSTM over a sequence `[length, batch, width]`."""
    return inputs.size(0) * inputs.size(1) * recurrent.size(0) * inputs.element_size()


def _states_bytes(inputs: Tensor, recurrent: Tensor, item_bytes: int) -> int:
    """What an LSTM reads or writes over a sequence, and the state before it, as oneDNN lays it out:
    rows of whole cache lines, but not of a multiple of 256 numbers (`get_good_ld` in its sources; over
    eight shapes within 2% of what was measured)."""
    length, num_sequences, width = inputs.shape
    line = 64 // item_bytes
    row = -(-max(width, recurrent.size(1)) // line) * line
    row += line if row % 256 == 0 else 0
    return (length + 1) * num_sequences * row * item_bytes


def lstm_bytes(op: Any, args: tuple[Any, ...]) -> int:
    """Bytes that `op`, if it is an LSTM on a CPU or its backward, takes beside its results and those of
    its inputs: what it keeps for backward, and what it takes and gives back."""
    if op is _LSTM:
        return _lstm_workspace(args) + _lstm(args)
    return _lstm_backward(args) if op is _LSTM_BACKWARD else 0


def _lstm_workspace(args: tuple[Any, ...]) -> int:
    """oneDNN's LSTM keeps its gates, and its cells with the one before the first; one that goes from
    the end to the beginning its inputs and outputs, too, in that order."""
    gates = _gate_bytes(args[0], args[2])
    length = args[0].size(0)
    turned = 2 * _states_bytes(args[0], args[2], args[0].element_size()) if args[7] else 0
    return gates + gates // 4 * (length + 1) // length + turned


def _lstm(args: tuple[Any, ...]) -> int:
    """Gates, and both weights."""
    return _gate_bytes(args[0], args[2]) + _bytes(args[1]) + _bytes(args[2])


def _lstm_backward(args: tuple[Any, ...]) -> int:
    """Gates, with cells in float32; three times the states in float32, whose gradients go up, back and
    out; gradients of weights in float32, and once more in the dtype of the weights. By peaks of a layer
    alone, of seventeen shapes of width 13 to 600: within 2%, two smaller than 5 MiB within 4%. A
    gradient that is a part of each row, where directions were put side by side, is copied."""
    inputs, weight, recurrent = args[:3]
    gates = _gate_bytes(inputs, recurrent)
    is_half = inputs.dtype in _HALF
    states = 3 * _states_bytes(inputs, recurrent, 4)
    weights = (6 if is_half else 8) * (weight.numel() + recurrent.numel())
    given = args[10]
    copied = 0 if given is None or given.is_contiguous() else _bytes(given)
    return (gates if is_half else gates * 5 // 4) + states + weights + copied


def _of_tiles(left: Tensor, right: Tensor) -> int:
    """What the kernels of a product keep where its matrices come as tiles, beside those of others.
    There are more where a side is no whole number of tiles, and for the slices of a deep one.

    By 950 random shapes of 16 to 3,072 rows, deep and wide: right within 0.1 MiB in the mean, and
    within 0.03 where all sides are whole tiles; single ones differ by 0.25 to 0.4 MiB where they
    are not.
    """
    rows, depth, columns = left.size(-2), left.size(-1), right.size(-1)
    odd_rows, odd_columns, odd_depth = rows % 32 > 0, columns % 32 > 0, depth % 64 > 0
    is_deep, is_wide = depth >= 512, columns >= 512
    if _is_turned(left):
        kib = odd_depth * (200 + 220 * odd_rows + 180 * odd_columns) + 80 * (is_deep and is_wide)
        return kib << 10
    kib = odd_columns * (200 if is_deep else 60) * (2 if odd_rows and rows >= 384 else 1)
    if rows < 384:
        few = is_deep and not _is_turned(right)  # the right one is copied tile by tile
        return (kib + few * (350 if is_wide else 80)) << 10
    parts = is_deep + is_wide + (min(depth, columns) >= 768)
    if depth >= 2000 and columns >= 256:
        parts = max(parts, 2) + 5
        kib += 560 if odd_depth or depth >= 8192 else 0
    return (kib + 70 * parts + 130 * odd_rows) << 10


def _is_turned(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and tensor.stride(-1) != 1


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
