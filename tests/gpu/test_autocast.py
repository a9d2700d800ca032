"""CUDA's autocast against the one that is laid over traces of CPU tensors: function by function, the
dtype of what comes out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.estimate.cuda import laid_over
from anybatch.machine import Machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HALF = torch.bfloat16


class Given:
    """Arguments, in half precision and in float32."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.half, self.full = self.of(4, 8), self.of(4, 8, dtype=torch.float32)
        self.image, self.full_image = self.of(2, 4, 8, 8), self.of(2, 4, 8, 8, dtype=torch.float32)
        self.places = torch.zeros(4, dtype=torch.long, device=device)

    def of(self, *shape: int, dtype: torch.dtype = HALF) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=self.device)


ELEMENTWISE = [
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "tanh",
    "sigmoid",
    "sin",
    "cos",
    "tan",
    "acos",
    "asin",
    "sinh",
    "cosh",
    "erf",
    "erfinv",
    "expm1",
    "log1p",
    "log2",
    "log10",
    "abs",
    "square",
    "std",
    "var",
    "norm",
    "amax",
    "neg",
]
ACTIVATIONS = [
    "relu",
    "gelu",
    "silu",
    "elu",
    "softplus",
    "hardswish",
    "mish",
    "logsigmoid",
    "normalize",
    "glu",
]
LOSSES = [
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
    "soft_margin_loss",
    "cosine_similarity",
]

CASES: dict[str, Callable[[Given], Any]] = {
    **{name: lambda g, name=name: getattr(torch, name)(g.half) for name in ELEMENTWISE},
    **{f"Tensor.{name}": lambda g, name=name: getattr(g.half, name)() for name in ELEMENTWISE},
    **{f"F.{name}": lambda g, name=name: getattr(F, name)(g.half) for name in ACTIVATIONS},
    **{f"F.{name}": lambda g, name=name: getattr(F, name)(g.half, g.half) for name in LOSSES},
    "sum": lambda g: g.half.sum(-1),
    "mean": lambda g: g.half.mean(-1),
    "prod": lambda g: g.half.prod(),
    "cumsum": lambda g: g.half.cumsum(0),
    "logsumexp": lambda g: g.half.logsumexp(-1),
    "softmax": lambda g: g.half.softmax(-1),
    "F.log_softmax": lambda g: F.log_softmax(g.half, -1),
    "power": lambda g: g.half**2,
    "power of two": lambda g: 2**g.half,
    "vector_norm": lambda g: torch.linalg.vector_norm(g.half),
    "dist": lambda g: torch.dist(g.half, g.half),
    "cdist": lambda g: torch.cdist(g.full, g.full),
    "layer_norm": lambda g: F.layer_norm(g.half, [8]),
    "group_norm": lambda g: F.group_norm(g.image, 2),
    "rms_norm": lambda g: F.rms_norm(g.half, [8]),
    "instance_norm": lambda g: F.instance_norm(g.image),
    "linear": lambda g: F.linear(g.full, g.full),
    "product": lambda g: g.full @ g.full.t(),
    "mv": lambda g: torch.mv(g.full, g.full[0]),
    "einsum": lambda g: torch.einsum("ij,kj->ik", g.full, g.full),
    "dot": lambda g: torch.dot(g.full[0], g.half[0]),
    "bilinear": lambda g: F.bilinear(g.full, g.half, g.of(3, 8, 8, dtype=torch.float32)),
    "conv2d": lambda g: F.conv2d(g.full_image, g.of(3, 4, 3, 3, dtype=torch.float32)),
    "prelu": lambda g: F.prelu(g.full_image, g.of(4, dtype=torch.float32)),
    "avg_pool2d": lambda g: F.avg_pool2d(g.image, 2),
    "avg_pool3d": lambda g: F.avg_pool3d(g.image[None], 2),
    "max_pool2d": lambda g: F.max_pool2d(g.image, 2),
    "nearest": lambda g: F.interpolate(g.image, scale_factor=2),
    "bilinear resize": lambda g: F.interpolate(g.image, scale_factor=2, mode="bilinear"),
    "bicubic resize": lambda g: F.interpolate(g.image, scale_factor=2, mode="bicubic"),
    "reflected": lambda g: F.pad(g.image, (1, 1, 1, 1), mode="reflect"),
    "padded": lambda g: F.pad(g.image, (1, 1, 1, 1)),
    "cross_entropy": lambda g: F.cross_entropy(g.half, g.places),
    "binary": lambda g: F.binary_cross_entropy_with_logits(g.half, g.half),
    "added": lambda g: g.half + g.full,
    "cat": lambda g: torch.cat([g.half, g.full]),
    "addcmul": lambda g: torch.addcmul(g.full, g.half, g.half),
    "index_put": lambda g: g.full.index_put((g.places,), g.half),
    "scatter_add": lambda g: g.full.scatter_add(0, g.places[:, None].expand(4, 8), g.half),
    "embedding": lambda g: F.embedding(g.places, g.full),
    "attention": lambda g: F.scaled_dot_product_attention(*[g.full_image] * 3),
    "multi-head": lambda g: nn.MultiheadAttention(8, 2, device=g.device)(*[g.full_image[0]] * 3)[0],
    "lstm cell": lambda g: nn.LSTMCell(8, 8, device=g.device)(g.full)[0],
}


@pytest.mark.parametrize("name", CASES)
def test_functions_return_the_dtype_that_they_return_on_cuda(name: str):
    with torch.autocast("cuda", HALF):
        there = CASES[name](Given("cuda"))
    device = Machine.describe("24GiB").device
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(laid_over(device))
        stack.enter_context(torch.autocast("cpu", HALF))
        elsewhere = CASES[name](Given("cpu"))
    assert elsewhere.dtype == there.dtype


def test_recurrent_layers_run_in_float16_whatever_is_asked_for():
    with torch.autocast("cuda", HALF):
        there = nn.LSTM(8, 8, device="cuda")(torch.ones(2, 4, 8, device="cuda"))[0]
    assert there.dtype == torch.float16
