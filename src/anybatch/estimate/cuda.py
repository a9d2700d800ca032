"""CUDA semantics for a trace of CPU tensors, used when the CUDA device is not present.

Fake CUDA tensors do not support a backward pass on a machine without CUDA. The two devices differ
in six ways that change memory by tens of percent. In these the trace follows CUDA:

1. Autocast: which operations run in half precision and which in float32. See `cuda_autocast`.
2. Attention: CUDA's fused kernels (flash, memory-efficient) save one number per query for backward,
   also with dropout or a mask, where a CPU falls back to saving the scores.
3. Dropout: CUDA saves a mask of one byte per element.
4. Norms: group norms save their input with the channels first; RMS norms are a single kernel.
5. Optimizers: by default they update all tensors at once on CUDA (`foreach`), with temporaries as
   large as the parameters, and one tensor after the other on a CPU.
6. Chunks of `lm_loss` are larger on CUDA.

For memory that CUDA kernels take in addition to arguments and results, see `kernels`; for cuBLAS
workspaces, see `workspaces`. Not modeled: cuDNN workspaces, and kernels that exist only on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any, Literal

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
    """Return whether traces for `device` use CPU tensors with CUDA semantics."""
    return device.kind == "cuda" and not (device.present and torch.cuda.is_available())


@contextmanager
def laid_over(device: Device) -> Iterator[None]:
    """Context manager in which a trace for `device` runs."""
    if is_overlaid(device):
        with _CudaFunctions(), _regions_of_cpu(), standing_for(device.kind):
            yield
    else:
        yield


@contextmanager
def _regions_of_cpu() -> Iterator[None]:
    """Make `torch.autocast("cuda", ...)` in a model apply to the CPU tensors of the trace."""
    regions: Any = torch.autocast
    real = regions.__init__

    def made(region: Any, device_type: str, *args: Any, **options: Any) -> None:
        real(region, "cpu" if device_type == "cuda" else device_type, *args, **options)

    regions.__init__ = made
    try:
        yield
    finally:
        regions.__init__ = real


class _CudaFunctions(TorchFunctionMode):
    """Runs PyTorch functions with the autocast rules and kernels of CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        kwargs = kwargs or {}
        if func is Tensor.backward:  # recompute runs forward inside backward
            with self:
                return _backward(*args, **kwargs)
        if func is torch.autograd.grad:  # the same
            with self:
                return _body(torch.autograd.grad)(*args, **kwargs)
        if func in _STAND_INS and not _is_transformed():
            return _STAND_INS[func](*args, **kwargs)
        if cuda_autocast.changes(func):
            return cuda_autocast.run(func, args, kwargs)
        own = isinstance(func, FunctionType) and func.__globals__ is vars(F)
        if own and PLAIN.issuperset(types):
            with self:  # a Python function of PyTorch: the functions it calls pass through here
                return _body(func)(*args, **kwargs)
        return func(*args, **kwargs)


@cache
def _body(func: FunctionType) -> FunctionType:
    """Return a copy of `func`, a Python function of PyTorch, that does not check for a function
    mode."""
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
    """Run a backward pass under the mode. `Tensor.backward` would dispatch to the mode once more
    and then run without it, so recompute would save other tensors than forward did."""
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
    """Dropout with a mask of one byte per element. On a CPU the mask has the dtype of the input."""
    if not (training and train) or p == 0:
        return input
    if inplace:  # no fused kernel exists
        return input.mul_(torch.empty_like(input).bernoulli_(1 - p).div_(1 - p))
    return torch.native_dropout(input, p, True)[0]


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
    """Attention with a kernel that saves its result and one number per query, if CUDA has one. The
    CPU's flash attention saves the same. It does not support dropout, which is left out: CUDA's
    kernels generate the mask again in backward."""
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        query, key, value = (cuda_autocast.cast(t, half) for t in (query, key, value))
    kernel = _kernel_for(query, key, value, attn_mask, enable_gqa)
    if kernel == "math":
        with torch.autocast("cpu", enabled=False):
            return torch.ops.aten._scaled_dot_product_attention_math(
                *(query, key, value, attn_mask, dropout_p, is_causal),
                scale=scale,
                enable_gqa=enable_gqa,
            )[0]
    if key.size(1) != query.size(1):
        key, value = (t.repeat_interleave(query.size(1) // t.size(1), dim=1) for t in (key, value))
    width = max(t.size(3) for t in (query, key, value))
    if kernel == "flash":
        width += -width % 8
    wanted = value.size(3)
    query, key, value = (_padded(t, width) for t in (query, key, value))
    if attn_mask is not None:
        attn_mask = _bias(attn_mask, query)
    result: Tensor
    learned = attn_mask is not None and attn_mask.requires_grad
    if not learned and (kernel == "flash" or _is_by_token(query)):
        result, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
        )
    else:
        result = _Attention.apply(query, key, value, attn_mask, is_causal, scale)
    return result if wanted == width else result[..., :wanted]


def _kernel_for(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> Literal["flash", "efficient", "math"]:
    """Return the kernel that CUDA selects, for compute capability 8.0 and later
    (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`). The kernel "math" computes all scores."""
    given = query, key, value
    if any(t.dim() != 4 or t.stride(3) != 1 for t in given):
        return "math"
    half = query.dtype in (torch.bfloat16, torch.float16)
    batches, heads, widths = ({t.size(dim) for t in given} for dim in (0, 1, 3))
    if len(batches) > 1 or not (half or query.dtype == torch.float32):
        return "math"
    if half and mask is None and len(widths) == 1 and max(widths) <= 256:
        return "flash" if len(heads) == 1 or enable_gqa else "math"
    aligned = not any(width % (8 if half else 4) for width in widths)
    if len(heads) == 1 and query.size(3) == key.size(3) and aligned:
        return "efficient"
    return "math"


def _padded(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.size(3)
    return F.pad(tensor, (0, missing)) if missing else tensor


def _is_by_token(tensor: Tensor) -> bool:
    """Return whether a tensor allocated like `tensor`, of shape [batch, heads, tokens, width],
    stores the heads of a token next to each other."""
    strides = [tensor.stride(dim) for dim in (0, 2, 1, 3) if tensor.size(dim) > 1]
    return strides == sorted(strides, reverse=True)


class _Attention(torch.autograd.Function):
    """The CPU kernel, with the result in the layout of CUDA's memory-efficient kernel: the heads of
    a token are adjacent. The gradient of a learned bias is first computed in the shape of the
    scores."""

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
        learned = None
        if ctx.needs_input_grad[3]:
            scores = *query.shape[:3], key.size(2)
            learned = query.new_empty(scores).sum_to_size(mask.shape)
        return (*found, learned, None, None)


def _bias(mask: Tensor, query: Tensor) -> Tensor:
    """Return the bias that is added to the scores, in the dtype of the queries, with rows padded to
    a multiple of eight."""
    bias = (
        torch.zeros_like(mask, dtype=query.dtype)
        if mask.dtype == torch.bool
        else mask.to(query.dtype)
    )
    missing = -bias.size(-1) % 8
    return F.pad(bias, (0, missing))[..., : bias.size(-1)] if missing else bias


def _group_norm(input: Tensor, *args: Any, **options: Any) -> Tensor:
    """Group norm that makes its input contiguous, and saves the contiguous input for backward."""
    return _in_float32(torch.group_norm, input.contiguous(), *args, **options)


def _in_float32(func: Callable[..., Any], *args: Any, **options: Any) -> Any:
    changed = cuda_autocast.changes(func)
    return cuda_autocast.run(func, args, options) if changed else func(*args, **options)


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """RMS norm in a single kernel, which saves its input and one number per row."""
    if cuda_autocast.changes(torch.rms_norm):
        input = cuda_autocast.cast(input, torch.float32)
        weight = None if weight is None else cuda_autocast.cast(weight, torch.float32)
    if weight is not None and weight.dtype != input.dtype:
        return torch.rms_norm(input, normalized_shape, weight, eps)
    result: Tensor = _RmsNorm.apply(input, len(normalized_shape), weight)
    return result


class _RmsNorm(torch.autograd.Function):
    """RMS norm with the same memory as CUDA's kernel, and as many passes over it."""

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


_is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a `torch.func` transform is active, which needs the original functions."""

_STAND_INS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    torch.dropout: _dropout,
    torch.group_norm: _group_norm,
    torch.rms_norm: _rms_norm,
}
"""Replacements for functions that differ on CUDA."""


def update_together(optimizer: Optimizer) -> None:
    """Make `optimizer` update all tensors at once, unless it is configured otherwise. PyTorch does
    so for CUDA tensors, but not for fake ones."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
