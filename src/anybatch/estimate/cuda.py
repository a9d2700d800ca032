"""CUDA's rules laid over a trace of CPU tensors, for a device that is not here.

Fake CUDA tensors do not carry through a backward pass on a machine without CUDA. Five things differ
between the devices so much that bytes are wrong by tens of percent, and they are made as CUDA has
them:

1. Autocast. The lists of what runs in half precision and what in float32 are CUDA's: softmax, norms,
   sums and losses run in float32 there.
2. Attention. CUDA's fused kernels (flash, memory-efficient) keep one number per query for backward,
   also under dropout or a mask, where a CPU falls back to keeping the scores.
3. Dropout. CUDA's keeps a mask of one byte per number.
4. Optimizers. Where nothing is said, they update all tensors at once on CUDA (`foreach`), with
   temporaries as large as the parameters; on a CPU one after the other.
5. Chunks of `lm_loss`, which are larger on CUDA.

What remains: workspaces of cuDNN (those of cuBLAS: see `workspaces`), and kernels that CUDA has and
CPUs have not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from anybatch.compute.lm_loss import standing_for
from anybatch.machine import Device

_HALF = (torch.bfloat16, torch.float16)

_IN_FLOAT32: frozenset[Callable[..., Any]] = frozenset(
    {
        *(torch.softmax, F.softmax, Tensor.softmax, torch.log_softmax, F.log_softmax),
        *(Tensor.log_softmax, F.softmin, F.layer_norm, torch.layer_norm, F.group_norm),
        *(
            torch.group_norm,
            torch.norm,
            Tensor.norm,
            torch.sum,
            Tensor.sum,
            torch.prod,
            Tensor.prod,
        ),
        *(torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod, torch.exp, Tensor.exp),
        *(torch.expm1, Tensor.expm1, torch.log, Tensor.log, torch.log1p, Tensor.log1p, torch.log2),
        *(torch.log10, torch.pow, Tensor.pow, Tensor.__pow__, torch.rsqrt, Tensor.rsqrt),
        *(torch.reciprocal, Tensor.reciprocal, torch.acos, torch.asin, torch.cosh, torch.sinh),
        *(torch.tan, torch.erfinv, torch.cdist, torch.renorm, torch.logsumexp, Tensor.logsumexp),
        *(F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
        *(F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.cosine_embedding_loss),
        *(F.hinge_embedding_loss, F.margin_ranking_loss, F.multi_margin_loss),
        *(F.multilabel_margin_loss, F.soft_margin_loss, F.triplet_margin_loss, F.softplus),
        *(F.binary_cross_entropy_with_logits, F.cosine_similarity, torch.cosine_similarity),
    }
)
"""What CUDA's autocast runs in float32 (torch's documentation, "Autocast op reference")."""


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
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in (F.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _full, (args, kwargs))
            with torch.autocast("cpu", enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


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
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    result, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=None, scale=scale
    )
    return result


def update_together(optimizer: Optimizer) -> None:
    """Let `optimizer` update all tensors at once where it is not told otherwise: torch does so for CUDA
    tensors, but not for fake ones."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
