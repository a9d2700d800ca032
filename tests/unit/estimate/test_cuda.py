"""CUDA's rules laid over traces of CPU tensors: what functions keep, and in which dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from anybatch.estimate.cuda import laid_over
from anybatch.estimate.kernels import CudaKernels
from anybatch.estimate.trace import alive, tracing
from anybatch.machine import Machine

ABSENT = Machine.describe("24GiB").device
MIB = 1 << 20


def kept(
    make: Callable[[], tuple[Tensor, ...]], run: Callable[..., Tensor], half: bool = False
) -> int:
    """Bytes that are alive once `run` has run, beside its arguments."""
    with tracing(CudaKernels()) as (tracer, _), laid_over(ABSENT):
        given = make()
        before = sum(b.num_bytes for b in alive(tracer.timeline, tracer.timeline.num_moments))
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            result = run(*given)
        found = sum(b.num_bytes for b in tracer.timeline.blocks if b.died is None)
        del result
    return found - before


def dtype_of(run: Callable[..., Tensor], dtype: torch.dtype, *shape: int) -> torch.dtype:
    """Of the result under autocast."""
    with tracing(CudaKernels()), laid_over(ABSENT), torch.autocast("cpu", torch.bfloat16):
        return run(torch.zeros(shape, dtype=dtype)).dtype


def image(dtype: torch.dtype = torch.float32, last: bool = False) -> tuple[Tensor]:
    made = torch.zeros(4, 64, 32, 32, dtype=dtype, requires_grad=True)  # 1 MiB in float32
    return (made.contiguous(memory_format=torch.channels_last) if last else made,)


def test_a_group_norm_keeps_its_channels_contiguous():
    def run(x: Tensor) -> Tensor:
        return F.group_norm(x, 8)

    small = 2 * 4 * 8 * 4  # means and deviations
    assert kept(image, run) - MIB == small
    assert kept(lambda: image(last=True), run) - 2 * MIB == small


def test_an_rms_norm_keeps_one_number_for_each_row():
    def make() -> tuple[Tensor, ...]:
        return torch.zeros(1024, 256, requires_grad=True), torch.zeros(256, requires_grad=True)

    assert kept(make, lambda x, weight: F.rms_norm(x, [256], weight)) == MIB + 4 * 1024


def test_its_gradient_is_that_of_its_argument_and_its_weight():
    with tracing(CudaKernels()), laid_over(ABSENT):
        x, weight = torch.zeros(8, 16, requires_grad=True), torch.zeros(16, requires_grad=True)
        F.rms_norm(x, [16], weight).sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
def test_attention_keeps_its_result_its_sums_and_what_is_made_of_a_mask(mask: torch.dtype | None):
    def make() -> tuple[Tensor, ...]:
        each = torch.zeros(4, 64, 4, 64).transpose(1, 2)  # 256 KiB
        given = [each.detach().requires_grad_() for _ in range(3)]
        return (*given, *([] if mask is None else [torch.zeros(64, 64, dtype=mask)]))

    def run(*given: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*given)

    result, sums = 256 << 10, 4 * 4 * 64 * 4
    made = 64 * 64 * 4 if mask == torch.bool else 0
    assert kept(make, run) == result + sums + made


def attended(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, **options: Any
) -> tuple[int, torch.Size]:
    """Bytes that attention keeps beside its arguments, and the shape of its result."""
    found: list[torch.Size] = []

    def make() -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes)

    def run(*given: Tensor) -> Tensor:
        result = F.scaled_dot_product_attention(*given, **options)
        found.append(result.shape)
        return result

    return kept(make, run), found[0]


HEADS, FEW = (2, 8, 256, 32), (2, 2, 256, 32)
SCORES = 2 * 8 * 256 * 256


@pytest.mark.parametrize(
    ("shapes", "dtype", "options", "keeps_scores"),
    [
        ([HEADS] * 3, torch.float32, {}, False),
        ([HEADS] * 3, torch.float32, {"dropout_p": 0.1}, False),
        ([HEADS] * 3, torch.float64, {}, True),
        ([HEADS, FEW, FEW], torch.bfloat16, {"enable_gqa": True}, False),
        ([HEADS, FEW, FEW], torch.float32, {"enable_gqa": True}, True),
        ([HEADS, (1, 8, 256, 32), (1, 8, 256, 32)], torch.bfloat16, {}, True),
        ([(2, 8, 256, 22)] * 3, torch.float32, {}, True),
        ([(2, 8, 256, 20)] * 3, torch.bfloat16, {}, False),
        ([(16, 256, 32)] * 3, torch.float32, {"dropout_p": 0.1}, True),
    ],
)
def test_attention_keeps_scores_where_cuda_has_no_kernel_that_does_not(
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    options: dict[str, Any],
    keeps_scores: bool,
):
    num_bytes, shape = attended(shapes, dtype, **options)
    assert shape == shapes[0]
    assert (num_bytes >= SCORES * dtype.itemsize) == keeps_scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_may_be_narrower_than_queries(dtype: torch.dtype):
    num_bytes, shape = attended([HEADS, HEADS, (2, 8, 256, 16)], dtype)
    assert shape == (2, 8, 256, 16)
    assert num_bytes < SCORES * dtype.itemsize


def test_a_bias_that_learns_has_a_gradient():
    with tracing(CudaKernels()), laid_over(ABSENT):
        each, bias = torch.zeros(HEADS, requires_grad=True), torch.zeros(8, 256, 256)
        bias.requires_grad_()
        F.scaled_dot_product_attention(each, each, each, bias).sum().backward()
        assert bias.grad is not None
        assert bias.grad.shape == bias.shape


def test_dropout_in_place_keeps_a_mask_of_the_dtype_of_its_input():
    def make() -> tuple[Tensor, ...]:
        return (torch.zeros(1 << 18, requires_grad=True),)

    assert kept(make, lambda x: F.dropout(x * 2, 0.1, inplace=False)) == MIB + (MIB >> 2)
    assert kept(make, lambda x: F.dropout(x * 2, 0.1, inplace=True)) == 2 * MIB


@pytest.mark.parametrize("norm", [torch.norm, Tensor.norm, torch.linalg.vector_norm])
def test_a_norm_of_half_precision_is_in_float32(norm: Callable[..., Tensor]):
    assert dtype_of(norm, torch.bfloat16, 4, 8) == torch.float32


@pytest.mark.parametrize("enabled", [True, False])
def test_a_region_of_autocast_for_cuda_is_followed(enabled: bool):
    layer = torch.zeros(16, 16)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            return F.linear(x.float(), layer)

    wanted = torch.bfloat16 if enabled else torch.float32
    assert dtype_of(run, torch.float32, 8, 16) == wanted
    assert torch.autocast("cpu").device == "cpu"


def test_an_rms_norm_takes_torch_s_names_and_dtype():
    def run(x: Tensor) -> Tensor:
        return torch.rms_norm(input=x, normalized_shape=(16,))

    newer = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
    wanted = torch.float32 if newer else torch.bfloat16
    assert dtype_of(run, torch.bfloat16, 8, 16) == wanted


def test_attention_within_a_module_is_cuda_s_too():
    def make() -> tuple[Tensor, ...]:
        return (torch.zeros(8, 128, 64, requires_grad=True),)

    def run(x: Tensor) -> Tensor:
        layer = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)
        return layer(x, x, x, need_weights=False)[0]

    scores = 8 * 4 * 128 * 128 * 4
    assert kept(make, run) < scores


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("sum", lambda x: x.sum(-1)),
        ("norm", lambda x: x.norm()),
        ("normalize", lambda x: F.normalize(x)),
        ("power", lambda x: x**2),
        ("square", torch.square),
        ("cross-entropy", lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.int64))),
        ("interpolate", lambda x: F.interpolate(x[None], scale_factor=2)),
        ("softmax", lambda x: x.softmax(-1)),
        ("dot", lambda x: torch.dot(x[0], x[0].float())),
        ("vdot", lambda x: torch.vdot(x[0], x[0].float())),
        ("reciprocal", lambda x: 1 / x),
        ("exact", lambda x: F.interpolate(x[None], scale_factor=2, mode="nearest-exact")),
        ("special", lambda x: torch.special.log1p(x)),
        ("keyword", lambda x: torch.softmax(input=x, dim=-1)),
        ("keyword", lambda x: torch.sum(input=x, dim=-1)),
        ("keyword", lambda x: torch.group_norm(input=x, num_groups=4)),
    ],
)
def test_what_runs_in_float32(name: str, run: Callable[[Tensor], Tensor]):
    assert dtype_of(run, torch.bfloat16, 8, 16) == torch.float32


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("pad", lambda x: F.pad(x[None], (1, 1), mode="reflect")),
        ("max_pool2d", lambda x: F.max_pool2d(x[None], 2)),
        ("max_pool3d", lambda x: F.max_pool3d(x[None, None], (1, 2, 2))),
        ("adaptive", lambda x: F.adaptive_avg_pool3d(x[None, None], (1, 2, 2))),
        ("grid", lambda x: F.grid_sample(x[None, None], x.view(1, 8, 8, 2), align_corners=False)),
        ("relu", torch.relu),
    ],
)
def test_what_runs_as_it_is(name: str, run: Callable[[Tensor], Tensor]):
    assert dtype_of(run, torch.bfloat16, 8, 16) == torch.bfloat16


def test_a_product_with_a_vector_runs_in_half_precision():
    assert dtype_of(lambda x: torch.mv(x, x[0]), torch.float32, 8, 16) == torch.bfloat16


def test_logits_in_half_precision_have_a_softmax_in_half_precision():
    def make() -> tuple[Tensor, ...]:
        return torch.zeros(256, 1024, dtype=torch.bfloat16, requires_grad=True), torch.zeros(
            256, dtype=torch.int64
        )

    logits, small = 256 * 1024 * 2, 8
    taken = kept(make, F.cross_entropy, half=True)
    # The softmax and, of the loss in float32, its copy.
    assert taken == logits + 2 * logits + small


def test_a_smoothed_loss_is_in_float32():
    def run(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, label_smoothing=0.1)

    def make() -> tuple[Tensor, ...]:
        logits = torch.zeros(256, 1024, dtype=torch.bfloat16, requires_grad=True)
        return logits, torch.zeros(256, dtype=torch.int64)

    assert kept(make, run, half=True) >= 4 * 256 * 1024


def test_a_sum_over_half_precision_makes_no_copy():
    def make() -> tuple[Tensor, ...]:
        return (torch.zeros(1024, 512, dtype=torch.bfloat16),)

    with tracing(CudaKernels()) as (tracer, _), laid_over(ABSENT):
        (given,) = make()
        before = len(tracer.timeline.blocks)
        with torch.autocast("cpu", torch.bfloat16):
            given.sum(-1)
        assert [b.num_bytes for b in tracer.timeline.blocks[before:]] == [4 * 1024]


def test_a_function_is_torch_s_own_within_its_transforms():
    rows = torch.zeros(4, 16)
    with laid_over(ABSENT):
        normed = torch.func.vmap(lambda row: F.rms_norm(row, [16]))(rows)
    assert normed.shape == rows.shape


def test_a_gradient_in_the_loss_recomputes_what_forward_computed():
    with tracing(CudaKernels()), laid_over(ABSENT):
        x = torch.zeros(HEADS, requires_grad=True)

        def attend(y: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(y, y, y, dropout_p=0.1)

        again = torch.utils.checkpoint.checkpoint(attend, x, use_reentrant=False)
        (slope,) = torch.autograd.grad(again.sum(), x)
    assert slope.shape == x.shape
