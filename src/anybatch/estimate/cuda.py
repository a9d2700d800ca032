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

What CUDA's kernels take beside arguments and results: see `kernels`; cuBLAS's workspaces:
`workspaces`. What remains: workspaces of cuDNN, and kernels that CUDA has and CPUs have not.
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
    """Whether traces for `device` are of CPU tensors with CUDA's rules laid over them."""
    return device.kind == "cuda" and not (device.present and torch.cuda.is_available())


@contextmanager
def laid_over(device: Device) -> Iterator[None]:
    """Where a trace for `device` runs."""
    if is_overlaid(device):
        with _CudaFunctions(), _regions_of_cpu(), standing_for(device.kind):
            yield
    else:
        yield


@contextmanager
def _regions_of_cpu() -> Iterator[None]:
    """A model's own `torch.autocast("cuda", ...)` is one of the tensors that are there."""
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
    """Functions of torch as autocast and attention have them on CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See torch."""
        kwargs = kwargs or {}
        if func is Tensor.backward:  # recompute runs forward again inside it
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
            with self:  # of torch's own, in Python: what it calls is asked for next
                return _body(func)(*args, **kwargs)
        return func(*args, **kwargs)


@cache
def _body(func: FunctionType) -> FunctionType:
    """`func`, a function of torch in Python, without its question whether a mode will take it."""
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
    if inplace:  # has no such kernel
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
    """Attention by a kernel that keeps its result and one number per query, where CUDA has one. The
    CPU's flash attention has those very outputs; dropout, which it does not know, draws its mask again
    in backward."""
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
    """The kernel that CUDA takes, from compute capability 8.0 on
    (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`). That by the name of math computes all
    scores."""
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
    """Whether what is made like `tensor`, of shape [batch, heads, tokens, width], has the heads of a
    token side by side."""
    strides = [tensor.stride(dim) for dim in (0, 2, 1, 3) if tensor.size(dim) > 1]
    return strides == sorted(strides, reverse=True)


class _Attention(torch.autograd.Function):
    """The CPU's kernel, with the result laid out as CUDA's memory-efficient one has it: the heads of a
    token side by side. A bias that learns has a gradient of the shape of the scores first."""

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
    """What is added to the scores: of the dtype of the queries, its rows padded to a multiple of
    eight."""
    bias = (
        torch.zeros_like(mask, dtype=query.dtype)
        if mask.dtype == torch.bool
        else mask.to(query.dtype)
    )
    missing = -bias.size(-1) % 8
    return F.pad(bias, (0, missing))[..., : bias.size(-1)] if missing else bias


def _group_norm(input: Tensor, *args: Any, **options: Any) -> Tensor:
    """A norm that reads its channels as contiguous, and keeps them so for backward."""
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
    """A norm in one kernel, which keeps its argument and one number for each row."""
    if cuda_autocast.changes(torch.rms_norm):
        input = cuda_autocast.cast(input, torch.float32)
        weight = None if weight is None else cuda_autocast.cast(weight, torch.float32)
    if weight is not None and weight.dtype != input.dtype:
        return torch.rms_norm(input, normalized_shape, weight, eps)
    result: Tensor = _RmsNorm.apply(input, len(normalized_shape), weight)
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


_is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""By `torch.func`, which takes functions as torch has them."""

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
