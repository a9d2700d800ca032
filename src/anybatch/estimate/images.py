"""Images: what operations on them copy, since their kernels compute in a layout of their own.

oneDNN computes convolutions on blocks of channels, into which images are copied and out of which
results are, unless their channels lie last; then only what lies otherwise is copied. The rules for CPUs
were found by running single operations, as those in `kernels`.

cuDNN computes with the channels last if those of the image or of the weight lie so, and torch copies
what does not: gradients and, at each use, weights (`cudnn_convolution` and its backward in
`aten/src/ATen/native/cudnn/ConvShared.cpp`; pooling in `cuda/DilatedMaxPool2d.cu`). By the source, not
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten
CONVOLUTION: Any = _aten.convolution.default
CONVOLUTION_BACKWARD: Any = _aten.convolution_backward.default
_POOL_BACKWARD = _aten.max_pool2d_with_indices_backward.default
IMAGES: frozenset[Any] = frozenset((CONVOLUTION, CONVOLUTION_BACKWARD, _POOL_BACKWARD))
"""The operations."""

BLOCK = 16
"""Channels per block of oneDNN's layouts, with 512-bit vectors."""

_HALF = (torch.bfloat16, torch.float16)
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def copies_on_cpu(op: Any, args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    """Bytes of each tensor that `op` copies into another layout, or out of it. Each of the two
    gradients of a convolution has copies for itself; with a stride, that of the image takes as long as
    two more (measured, 1 x 1 and 3 x 3). The weight is brought into blocks every time, and its gradient
    out of them."""
    if op is CONVOLUTION:
        image, weight = args[:2]
        if _by_channels_last(image, weight):
            return weight.nbytes, *(() if _is_channels_last(image) else (image.nbytes,))
        return weight.nbytes, _read_bytes(image), _blocked_bytes(result)
    if op is CONVOLUTION_BACKWARD:
        gradient, image, weight = args[:3]
        weights = (weight.nbytes,) * sum(args[10][:2])
        if _by_channels_last(image, weight):
            images = (t.nbytes for t in (gradient, image) if not _is_channels_last(t))
            return *weights, *images
        pair = _blocked_bytes(gradient), _read_bytes(image)
        more = (pair[1],) * 2 if args[10][0] and max(args[4]) > 1 else ()
        turned = (gradient.nbytes,) if _is_channels_last(gradient) else ()
        return weights + pair * sum(args[10][:2]) + more + turned
    if op is _POOL_BACKWARD:
        gradient, image, indices = args[0], args[1], args[-1]
        if _is_channels_last(gradient) != _is_channels_last(image):
            return indices.nbytes, image.nbytes
    return ()


def scratch_on_cpu(op: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that `op`, one of `IMAGES`, takes and gives back while it runs."""
    if op is CONVOLUTION:
        return _convolution(args[0], args[1], result)
    if op is CONVOLUTION_BACKWARD:
        return _convolution_backward(args[0], args[1], args[2], strided=max(args[4]) > 1)
    return sum(copies_on_cpu(op, args, result))


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


def _convolution(image: Tensor, weight: Tensor, result: Tensor) -> int:
    """Image and weight are copied into blocks, and the result is computed into blocks; then the copies
    are gone, and the result is copied out, whose pages nobody had touched before. With the channels
    last there are no blocks of images."""
    if _by_channels_last(image, weight):
        return weight.nbytes + (0 if _is_channels_last(image) else image.nbytes)
    blocked = _blocked_bytes(result)
    computing = _read_bytes(image) + weight.nbytes + blocked - result.nbytes
    return max(computing, blocked, 0)


def _convolution_backward(gradient: Tensor, image: Tensor, weight: Tensor, strided: bool) -> int:
    """The gradient of the weight takes most: image and gradient in blocks, and in half precision a sum
    in float32. With a stride the larger one stands there twice. With the channels last, only what is
    not laid out so is copied, and the gradient of the weight stands there twice."""
    if _by_channels_last(image, weight):
        turned = sum(t.nbytes for t in (gradient, image) if not _is_channels_last(t))
        return turned + 2 * weight.nbytes
    sums = weight.numel() * 4 if weight.dtype in _HALF else 0
    pair = _blocked_bytes(gradient) + _read_bytes(image)
    if strided:
        larger = image if image.numel() > gradient.numel() else gradient
        pair = _read_bytes(image) + _blocked_bytes(larger)
    turned = gradient.nbytes if _is_channels_last(gradient) else 0
    return max(pair + turned + sums, weight.nbytes)


def _by_channels_last(image: Tensor, weight: Tensor) -> bool:
    """Whether a convolution takes and makes images whose channels lie last: if either one's do."""
    return _is_channels_last(image) or _is_channels_last(weight)


def _is_channels_last(tensor: Tensor) -> bool:
    layout = _LAST.get(tensor.dim())
    return (
        layout is not None
        and tensor.is_contiguous(memory_format=layout)
        and not tensor.is_contiguous()
    )


def _read_bytes(image: Tensor) -> int:
    """An image of one to four channels is read as it is."""
    return 0 if image.size(1) <= 4 else _blocked_bytes(image)


def _blocked_bytes(tensor: Tensor) -> int:
    """In blocks of channels, the last one padded."""
    channels = tensor.size(1)
    padded = -(-channels // BLOCK) * BLOCK
    return tensor.numel() // channels * padded * tensor.element_size()
