"""Frozen linear layers with weights of 8 or 4 bits, as the base of trained adapters.

Dettmers et al. 2023, "QLoRA", section 3: the weights of a base model are stored in few bits and
dequantized to floating point for the matrix product, one layer at a time. The inference kernels of
torchao and torch have no backward pass, so the weight is dequantized in forward and again in backward.

Quantized weights are plain integer parameters, so they are planned, placed, sharded, checksummed and
saved like any frozen parameter.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Base: TypeAlias = Literal["int8", "int4"]
"""Format of the frozen weights."""

BITS: dict[Base, int] = {"int8": 8, "int4": 4}

GROUP = 64
"""Maximum number of input features that share a scale and an offset."""

_LEAST_GROUP = 16  # in smaller groups, scales and offsets would take as much memory as the weights


class QuantizedLinear(nn.Module):
    """A linear layer, `[*, in]` to `[*, out]`, whose weight is `q * scale + offset` for integers `q` of
    `bits` bits. Only the input gets a gradient.

    Args:
        weight: `[out, in]`, floating point.
        bias: `[out]`, or None.
        bits: 8 or 4.
        was_transposed: whether the layer was a `Conv1D` of transformers, whose weight is `[in, out]`.

    Attributes:
        weight: int8 `[out, in * bits / 8]`; with 4 bits, even columns are in the lower halves of the
            bytes.
        scale, offset: `[out, in / group]`, in the dtype of the original weight.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, bits: int, was_transposed: bool = False
    ) -> None:
        super().__init__()
        self.out_features: int = weight.shape[0]
        self.in_features: int = weight.shape[1]
        self.bits = bits
        self.was_transposed = was_transposed
        groups = weight.detach().unflatten(1, (-1, group_of(self.in_features))).float()
        least, largest = groups.aminmax(dim=2)
        # Minimum scale, for groups of equal weights: positive, and subnormal in float16.
        kind = torch.finfo(weight.dtype)
        tiny = max(kind.tiny * kind.eps, torch.finfo(torch.float32).tiny)
        scale = ((largest - least) / (2**bits - 1)).clamp(min=tiny).to(weight.dtype)
        offset = (least + 2 ** (bits - 1) * scale).to(weight.dtype)
        q = (groups - offset[..., None].float()) / scale[..., None].float()
        q = q.round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8).flatten(1)
        if bits == 4:
            q = (q[:, ::2] & 15) | (q[:, 1::2] << 4)
        self.weight: nn.Parameter = nn.Parameter(q, requires_grad=False)
        self.scale: nn.Parameter = nn.Parameter(scale, requires_grad=False)
        self.offset: nn.Parameter = nn.Parameter(offset, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)

    def plain(self) -> nn.Module:
        """Returns a plain layer of the original type, with the dequantized weight."""
        weight = dequantized(self.weight, self.scale, self.offset, self.bits, self.scale.dtype)
        layer: Any
        if self.was_transposed:
            layer = import_module("transformers.pytorch_utils").Conv1D(1, 1)
            layer.nf, layer.nx = weight.shape
            weight = weight.T.contiguous()
        else:
            layer = nn.Linear(self.in_features, self.out_features, device="meta")
        layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), self.bias
        return layer

    def forward(self, inputs: Tensor) -> Tensor:
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        product: Any = _Product.apply
        return product(inputs, self.weight, self.scale, self.offset, bias, self.bits)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


def group_of(in_features: int) -> int:
    """Returns the number of input features that share a scale."""
    return math.gcd(in_features, GROUP)


def dequantized(
    weight: Tensor, scale: Tensor, offset: Tensor, bits: int, dtype: torch.dtype
) -> Tensor:
    """Returns the weight `[out, in]` of a `QuantizedLinear`, in `dtype`."""
    if bits == 4:  # right shifts of int8 extend the sign
        weight = torch.stack([weight << 4 >> 4, weight >> 4], dim=2).flatten(1)
    groups = weight.to(dtype).unflatten(1, (scale.shape[1], -1))
    scale, offset = (part.to(dtype)[..., None] for part in (scale, offset))
    return torch.addcmul(offset, groups, scale).flatten(1)


def quantize_frozen(model: nn.Module, base: Base) -> nn.Module:
    """Quantizes each linear layer with a frozen weight to the format `base`, in place, and returns
    `model`. Layers that stay as they are: the head, which the loss uses, and layers whose number of
    input features has no common divisor of 16 or more with `GROUP`."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    heads = (head, getattr(head, "base_layer", None))
    for parent, name in _frozen_linear(model):
        layer: Any = getattr(parent, name)
        was_transposed = not isinstance(layer, nn.Linear)
        weight = layer.weight.T if was_transposed else layer.weight
        if layer not in heads and group_of(weight.shape[1]) >= _LEAST_GROUP:
            setattr(parent, name, QuantizedLinear(weight, layer.bias, BITS[base], was_transposed))
    for param in model.parameters():
        # Weights are often memory-mapped from one file, which stays in memory until all are freed.
        param.data = param.data.clone()
    return model


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
            held = (layer.weight, layer.scale, layer.offset)
            total += layer.in_features * layer.out_features - sum(part.numel() for part in held)
    return total


class _Product(torch.autograd.Function):
    """`inputs @ weight.T + bias`; saves the quantized weight for backward."""

    @staticmethod
    def forward(
        inputs: Tensor,
        weight: Tensor,
        scale: Tensor,
        offset: Tensor,
        bias: Tensor | None,
        bits: int,
    ) -> Tensor:
        return F.linear(inputs, dequantized(weight, scale, offset, bits, inputs.dtype), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs[1:4])
        ctx.bits = inputs[5]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight, scale, offset = ctx.saved_tensors
        whole = dequantized(weight, scale, offset, ctx.bits, gradient.dtype)
        return gradient @ whole, None, None, None, None, None
