"""Frozen linear layers with weights in 8 or 4 bits, for adapters to be trained over.

Dettmers et al. 2023, "QLoRA", section 3: the weights of a base model are held in few bits and are
multiplied as floating-point numbers, one layer at a time. The kernels for inference (of torchao and
torch) have no backward pass, so the weight is dequantized in forward and once more in backward.

The bits are plain parameters of integers: they are planned, placed, divided, checksummed and saved like
any frozen parameter.
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
"""Input features at most that share a scale and an offset."""

_LEAST_GROUP = 16  # below, scales and offsets would take as much as the bits


class QuantizedLinear(nn.Module):
    """A linear layer, `[*, in]` to `[*, out]`, whose weight is `q * scale + offset` for whole numbers
    `q` of `bits` bits. Gradients reach its input alone.

    Args:
        weight: `[out, in]`, floating point.
        bias: `[out]`, or None.
        bits: 8 or 4.
        was_transposed: the layer was a `Conv1D` of transformers, which holds `[in, out]`.

    Attributes:
        weight: int8 `[out, in * bits / 8]`; of 4 bits the even columns are the lower halves of the
            bytes.
        scale, offset: `[out, in / group]`, of the dtype of the weight that was given.
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
        # Of a group whose weights are all alike: not zero, and among 16 bits a subnormal number.
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
        """The plain layer, of the kind that it was, with the weight that this one stands for."""
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
    """Features that share a scale."""
    return math.gcd(in_features, GROUP)


def dequantized(
    weight: Tensor, scale: Tensor, offset: Tensor, bits: int, dtype: torch.dtype
) -> Tensor:
    """The weight `[out, in]` of a `QuantizedLinear`, in `dtype`."""
    if bits == 4:  # shifts of int8 keep the sign
        weight = torch.stack([weight << 4 >> 4, weight >> 4], dim=2).flatten(1)
    groups = weight.to(dtype).unflatten(1, (scale.shape[1], -1))
    scale, offset = (part.to(dtype)[..., None] for part in (scale, offset))
    return torch.addcmul(offset, groups, scale).flatten(1)


def quantize_frozen(model: nn.Module, base: Base) -> nn.Module:
    """`model` with each linear layer whose weight is frozen in the format `base`, but for the head, by
    which the loss is computed, and layers whose input features have no common divisor of 16 or more
    with `GROUP`."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    heads = (head, getattr(head, "base_layer", None))
    for parent, name in _frozen_linear(model):
        layer: Any = getattr(parent, name)
        was_transposed = not isinstance(layer, nn.Linear)
        weight = layer.weight.T if was_transposed else layer.weight
        if layer not in heads and group_of(weight.shape[1]) >= _LEAST_GROUP:
            setattr(parent, name, QuantizedLinear(weight, layer.bias, BITS[base], was_transposed))
    for param in model.parameters():
        # Weights are often mapped from one file, which is in memory as long as one of them is.
        param.data = param.data.clone()
    return model


def _frozen_linear(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where they are: the layers themselves would all be kept alive until the last one is replaced."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if (type(layer) is nn.Linear or type(layer).__name__ == "Conv1D")
        and not layer.get_parameter("weight").requires_grad
    ]


def dequantize(model: nn.Module) -> nn.Module:
    """`model` with plain layers in place of those of `quantize_frozen`, and the weights of these."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, QuantizedLinear):
                setattr(parent, name, layer.plain())
    return model


def num_weights(model: nn.Module) -> int:
    """Numbers that the parameters of `model` stand for."""
    total = sum(param.numel() for param in model.parameters())
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            held = (layer.weight, layer.scale, layer.offset)
            total += layer.in_features * layer.out_features - sum(part.numel() for part in held)
    return total


class _Product(torch.autograd.Function):
    """`inputs @ weight.T + bias`; what is kept for backward are the bits."""

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
