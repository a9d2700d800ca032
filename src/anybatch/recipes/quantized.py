"""Frozen linear layers with weights of 8 or 4 bits, as the base of trained adapters.

Dettmers et al. 2023, "QLoRA", section 3: the weights of a base model are stored in few bits and
dequantized to floating point for the matrix product, one layer at a time, in forward and again in
backward. The formats are torchao's: `int8` has a scale for each row; `nf4` has 16 levels at quantiles
of the normal distribution, a scale for each 64 weights, and scales of scales.

The tensors that a quantized weight consists of are plain parameters here, so they are planned, placed,
sharded, checksummed and saved like any frozen parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.errors import InputError

Base: TypeAlias = Literal["int8", "nf4"]
"""Format of the frozen weights."""

_BLOCK, _SCALES = 64, 256  # weights that share a scale, and scales that share a scale, in nf4
_LEAST_BLOCK = 16  # in smaller blocks, the scales would take too much of the memory


class QuantizedLinear(nn.Module):
    """A linear layer, `[*, in]` to `[*, out]`, with a quantized weight. Only the input gets a gradient.

    Args:
        weight: `[out, in]`, a quantized tensor of torchao.
        bias: `[out]`, or None.
        was_transposed: whether the layer was a `Conv1D` of transformers, whose weight is `[in, out]`.
    """

    def __init__(self, weight: Any, bias: Tensor | None, was_transposed: bool = False) -> None:
        super().__init__()
        self.out_features: int = weight.shape[0]
        self.in_features: int = weight.shape[1]
        self.was_transposed = was_transposed
        self._kind: Any = type(weight)
        self._dtype: torch.dtype = weight.dtype
        self._names, self._context = weight.__tensor_flatten__()
        for name in self._names:
            self.register_parameter(name, _frozen(getattr(weight, name)))
        self.register_parameter("bias", None if bias is None else _frozen(bias))

    def plain(self) -> nn.Module:
        """Returns a plain layer of the original type, with the dequantized weight."""
        weight = self.dequantized(self._parts(), self._dtype)
        layer: Any
        if self.was_transposed:
            layer = import_module("transformers.pytorch_utils").Conv1D(1, 1)
            layer.nf, layer.nx = weight.shape
            weight = weight.T.contiguous()
        else:
            layer = nn.Linear(self.in_features, self.out_features, device="meta")
        layer.weight, layer.bias = _frozen(weight), self.bias
        return layer

    def forward(self, inputs: Tensor) -> Tensor:
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        product: Any = _Product.apply
        return product(inputs, bias, self.dequantized, *self._parts())

    def dequantized(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Returns the weight `[out, in]` that consists of `parts`, in `dtype`."""
        size = torch.Size((self.out_features, self.in_features))
        named = dict(zip(self._names, parts, strict=True))
        weight = self._kind.__tensor_unflatten__(named, self._context, size, (size[1], 1))
        if self._kind.__name__ != "Int8Tensor":
            return weight.to(dtype)
        wide = dtype == torch.float64  # for which torchao has no kernel
        return weight.dequantize(torch.float32 if wide else dtype).to(dtype)

    def extra_repr(self) -> str:
        kind = self._kind.__name__
        return f"in_features={self.in_features}, out_features={self.out_features}, weight={kind}"

    def _parts(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self._names)


def quantize_frozen(model: nn.Module, base: Base) -> nn.Module:
    """Quantizes each linear layer with a frozen weight to the format `base`, in place, and returns
    `model`. Layers that stay as they are: the head, which the loss uses, and layers whose weight cannot
    be divided into blocks of 16 or more.

    Raises `InputError` if torchao is not installed.
    """
    quantized = _quantizer(base)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    heads = (head, getattr(head, "base_layer", None))
    for parent, name in _frozen_linear(model):
        layer: Any = getattr(parent, name)
        was_transposed = not isinstance(layer, nn.Linear)
        weight = layer.weight.T.contiguous() if was_transposed else layer.weight
        if layer not in heads and _block_of(weight) >= _LEAST_BLOCK:
            setattr(parent, name, QuantizedLinear(quantized(weight), layer.bias, was_transposed))
    for param in model.parameters():
        # Weights are often memory-mapped from one file, which stays in memory until all are freed.
        param.data = param.data.clone()
    return model


def dequantize(model: nn.Module) -> nn.Module:
    """Replaces the layers of `quantize_frozen` by plain ones with dequantized weights, in place, and
    returns `model`."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, QuantizedLinear):
                setattr(parent, name, layer.plain())
    return model


def num_weights(model: nn.Module) -> int:
    """Returns the number of parameters of `model`, with quantized weights in their original shape."""
    total = sum(param.numel() for param in model.parameters())
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            held = sum(param.numel() for name, param in layer.named_parameters() if name != "bias")
            total += layer.in_features * layer.out_features - held
    return total


def _quantizer(base: Base) -> Callable[[Tensor], Tensor]:
    try:
        formats: Any = import_module("torchao.quantization")
        per_row = import_module("torchao.quantization.granularity").PerRow()
    except ImportError:
        raise InputError(
            f"base is {base!r}, a format of torchao, which is not installed: pip install torchao"
        ) from None
    if base == "int8":
        return lambda weight: formats.Int8Tensor.from_hp(weight.detach(), per_row)

    def to_nf4(weight: Tensor) -> Tensor:
        block = _block_of(weight)
        scales = math.gcd(weight.numel() // block, _SCALES)
        return formats.NF4Tensor.from_tensor(weight.detach(), block, scales)

    return to_nf4


def _block_of(weight: Tensor) -> int:
    """Returns the number of weights in a row that share a scale."""
    return math.gcd(weight.shape[1], _BLOCK)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _frozen_linear(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Parents and names of the layers. A list of the layers would keep all of them alive until the last
    one is replaced."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if (type(layer) is nn.Linear or type(layer).__name__ == "Conv1D")
        and not layer.get_parameter("weight").requires_grad
    ]


class _Product(torch.autograd.Function):
    """`inputs @ weight.T + bias`; saves the tensors of the quantized weight for backward. torchao's own
    product with an `Int8Tensor` would save the dequantized weight."""

    @staticmethod
    def forward(
        inputs: Tensor, bias: Tensor | None, dequantized: Callable[..., Tensor], *parts: Tensor
    ) -> Tensor:
        return F.linear(inputs, dequantized(parts, inputs.dtype), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        ctx.dequantized = inputs[2]
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight = ctx.dequantized(ctx.saved_tensors, gradient.dtype)
        return gradient @ weight, *[None] * (2 + len(ctx.saved_tensors))
