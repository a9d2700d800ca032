"""Attention in chunks of queries: the same gradients in less memory, however attention is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unit.compute.test_along_sequence import assert_is_derivative, gradients
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.compute import chunked_attention
from anybatch.compute.chunked_attention import NotChunkable
from anybatch.compute.recompute import install
from anybatch.plans import Recompute

HEADS, WIDTH = 2, 8
CHUNKED = Recompute(blocks=("layers.*",), chunked_attention=True)


class Attention(nn.Module):
    """Projections around `attend`, which every way to write attention overrides."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Tensors of shape [batch, heads, positions, WIDTH // HEADS]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(*parts).transpose(1, 2).flatten(2))


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


class Plain(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.size(-1)))
        scores = scores.masked_fill(causal(q.size(-2)) == 0, float("-inf"))
        return self.drop(F.softmax(scores, dim=-1)) @ v


class ByBias(Attention):
    """With a learned bias, softcapping, and a softmax in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, 24, 24))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.size(-2)
        scores = 5.0 * torch.tanh(torch.matmul(q, k.transpose(2, 3)) / 5.0)
        scores = scores + self.bias[:, :length, :length]
        weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float64).to(q.dtype)
        return torch.matmul(weights, v)


class InPlace(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.mT)
        scores += 0.5
        scores.masked_fill_(~causal(q.size(-2)), -1e9).mul_(0.3)
        return scores.softmax(-1).matmul(v)


class ByHead(Attention):
    """Heads and samples in one dim, and the mask added in another shape."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (samples, heads, length, _), dims = q.shape, (q.size(0) * q.size(1), *q.shape[2:])
        scores = torch.bmm(q.reshape(dims), k.reshape(dims).transpose(1, 2))
        scores = scores.view(samples, heads, length, length) + causal(length)
        weights = F.softmax(scores.view(-1, length, length), dim=-1)
        return torch.bmm(weights, v.reshape(dims)).view(v.shape)


class Einsum(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).div(2.0).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)


class Summand(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, values = (t.flatten(0, 1) for t in (q, k, v))
        scores = torch.baddbmm(causal(q.size(-2)).double(), q, k.mT, alpha=0.5)
        return (scores.softmax(-1) @ values).view(v.shape)


class Fused(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Masked(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal(q.size(-2))[None, None] | (torch.arange(k.size(-2)) < 3)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=0.7)


class MultiHead(nn.Module):
    """torch's module, which returns weights that are averaged over heads and not used."""

    def __init__(self, dropout: float = 0.0, **options: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, dropout, batch_first=True)
        self._options = options

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, **self._options)[0]


class ShownWeights(MultiHead):
    """Uses the weights too."""

    def forward(self, x: Tensor) -> Tensor:
        result, weights = self.inner(x, x, x)
        return result + weights.square().sum(-1, keepdim=True)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.0, batch_first=True)


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def chunked(model: nn.Module, given: Tensor) -> list[Tensor]:
    undo = install(model, CHUNKED)
    try:
        return gradients(model, given)
    finally:
        undo()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the scores of each attention that runs in chunks are those of a dropout."""
    noted: list[bool] = []
    real = chunked_attention._in_chunks

    def noting(run: Any, tensors: Any, num_rows: int, draws: bool) -> Tensor:
        noted.append(draws)
        return real(run, tensors, num_rows, draws)

    monkeypatch.setattr(chunked_attention, "_in_chunks", noting)
    return noted


@pytest.mark.parametrize(
    "make",
    [
        Plain, ByBias, ByHead, Einsum, Summand, Fused, Masked, MultiHead, ShownWeights,
        encoder_layer,
    ],
)  # fmt: skip
@pytest.mark.parametrize("length", [24, 19, 8])
def test_chunks_have_the_gradients_of_the_whole(
    make: Callable[[], nn.Module], length: int, products: list[bool]
):
    torch.manual_seed(0)
    model = Model(make).double()
    given = torch.randn(2, length, WIDTH, dtype=torch.float64)
    expected = gradients(model, given)
    found = chunked(model, given)
    assert len(products) == 4  # of two layers, in forward and again in backward
    assert len(found) == len(expected) == 1 + len(list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_few_positions_are_computed_as_written(products: list[bool]):
    model = Model(Plain)
    chunked(model, torch.randn(2, 4, WIDTH))
    with torch.no_grad():
        model(torch.randn(2, 24, WIDTH))
    assert not products


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plain(0.4),
        lambda: MultiHead(0.4),
        lambda: MultiHead(0.4, need_weights=False),
    ],
)
def test_dropout_is_that_of_forward_in_backward_too(
    make: Callable[[], nn.Module], products: list[bool]
):
    torch.manual_seed(0)
    model = Model(make).double()
    given = torch.randn(2, 24, WIDTH, dtype=torch.float64)
    undo = install(model, CHUNKED)
    value = assert_is_derivative(model, given)
    undo()
    assert products == [True] * len(products)
    torch.manual_seed(7)
    assert not torch.isclose(model(given).square().sum(), value)  # drawn in another order


class HalfInside(Attention):
    """Computes its scores in float32 inside autocast, and its result in bfloat16."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            scores = q.float() @ k.float().mT
        return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("make", [Plain, HalfInside, Einsum, MultiHead])
def test_autocast_is_that_of_the_code_as_written(
    make: Callable[[], nn.Module], products: list[bool]
):
    torch.manual_seed(0)
    model, given = Model(make), torch.randn(2, 24, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = gradients(model, given), chunked(model, given)
    assert products
    torch.testing.assert_close(found[0], expected[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        # Sums of eight chunks in bfloat16.
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * float(other.abs().max()))


class Sums(Attention):
    """Divides by the sums of rows, for which there is no rule."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).exp()
        return (scores / scores.sum(-1, keepdim=True)) @ v


class Columns(Attention):
    """A softmax over queries, which does not treat rows independently."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, dim=-2) @ v


class Turned(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (k @ q.mT).softmax(-2).mT @ v


class Kept(Attention):
    """Leaves its weights behind, for a loss outside the block."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.weights = torch.softmax(q @ k.mT, -1)
        return self.weights @ v


class Named(Attention):
    """Calls by keyword, for which there is no rule."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(input=q @ k.mT, dim=-1)
        return torch.matmul(input=weights, other=v)


@pytest.mark.parametrize("make", [Sums, Columns, Turned, Kept, Named])
def test_scores_used_in_another_way_are_computed_as_a_whole(make: Callable[[], nn.Module]):
    torch.manual_seed(0)
    model = Model(make).double()
    given = torch.randn(2, 24, WIDTH, dtype=torch.float64)
    for one, other in zip(chunked(model, given), gradients(model, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_scores_that_a_block_leaves_behind_can_still_be_used():
    torch.manual_seed(0)
    model = Model(Kept).double()
    undo = install(model, CHUNKED)
    model(torch.randn(2, 24, WIDTH, dtype=torch.float64))
    left = model.layers[0].weights
    undo()
    assert left.shape == (2, HEADS, 24, 24)
    torch.testing.assert_close(left.sum(-1), torch.ones(2, HEADS, 24, dtype=torch.float64))
    with torch.no_grad():
        assert left.detach().amax() <= 1


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ctx.save_for_backward(scores)
        return scores * scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradients[0]


class OwnFunction(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Square.apply(q @ k.mT) @ v  # pyright: ignore[reportOperatorIssue]


class Again(Attention):
    """Returns the weights of its dropout a second time."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = F.dropout((q @ k.mT).softmax(-1), 0.5)
        return weights @ v + weights.mean(-1, keepdim=True)


class Changed(Attention):
    """Writes to its queries before the scores are computed."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q * 1.0
        scores = q @ k.mT
        q.mul_(2.0)
        return scores.sin() @ v


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (OwnFunction, "gradients are disabled"),
        (Again, "again after their dropout"),
        (InPlace, "writes to its scores in place"),
        (Changed, "changes in place"),
    ],
)
def test_code_that_chunks_would_change_is_refused(make: Callable[[], nn.Module], why: str):
    with pytest.raises(NotChunkable, match=rf"chunks of queries.*{why}.*chunked_attention"):
        chunked(Model(make), torch.randn(2, 24, WIDTH))


def task_of(make: Callable[[], nn.Module], positions: int = 24, **options: Any) -> ab.Task:
    draw = torch.Generator().manual_seed(0)
    given = torch.randn(2, positions, WIDTH, generator=draw)
    return ab.Task(
        model=lambda: Model(make),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(given),
        global_batch=2,
        steps=2,
        **options,
    )


def peak(task: ab.Task, machine: ab.Machine, way: Recompute) -> int:
    prediction = ab.plan(task, machine, micro_batch=1, recompute=way, rehearsal=False).prediction
    assert prediction is not None
    return prediction.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        Plain,
        *(
            pytest.param(one, marks=pytest.mark.nightly)
            for one in (Einsum, MultiHead, lambda: MultiHead(0.1))
        ),
    ],
)
def test_a_sample_whose_scores_do_not_fit_is_planned_in_chunks(make: Callable[[], nn.Module]):
    task, machine = task_of(make, 1024), ab.Machine.here(device="cpu")
    ways = Recompute(), Recompute(blocks=("layers.*",)), CHUNKED
    none, blocks, chunks = (peak(task, machine, way) for way in ways)
    # The scores of one chunk of eight, and what is as long as the sequence.
    assert chunks < blocks / 3 < none / 3
    memory = (blocks + chunks) // 2
    with pytest.raises(ab.NoPlanFits):
        ab.plan(task, machine, memory=memory, recompute="all")
    found = ab.plan(task, machine, memory=memory).choice
    assert found.recompute.chunked_attention
    assert "attention in chunks" in found.describe()
    with pytest.raises(ab.NoPlanFits):  # whose bits would be others
        ab.plan(task_of(make, 1024, reproducible=True), machine, memory=memory)


def test_chunks_on_an_absent_gpu_under_autocast():
    task, machine = task_of(Plain, 1024), ab.Machine.describe("24GiB")
    ways = Recompute(blocks=("layers.*",)), CHUNKED
    found = [
        ab.plan(task, machine, precision="bf16", micro_batch=2, recompute=way).prediction
        for way in ways
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].peak_bytes < found[0].peak_bytes
    assert found[1].step_seconds > found[0].step_seconds
