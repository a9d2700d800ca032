"""Copies that convolutions and pooling make on CUDA because of the layout of their images.

cuDNN computes with the channels last if those of the image or of the weight are, and torch copies what
is laid out otherwise: gradients and, at each use, weights (`cudnn_convolution` and its backward in
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

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


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
    last = any(map(_is_channels_last, tensors[-2:]))
    layout = _LAST[tensors[0].dim()] if last else torch.contiguous_format
    return [0 if t.is_contiguous(memory_format=layout) else _num_bytes(t) for t in tensors]


def _num_bytes(tensor: Tensor) -> int:
    """Of a copy; the tensor itself may be a part of a larger one, or of less where it is expanded."""
    return tensor.numel() * tensor.element_size()


def _is_channels_last(tensor: Tensor) -> bool:
    layout = _LAST.get(tensor.dim())
    return (
        layout is not None
        and tensor.is_contiguous(memory_format=layout)
        and not tensor.is_contiguous()
    )
