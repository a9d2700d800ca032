"""Images: what operations on them copy, since their kernels compute in a layout of their own.

oneDNN computes convolutions on blocks of channels, into which images are copied and out of which
results are, unless their channels lie last; then only what lies otherwise is copied. In half precision,
on CPUs without instructions for it, torch unfolds images instead, so that a convolution is a product:
each pixel stands there as often as the kernel meets it. The rules for CPUs were found by running single
operations, as those in `kernels`.

cuDNN computes with the channels last if those of the image or of the weight lie so, and torch copies
what does not: gradients and, at each use, weights (`cudnn_convolution` and its backward in
`aten/src/ATen/native/cudnn/ConvShared.cpp`; pooling in `cuda/DilatedMaxPool2d.cu`). By the source, not
measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybatch.processor import Processor

_aten: Any = torch.ops.aten
CONVOLUTION: Any = _aten.convolution.default
CONVOLUTION_BACKWARD: Any = _aten.convolution_backward.default
_POOL_BACKWARD = _aten.max_pool2d_with_indices_backward.default
IMAGES: frozenset[Any] = frozenset((CONVOLUTION, CONVOLUTION_BACKWARD, _POOL_BACKWARD))
"""The operations."""

_HALF = (torch.bfloat16, torch.float16)
_WIDE = 64  # bytes of the vectors of AVX-512
_MOST_WIDTH = 14  # of a kernel, from which on oneDNN computes a weight's gradient as a product
_MOST_PIXELS = 512  # of an image, for each thread, up to which it is one thread's
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def copies_on_cpu(
    op: Any, args: tuple[Any, ...], result: Any, processor: Processor
) -> tuple[int, ...]:
    """Bytes of each tensor that `op` copies into another layout, or out of it. Each of the two
    gradients of a convolution has copies for itself; with a stride, that of the image takes as long as
    two more (measured, 1 x 1 and 3 x 3). The weight is brought into blocks every time, and its gradient
    out of them."""
    if op is CONVOLUTION:
        image, weight = args[:2]
        if not processor.computes(image.dtype):
            convolved = Convolved.forward(args, result)
            return (convolved.image.size(0) * _unfolded_bytes(convolved),)
        if _by_channels_last(image, weight):
            return weight.nbytes, *(() if _lies_last(image) else (image.nbytes,))
        return weight.nbytes, _read_bytes(image, processor), _blocked_bytes(result, processor)
    if op is CONVOLUTION_BACKWARD:
        gradient, image, weight = args[:3]
        if not processor.computes(image.dtype):
            unfolded = image.size(0) * _unfolded_bytes(Convolved.backward(args))
            return (unfolded,) * sum(args[10][:2])
        weights = (weight.nbytes,) * sum(args[10][:2])
        if _by_channels_last(image, weight):
            images = (t.nbytes for t in (gradient, image) if not _lies_last(t))
            return *weights, *images
        pair = _blocked_bytes(gradient, processor), _read_bytes(image, processor)
        more = (pair[1],) * 2 if args[10][0] and max(args[4]) > 1 else ()
        turned = (gradient.nbytes,) if _is_channels_last(gradient) else ()
        return weights + pair * sum(args[10][:2]) + more + turned
    if op is _POOL_BACKWARD:
        gradient, image, indices = args[0], args[1], args[-1]
        if _is_channels_last(gradient) != _is_channels_last(image):
            return indices.nbytes, image.nbytes
    return ()


def scratch_on_cpu(
    op: Any, args: tuple[Any, ...], result: Any, processor: Processor, num_threads: int
) -> int:
    """Bytes that `op`, one of `IMAGES`, takes and gives back while it runs."""
    if op is CONVOLUTION:
        convolved = Convolved.forward(args, result)
        if not processor.computes(convolved.image.dtype):
            return _unfolding(convolved)
        return _convolution(convolved, processor)
    if op is CONVOLUTION_BACKWARD:
        convolved = Convolved.backward(args)
        if not processor.computes(convolved.image.dtype):
            return _unfolding_backward(convolved, num_threads)
        return _convolution_backward(convolved, processor, num_threads)
    return sum(copies_on_cpu(op, args, result, processor))


def copies_on_cuda(op: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Bytes of the copies that `op`, one of `IMAGES`, makes before its result on CUDA."""
    if op is _POOL_BACKWARD:
        return ()
    first = _copied_on_cuda(args[:2] if op is CONVOLUTION else args[:3])[0]
    return (first,) if first else ()


def scratch_on_cuda(op: Any, args: tuple[Any, ...]) -> int:
    """Bytes that it takes and gives back once the result is there."""
    if op is _POOL_BACKWARD:
        gradient, image = args[:2]
        return gradient.nbytes if _is_channels_last(gradient) != _is_channels_last(image) else 0
    if op is CONVOLUTION:
        return _copied_on_cuda(args[:2])[1]
    _, image, weight = _copied_on_cuda(args[:3])
    # The copy of the weight is gone when its gradient, which is as large, is made.
    return max(image, weight - (args[2].nbytes if args[10][1] else 0))


def _copied_on_cuda(tensors: Sequence[Tensor]) -> list[int]:
    """Bytes of a copy of each, where it is not laid out as the kernel computes: an image and a
    weight, last among the tensors, say how."""
    last = _by_channels_last(*tensors[-2:])
    layout = _LAST[tensors[0].dim()] if last else torch.contiguous_format
    return [0 if t.is_contiguous(memory_format=layout) else _num_bytes(t) for t in tensors]


def _num_bytes(tensor: Tensor) -> int:
    """Of a copy; the tensor itself may be a part of a larger one, or of less where it is expanded."""
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True, slots=True)
class Convolved:
    """One convolution, forward or backward.

    Attributes:
        image, weight: what it convolves, and with what.
        made: the result, or in backward its gradient.
        stride, padding, dilation: along each dim of the image.
        transposed, groups: as in torch.
    """

    image: Tensor
    weight: Tensor
    made: Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    groups: int

    @classmethod
    def forward(cls, args: tuple[Any, ...], result: Tensor) -> Convolved:
        """Of the arguments of `aten.convolution`."""
        image, weight, _, stride, padding, dilation, transposed, _, groups = args
        return cls(image, weight, result, stride, padding, dilation, transposed, groups)

    @classmethod
    def backward(cls, args: tuple[Any, ...]) -> Convolved:
        """Of the arguments of `aten.convolution_backward`."""
        made, image, weight, _, stride, padding, dilation, transposed, _, groups, _ = args
        return cls(image, weight, made, stride, padding, dilation, transposed, groups)

    @property
    def is_strided(self) -> bool:
        """Whether it skips pixels."""
        return max(self.stride) > 1

    def is_product(self, processor: Processor) -> bool:
        """Whether oneDNN computes the gradient of the weight as a product of unfolded images, as with
        vectors of 256 bits where its other kernels do not go (oneDNN 3.12, by what it printed of 19
        shapes)."""
        if processor.vector_bytes >= _WIDE or self.transposed or self.is_channels_last:
            return False
        sides, (*_, height, width) = self.kernel, (1, *self.kernel)
        given, made = (t.size(1) // self.groups for t in (self.image, self.made))
        is_beyond = len(sides) > 1 and height > self.image.size(-2)
        is_odd = self.groups > 1 and given * made > 1 and (given % 8 or made % 8) > 0
        is_padded_deep = len(sides) == 3 and self.padding[0] > 0
        is_all_padding = any(pad >= k for pad, k in zip(self.padding, sides, strict=False))
        return (
            is_beyond
            or is_odd
            or is_padded_deep
            or is_all_padding
            or width >= _MOST_WIDTH
            or max(self.dilation) > 1
        )

    @property
    def is_channels_last(self) -> bool:
        """Whether it takes and makes images whose channels lie last: if either one's do."""
        return _by_channels_last(self.image, self.weight)

    @property
    def kernel(self) -> tuple[int, ...]:
        """Its sides."""
        return tuple(self.weight.shape[2:])


def _convolution(convolved: Convolved, processor: Processor) -> int:
    """Image and weight are copied into blocks, and the result is computed into blocks; then the copies
    are gone, and the result is copied out, whose pages nobody had touched before. With the channels
    last there are no blocks of images, and what lies otherwise is copied. With vectors of 256 bits the
    blocks of a transposed one with stride stand there twice."""
    image, weight, result = convolved.image, convolved.weight, convolved.made
    is_narrow = processor.vector_bytes < _WIDE
    if convolved.is_channels_last:
        return weight.nbytes + sum(t.nbytes for t in (image, weight) if not _lies_last(t))
    blocked = _blocked_bytes(result, processor)
    computing = _read_bytes(image, processor) + weight.nbytes + blocked - result.nbytes
    twice = is_narrow and convolved.transposed and convolved.is_strided
    return max(computing, (1 + twice) * blocked, 0)


def _convolution_backward(convolved: Convolved, processor: Processor, num_threads: int) -> int:
    """The gradient of the weight takes most: image and gradient in blocks, and in half precision a sum
    in float32. With a stride the larger one stands there twice. With the channels last, only what is
    not laid out so is copied, and the gradient of the weight stands there twice."""
    image, weight, gradient = convolved.image, convolved.weight, convolved.made
    if convolved.is_channels_last:
        turned = sum(t.nbytes for t in (gradient, image, weight) if not _lies_last(t))
        return turned + 2 * weight.nbytes
    sums = weight.numel() * 4 if weight.dtype in _HALF else 0
    pair = _blocked_bytes(gradient, processor) + _read_bytes(image, processor)
    if convolved.is_strided:
        larger = image if image.numel() > gradient.numel() else gradient
        pair = _read_bytes(image, processor) + _blocked_bytes(larger, processor)
    turned = gradient.nbytes if _is_channels_last(gradient) else 0
    product = _product(convolved, num_threads) if convolved.is_product(processor) else 0
    return max(pair + turned + sums, weight.nbytes, product)


def _product(convolved: Convolved, num_threads: int) -> int:
    """The gradient of a weight by oneDNN's own product: of small images each thread unfolds one by
    itself and adds up a gradient of its own; else all threads unfold one. Deep ones go by slices."""
    pixels = math.prod(convolved.made.shape[2:][-2:])
    channels = convolved.image.size(1) // convolved.groups
    unfolded = channels * math.prod(convolved.kernel) * pixels * convolved.image.itemsize
    is_small = pixels < _MOST_PIXELS * num_threads and convolved.image.size(0) > 1
    if not is_small or num_threads == 1:
        return unfolded
    return num_threads * (unfolded + convolved.weight.nbytes)


def _unfolded_bytes(convolved: Convolved) -> int:
    """One sample, unfolded: for each number of the kernel what it is multiplied with; nothing where it
    is a product as it is. Groups go one after the other."""
    sides = convolved.kernel
    if max(sides) == max(convolved.stride) == 1 and not any(convolved.padding):
        return 0
    small, other = convolved.made, convolved.image
    if convolved.transposed:
        small, other = other, small
    channels, pixels = other.size(1) // convolved.groups, math.prod(small.shape[2:])
    return channels * math.prod(sides) * pixels * other.itemsize


def _num_unfolded(convolved: Convolved) -> int:
    """Samples that are unfolded at a time."""
    return 1 if max(convolved.dilation) > 1 else convolved.image.size(0)


def _unfolding(convolved: Convolved) -> int:
    """A transposed one takes a sample more in half precision. The results of groups stand there
    twice."""
    more = convolved.transposed and convolved.image.dtype in _HALF
    unfolded = (_num_unfolded(convolved) + more) * _unfolded_bytes(convolved)
    return unfolded + (convolved.groups > 1) * convolved.made.nbytes


def _unfolding_backward(convolved: Convolved, num_threads: int) -> int:
    """For the gradient of the weight images are unfolded again; for that of the image each thread has
    one sample (dilated ones go one by one), and of half precision its sums in float32 beside it. Deep
    images stay unfolded meanwhile. Gradients of groups stand there twice."""
    one, num = _unfolded_bytes(convolved), _num_unfolded(convolved)
    size, apart = convolved.image.itemsize, convolved.image.nbytes * (convolved.groups > 1)
    sums = 4 if convolved.image.dtype in _HALF else 0
    if convolved.transposed:
        return one + apart
    threads = min(num_threads, num)
    if len(convolved.kernel) == 3:
        return (num + threads) * one + apart
    return max(num * one, threads * one * (size + sums) // size) + apart


def _by_channels_last(image: Tensor, weight: Tensor) -> bool:
    """Whether a convolution takes and makes images whose channels lie last: if either one's do."""
    return _is_channels_last(image) or _is_channels_last(weight)


def _lies_last(tensor: Tensor) -> bool:
    """Whether its channels lie last; those of a weight of one pixel do in either layout."""
    return tensor.is_contiguous(memory_format=_LAST.get(tensor.dim(), torch.contiguous_format))


def _is_channels_last(tensor: Tensor) -> bool:
    layout = _LAST.get(tensor.dim())
    return (
        layout is not None
        and tensor.is_contiguous(memory_format=layout)
        and not tensor.is_contiguous()
    )


def _read_bytes(image: Tensor, processor: Processor) -> int:
    """An image of one to four channels is read as it is."""
    return 0 if image.size(1) <= 4 else _blocked_bytes(image, processor)


def _blocked_bytes(tensor: Tensor, processor: Processor) -> int:
    """In blocks of as many channels as a vector holds numbers in float32, the last one padded."""
    channels, block = tensor.size(1), processor.vector_bytes // 4
    padded = -(-channels // block) * block
    return tensor.numel() // channels * padded * tensor.element_size()
