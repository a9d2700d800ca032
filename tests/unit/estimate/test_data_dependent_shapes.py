"""Numbers on which shapes depend, followed beside shapes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.data import resized
from anybatch.estimate import subject_of
from anybatch.estimate.fake_op_cache import CachedOps, FakeOpCache, fake_mode
from anybatch.estimate.seconds_work import operation_of
from anybatch.estimate.stage import trace_step
from anybatch.estimate.subject import Subject
from anybatch.machine import Machine
from anybatch.plans import Choice

ABSENT = Machine.describe("24GiB").device
TOKENS, WIDTH, EXPERTS, EACH = 16, 32, 4, 2


class Routed(nn.Module):
    """A mixture of experts; `route` gives each expert its tokens."""

    def __init__(self, route: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self._route = route

    def forward(self, x_btd: Tensor) -> Tensor:
        x_nd = x_btd.flatten(0, -2)
        weight_nk, index_nk = self.gate(x_nd).softmax(-1).topk(EACH, -1)
        out_nd = torch.zeros_like(x_nd)
        for number, expert in enumerate(self.experts):
            token, slot = self._route(index_nk, number)
            if len(token) == 0:
                continue
            out = expert(x_nd[token]) * weight_nk[token, slot, None]
            out_nd = out_nd.index_add(0, token, out)
        return out_nd.view_as(x_btd)


def by_nonzero(index_nk: Tensor, number: int) -> tuple[Tensor, Tensor]:
    token, slot = (index_nk == number).nonzero(as_tuple=True)
    return token, slot


def by_one_hot(index_nk: Tensor, number: int) -> tuple[Tensor, Tensor]:
    mask_ekn = F.one_hot(index_nk, EXPERTS).permute(2, 1, 0)
    hit = torch.greater(mask_ekn.sum((-1, -2)), 0).nonzero()
    assert number in hit.flatten().tolist()
    slot, token = torch.where(mask_ekn[hit[number][0]].squeeze(0))
    return token, slot


def by_counts(index_nk: Tensor, number: int) -> tuple[Tensor, Tensor]:
    flat = index_nk.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=EXPERTS).tolist()
    mine = order.split(counts)[number]
    return mine // EACH, mine % EACH


def by_mask(index_nk: Tensor, number: int) -> tuple[Tensor, Tensor]:
    places = torch.arange(index_nk.numel()).view_as(index_nk)
    mine = places[index_nk == number]
    return mine // EACH, mine % EACH


def by_loop(index_nk: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """No operation of unknown size: numbers are read."""
    flat = index_nk.flatten()
    counts = F.one_hot(flat, EXPERTS).sum(0).tolist()
    start = sum(counts[:number])
    mine = flat.argsort()[start : start + counts[number]]
    return mine // EACH, mine % EACH


def in_place(index_nk: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """A change in place is seen through a view."""
    marks = torch.zeros(index_nk.size(0), EXPERTS, dtype=torch.int64)
    row = marks[:, number]
    marks.scatter_(1, index_nk, 1)
    token = row.nonzero().squeeze(1)
    return token, torch.zeros_like(token)


def task_of(model: Callable[[], nn.Module], loss: Any = None) -> ab.Task:
    def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    return ab.Task(
        model=model,
        loss=loss or mean_square,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=torch.randn(64, TOKENS, WIDTH),
        collate=torch.stack,
        global_batch=8,
        steps=1,
    )


def traced(subject: Subject, micro_batch: int = 8) -> dict[str, tuple[int, ...]]:
    return trace_step(subject, Choice(micro_batch=micro_batch, evaluation_batch=1), ABSENT).shapes


@pytest.mark.parametrize("route", [by_nonzero, by_one_hot, by_counts, by_mask, by_loop, in_place])
def test_each_expert_gets_an_equal_part_of_the_tokens(route: Any):
    subject = subject_of(task_of(lambda: Routed(route)))
    shapes = traced(subject)
    rows = 8 * TOKENS * EACH // EXPERTS
    assert [shapes[f"experts.{i}"] for i in range(EXPERTS)] == [(rows, WIDTH)] * EXPERTS
    (told,) = subject.assumptions
    assert "equally often" in told


def test_parts_that_cannot_be_equal_still_sum_to_the_whole():
    subject = subject_of(task_of(lambda: Routed(by_nonzero)))
    subject.op_cache.follow()
    with fake_mode() as fake, CachedOps(fake, subject.op_cache):
        scores = torch.randn(7, 5)
        chosen = scores.topk(3, -1)[1]
        parts = [len((chosen == number).nonzero()) for number in range(5)]
        rows = [len(row.unique()) for row in chosen]
    assert sum(parts) == 21
    assert max(parts) - min(parts) <= 1
    assert rows == [3] * 7  # nobody is chosen twice


def test_a_model_whose_shapes_are_fixed_follows_nothing():
    subject = subject_of(task_of(lambda: nn.Linear(WIDTH, WIDTH)))
    traced(subject)
    assert subject.op_cache.values is None
    assert subject.assumptions == ()


class Masked(nn.Module):
    """Picks what lies above zero, which nobody knows."""

    def __init__(self, pick: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH)
        self._pick = pick

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.after(self._pick(self.before(x_btd)))


@pytest.mark.parametrize(
    "pick",
    [
        lambda x: x[x[..., 0] > 0],
        lambda x: x.flatten(0, 1)[(x[..., 0] > 0).flatten().nonzero().squeeze(1)],
        lambda x: x.masked_select(x[..., :1] > 0).view(-1, WIDTH),
    ],
    ids=["index", "nonzero", "masked_select"],
)
def test_a_mask_of_unknown_numbers_picks_everything(pick: Any):
    subject = subject_of(task_of(lambda: Masked(pick)))
    assert traced(subject)["after"] == (8 * TOKENS, WIDTH)
    (told,) = subject.assumptions
    assert "all of them" in told


def test_numbers_of_a_batch_of_another_size_are_not_known():
    """They are whatever lies in fresh memory: a mask of them would take another number of tokens each
    time."""
    op_cache = FakeOpCache()
    op_cache.follow()
    assert op_cache.values is not None
    few = torch.tensor([3, 0, 5])
    with fake_mode() as fake, CachedOps(fake, op_cache):
        assert op_cache.values.of(few) is not None
        assert op_cache.values.of(resized(few, 9)) is None
        assert op_cache.values.of(resized(few, 9) != 0) is None


def test_what_is_written_over_by_unknown_numbers_is_not_known_any_more():
    op_cache = FakeOpCache()
    op_cache.follow()
    assert op_cache.values is not None
    with fake_mode() as fake, CachedOps(fake, op_cache):
        numbers = torch.arange(6)
        half = numbers[:3]
        assert op_cache.values.of(half) is not None
        half.copy_(torch.randn(3).long())
        assert op_cache.values.of(half) is None
        assert op_cache.values.of(numbers) is None


def test_a_plan_for_a_device_that_is_not_here_tells_what_was_taken_for_granted():
    plan = ab.plan(task_of(lambda: Routed(by_nonzero)), Machine.describe("24GiB"))
    assert plan.prediction is not None
    assert any("equally often" in notice for notice in plan.notices)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_a_mixture_of_experts_of_transformers_is_traced(implementation: str):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        vocab_size=50,
        use_cache=False,
    )
    config._experts_implementation = implementation

    def collate(rows: list[Tensor]) -> dict[str, Tensor]:
        ids = torch.stack(rows)
        return {"input_ids": ids, "labels": ids}

    task = ab.Task(
        model=lambda: transformers.MixtralForCausalLM(config),
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=torch.randint(50, (16, TOKENS)),
        collate=collate,
        global_batch=8,
        steps=1,
    )
    subject = subject_of(task)
    shapes = traced(subject)
    assert shapes["lm_head"] == (8, TOKENS, 50)
    assert bool(subject.assumptions) == (implementation == "eager")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 10])
def test_grouped_products_have_the_shapes_that_they_have_when_run(dtype: torch.dtype, width: int):
    def run() -> list[tuple[Any, ...]]:
        rows = torch.ones(10, 16, dtype=dtype, requires_grad=True)
        weights = torch.ones(3, width, 16, dtype=dtype, requires_grad=True)
        offsets = torch.full((3,), 10, dtype=torch.int32)
        out = F.grouped_mm(rows, weights.transpose(-2, -1), offs=offsets)
        tensors: list[Any] = [out]
        if width % 8 == 0:  # else the kernels of backward refuse its layout
            out.backward(torch.ones_like(out))
            tensors += [rows.grad, weights.grad]
        return [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]

    real = run()
    with fake_mode() as fake, CachedOps(fake, FakeOpCache()):
        assert run() == real


def test_grouped_products_count_as_products():
    grouped = torch.ops.aten._grouped_mm.default
    rows, columns = torch.empty(10, 16), torch.empty(10, 8)
    weights, offsets = torch.empty(3, 16, 8), torch.empty(3, dtype=torch.int32)
    calls = {
        "forward": (rows, weights, columns),
        "of the rows": (columns, weights.transpose(1, 2), rows),
        "of the weights": (rows.t(), columns, weights),
    }
    for left, right, result in calls.values():
        operation = operation_of(grouped, (left, right, offsets), {}, result, "forward")
        assert operation is not None
        assert operation.flops == 2 * 10 * 16 * 8


class Refused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.repeat_interleave(x[:, 0, 0].long().abs()).float() * x.sum()


def test_what_cannot_be_traced_is_told_with_its_place_and_a_remedy(
    caplog: pytest.LogCaptureFixture,
):
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Refused())

    with caplog.at_level(logging.ERROR, logger="torch._subclasses.fake_tensor"):
        plan = ab.plan(task_of(model), Machine.describe("24GiB"))
    told = plan.notices[0]
    assert "DynamicOutputShapeException: aten.repeat_interleave" in told
    assert f"{__file__}:" in told
    assert "in forward" in told
    assert "plan on the device itself" in told


def test_a_mistake_of_shape_is_one_sentence_and_no_log(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR, logger="torch._subclasses.fake_tensor"):
        plan = ab.plan(task_of(lambda: nn.Linear(WIDTH + 1, WIDTH)), Machine.describe("24GiB"))
    assert "could not be traced" in plan.notices[0]
    assert caplog.records == []
