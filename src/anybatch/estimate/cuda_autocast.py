"""CUDA autocast for traces of CPU tensors: the dtype of each function where CPU autocast differs.

Based on PyTorch's documentation ("Autocast op reference") and, for each function, on the dtypes
that PyTorch's CUDA build returns (`tests/gpu/test_autocast.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

Function = Callable[..., Any]

PLAIN = frozenset((Tensor, nn.Parameter, nn.Buffer, FakeTensor))
"""Tensor types that do not intercept functions."""

_HALF = (torch.bfloat16, torch.float16)
_NATIVE: Any = torch._C._nn  # pyright: ignore[reportAttributeAccessIssue]

_NORMS_RMS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
"""Whether autocast runs RMS norms in float32 (`aten/src/ATen/autocast_mode.h`)."""


def _named(places: Iterable[Any], names: str) -> frozenset[Function]:
    """Return the functions with these names in each of the `places` that has them."""
    return frozenset(
        getattr(place, name) for place in places for name in names.split() if hasattr(place, name)
    )


_IN_FLOAT32 = (
    _named(
        (torch, Tensor),
        "acos arccos asin arcsin cosh sinh tan erfinv exp expm1 log log10 log1p log2 pow square"
        " reciprocal rsqrt dist renorm logsumexp softmax log_softmax",
    )
    | _named((Tensor,), "__pow__ __rpow__ __rdiv__ __rtruediv__")
    | _named((torch.special,), "erfinv expm1 log1p logsumexp softmax log_softmax")
    | _named(
        (torch,),
        "layer_norm native_layer_norm group_norm cdist cosine_similarity pairwise_distance",
    )
    | (_named((torch,), "rms_norm") if _NORMS_RMS else frozenset())
    | _named(
        (F,),
        "softmax log_softmax softmin layer_norm group_norm cross_entropy nll_loss mse_loss l1_loss"
        " smooth_l1_loss huber_loss kl_div poisson_nll_loss gaussian_nll_loss cosine_embedding_loss"
        " hinge_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss"
        " soft_margin_loss triplet_margin_loss softplus binary_cross_entropy_with_logits"
        " cosine_similarity pairwise_distance pdist",
    )
    | _named(
        (_NATIVE,),
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d"
        " upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
        " _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d",
    )
)

_INTO_FLOAT32 = _named((torch, Tensor), "sum prod cumsum cumprod norm") | _named(
    (torch.linalg,), "norm vector_norm matrix_norm"
)
"""Reductions that read half precision and accumulate in float32, without a copy."""

_SOFTMAX: dict[Function, Function] = {
    **dict.fromkeys(_named((torch, Tensor, F), "softmax"), torch.ops.aten._softmax),
    **dict.fromkeys(_named((torch, Tensor, F), "log_softmax"), torch.ops.aten._log_softmax),
}
"""Functions that read float16, but not bfloat16, without a copy."""

_IN_HALF = _named((torch, Tensor), "mv addmv addr lstm_cell gru_cell")

_IN_FLOAT16 = _named((torch,), "gru rnn_tanh rnn_relu")
"""Functions in float16, whatever the autocast dtype: cuDNN's recurrent layers
(`aten/src/ATen/cudnn/AutocastRNN.cpp`)."""

_IN_BFLOAT16 = _named((torch,), "lstm")
"""Functions in bfloat16 instead of float16, which has the same size: oneDNN has no float16 kernel."""

_WIDEST = _named(
    (torch, Tensor),
    "dot vdot tensordot inner cross index_put scatter_add bilinear addcmul addcdiv atan2 grid_sampler",
)
"""Functions in the widest dtype of their arguments."""

_AS_GIVEN = _named(
    (torch, F, _NATIVE),
    "pad avg_pool3d max_pool3d _max_pool3d max_pool3d_with_indices adaptive_avg_pool3d"
    " adaptive_max_pool3d _adaptive_max_pool3d adaptive_max_pool3d_with_indices max_unpool2d"
    " max_unpool3d",
)
"""Functions in the dtype of their input, where CPU autocast uses float32."""


def changes(func: Function) -> bool:
    """Return whether CUDA autocast runs `func` differently from CPU autocast."""
    return func in _ALL and torch.is_autocast_enabled("cpu")


def run(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func`, for which `changes` is true, as CUDA autocast does."""
    first = args[0] if args else kwargs.get("input")
    given = first.dtype if isinstance(first, Tensor) else None
    with torch.autocast("cpu", enabled=False):
        if func in _INTO_FLOAT32:
            if given in _HALF and kwargs.get("dtype") is None and kwargs.get("out") is None:
                kwargs = {**kwargs, "dtype": torch.float32}
            return func(*args, **kwargs)
        if func in _SOFTMAX and given == torch.float16 and kwargs.get("dtype") is None:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if dim is not None:
                return _SOFTMAX[func](first, dim, True)
        if func is F.cross_entropy and type(first) in PLAIN and given in _HALF:
            return _cross_entropy(*args, **kwargs)
        dtype = _dtype(func, args, kwargs)
        if dtype is not None:
            args, kwargs = tree_map_only(Tensor, lambda tensor: cast(tensor, dtype), (args, kwargs))
        return func(*args, **kwargs)


def _cross_entropy(input: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor:
    """Cross-entropy of logits in half precision: the softmax stays in half precision, and only the
    loss is in float32."""
    if args or target.is_floating_point() or options.get("label_smoothing"):
        return F.cross_entropy(input.float(), target, *args, **options)
    options.pop("label_smoothing", None)
    logs = torch.log_softmax(input, 1 if input.dim() > 1 else 0)
    return F.nll_loss(logs.float(), target, **options)


def _dtype(func: Function, args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the dtype to which floating-point arguments are cast, or None if they are not cast."""
    if func in _IN_FLOAT32:
        return torch.float32
    if func in _IN_HALF:
        return torch.get_autocast_dtype("cpu")
    if func in _IN_FLOAT16:
        return torch.float16
    if func in _IN_BFLOAT16:
        return torch.bfloat16
    if func in _WIDEST:
        given = [t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        return torch.float32 if torch.float32 in given else None
    return None


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast `tensor` to `dtype` if its dtype is one that autocast converts."""
    castable = tensor.dtype in _HALF or tensor.dtype == torch.float32
    return tensor.to(dtype) if castable else tensor


_ALL = _IN_FLOAT32 | _INTO_FLOAT32 | _IN_HALF | _IN_FLOAT16 | _IN_BFLOAT16 | _WIDEST | _AS_GIVEN
