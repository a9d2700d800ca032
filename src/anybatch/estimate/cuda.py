"""CUDA's rules laid over a trace of CPU tensors, for a device that is not here.

Fake CUDA tensors do not carry through a backward pass on a machine without CUDA. Six things differ
between the devices so much that bytes are wrong by tens of percent, and they are made as CUDA has
them:

1. Autocast. What runs in half precision and what in float32: see `cuda_autocast`.
2. Attention. CUDA's fused kernels (flash, memory-efficient) keep one number per query for backward,
   also under dropout or a mask, where a CPU falls back to keeping the scores.
3. Dropout. CUDA's keeps a mask of one byte per number.
4. Norms. Group norms keep their argument with its channels first; RMS norms are one kernel.
5. Optimizers. Where nothing is said, they update all tensors at once on CUDA (`foreach`), with
   temporaries as large as the parameters; on a CPU one after the other.
6. Chunks of `lm_loss`, which are larger on CUDA.

What CUDA's kernels take beside arguments and results: see `cuda_kernels`; cuBLAS's workspaces:
`workspaces`. What remains: workspaces of cuDNN, and kernels that CUDA has and CPUs have not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from anybatch.compute.lm_loss import standing_for
from anybatch.estimate import cuda_autocast
from anybatch.estimate.cuda_autocast import PLAIN
from anybatch.machine import Device


def is_overlaid(device: Device) -> bool:
    """Whether traces for `device` are of CPU tensors with CUDA's rules laid over them."""
    return device.kind == "cuda" and not (device.present and torch.cuda.is_available())


@contextmanager
def laid_over(device: Device) -> Iterator[None]:
    """Where a trace for `device` runs."""
    if is_overlaid(device):
        with _CudaFunctions(), standing_for(device.kind):
            yield
    else:
        yield


class _CudaFunctions(TorchFunctionMode):
    """Functions of torch as autocast and attention have them on CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See torch."""
        kwargs = kwargs or {}
        if func is Tensor.backward:  # recompute runs forward again inside it
            with self:
                return _backward(*args, **kwargs)
        if func in _STAND_INS:
            return _STAND_INS[func](*args, **kwargs)
        if cuda_autocast.changes(func):
            return cuda_autocast.run(func, args, kwargs)
        own = isinstance(func, FunctionType) and func.__globals__ is vars(F)
        if own and PLAIN.issuperset(types):
            with self:  # of torch's own, in Python: what it calls is asked for next
                return _body(func)(*args, **kwargs)
        return func(*args, **kwargs)


@cache
def _body(func: FunctionType) -> FunctionType:
    """`func`, a function of `torch.nn.functional`, without its question whether a mode will take it."""
    asks = {name: _no for name in func.__globals__ if name.startswith("has_torch_function")}
    made = FunctionType(
        func.__code__,
        {**func.__globals__, **asks},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _no(*_: Any) -> bool:
    return False


def _backward(tensor: Tensor, gradient: Tensor | None = None, **options: Any) -> None:
    """A backward pass under the mode. torch's own way would ask the mode once more, and then run
    without it, so recompute would keep other tensors than forward did."""
    keep, create = options.get("retain_graph"), options.get("create_graph", False)
    run_backward(
        (tensor,),
        (torch.ones_like(tensor) if gradient is None else gradient,),
        create if keep is None else keep,
        create,
        tuple(options.get("inputs") or ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> Tensor:
    """Dropout with a mask of one byte per number; a CPU's has the dtype of the input."""
    if not (training and train) or p == 0:
        return input
    result = torch.native_dropout(input, p, True)[0]
    return input.copy_(result) if inplace else result


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by a kernel that keeps its result and one number per query. The CPU's flash attention
    has those very outputs; dropout, which it does not know, draws its mask again in backward."""
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(half) for t in (query, key, value))
    if query.dim() != 4 or (query.requires_grad is False and not torch.is_grad_enabled()):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (t.repeat_interleave(query.size(1) // t.size(1), dim=1) for t in (key, value))
    if attn_mask is not None:
        attn_mask = _bias(attn_mask, query)
    result, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    flash = attn_mask is None and query.dtype != torch.float32
    if flash or result.transpose(1, 2).is_contiguous():
        return result
    del result
    laid: Tensor = _Attention.apply(query, key, value, attn_mask, is_causal, scale)
    return laid


class _Attention(torch.autograd.Function):
    """The CPU's kernel, with the result laid out as CUDA's kernels have it: the one for half
    precision like its queries, the memory-efficient one with the heads of a token side by side."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        result, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        _, heads, length, width = result.shape
        row = heads * width
        result = result.as_strided(result.shape, (length * row, width, row, 1))
        ctx.save_for_backward(query, key, value, result, sums, mask)
        ctx.options = is_causal, scale
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, result, sums, mask = ctx.saved_tensors
        is_causal, scale = ctx.options
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(gradients[0], query, key, value, result, sums, 0.0, is_causal),
            attn_mask=mask,
            scale=scale,
        )
        return (*found, None, None, None)


def _bias(mask: Tensor, query: Tensor) -> Tensor:
    """What is added to the scores: of the dtype of the queries, its rows padded to a multiple of
    eight."""
    bias = (
        torch.zeros_like(mask, dtype=query.dtype)
        if mask.dtype == torch.bool
        else mask.to(query.dtype)
    )
    missing = -bias.size(-1) % 8
    return F.pad(bias, (0, missing))[..., : bias.size(-1)] if missing else bias


def _group_norm(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """A norm that reads its channels as contiguous, and keeps them so for backward."""
    return _in_float32(torch.group_norm, tensor.contiguous(), *args, **options)


def _in_float32(func: Callable[..., Any], *args: Any, **options: Any) -> Any:
    changed = cuda_autocast.changes(func)
    return cuda_autocast.run(func, args, options) if changed else func(*args, **options)


def _rms_norm(
    tensor: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """A norm in one kernel, which keeps its argument and one number for each row."""
    if weight is not None and weight.dtype != tensor.dtype:
        return torch.rms_norm(tensor, shape, weight, eps)
    result: Tensor = _RmsNorm.apply(tensor, len(shape), weight)
    return result


class _RmsNorm(torch.autograd.Function):
    """The bytes of CUDA's, and as many passes over them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, num_dims: int, weight: Tensor | None) -> Tensor:
        tensor = tensor.contiguous()
        rows = tensor.shape[: tensor.dim() - num_dims]
        scale = tensor.new_empty((*rows, *[1] * num_dims), dtype=torch.float32)
        ctx.save_for_backward(tensor, scale, weight)
        return tensor * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tensor, _, weight = ctx.saved_tensors
        return gradients[0] * tensor, None, None if weight is None else torch.empty_like(weight)


_STAND_INS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    torch.dropout: _dropout,
    torch.group_norm: _group_norm,
    torch.rms_norm: _rms_norm,
}
"""What is made of operations that differ on CUDA."""


def update_together(optimizer: Optimizer) -> None:
    """Let `optimizer` update all tensors at once where it is not told otherwise: torch does so for CUDA
    tensors, but not for fake ones."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
