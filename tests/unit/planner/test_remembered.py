"""The choice that a rehearsal confirmed is the choice of the next plan for the same task."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.engine import limit
from anybatch.plans import Plan
from anybatch.process.files import cache_folder
from anybatch.process.process_memory import return_freed_memory

pytestmark = pytest.mark.rehearsed

MEMORY = "85MiB"
"""Enough for 128 samples in a pass, and not for 256."""


@pytest.fixture(autouse=True)
def same_peak_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where freed memory is kept, a peak depends on where the heap has its holes."""
    monkeypatch.setattr(limit, "keep_freed_memory", return_freed_memory)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def model(width: int) -> nn.Module:
    layers = [nn.Conv2d(3, width, 1), nn.ReLU()]
    for _ in range(5):
        layers += nn.Tanh(), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * 1024, 5))


def task(width: int = 12, samples: int = 256) -> ab.Task:
    draw = torch.Generator().manual_seed(0)
    return ab.Task(
        model=lambda: model(width),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        train=TensorDataset(
            torch.randn(samples, 3, 32, 32, generator=draw),
            torch.randint(5, (samples,), generator=draw),
        ),
        global_batch=samples,
        steps=2,
    )


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one with each search."""
    from anybatch.runs import planning

    found: list[None] = []
    make_plan = planning.make_plan

    def counted(*args: object, **options: object) -> Plan:
        found.append(None)
        return make_plan(*args, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(planning, "make_plan", counted)
    return found


def stored() -> list[Path]:
    return list((cache_folder() / "plans").glob("*.json"))


def test_a_plan_for_another_optimizer_is_not_remembered(searches: list[None]):
    def by(name: str, **options: float) -> ab.Task:
        make = getattr(torch.optim, name)
        return replace(task(), optimizer=lambda params: make(params, **options))

    for one in (by("SGD", lr=0.1), by("SGD", lr=0.1, momentum=0.9), by("AdamW"), by("RMSprop")):
        ab.plan(one, memory=MEMORY)
    assert len(searches) == 4
    ab.plan(by("SGD", lr=0.2), memory=MEMORY)  # the same memory
    assert len(searches) == 4


def test_the_second_plan_is_measured_and_not_searched(searches: list[None]):
    first = ab.plan(task(), memory=MEMORY)
    second = ab.plan(task(), memory=MEMORY)
    assert len(searches) == 1
    assert second.choice == first.choice
    assert second.ladder == first.ladder
    assert second.notices == first.notices
    assert first.prediction is not None
    assert second.prediction is not None
    assert second.prediction.rehearsed
    assert second.prediction.peak_bytes >= first.prediction.peak_bytes


@pytest.mark.slow
def test_a_run_takes_the_choice_that_was_planned_before(searches: list[None]):
    planned = ab.plan(task(), memory=MEMORY)
    result = ab.train(task(), memory=MEMORY, progress=False)
    assert len(searches) == 1
    assert Plan.from_json(json.dumps(result.started.plan)).choice == planned.choice


OTHERS: dict[str, Callable[[], Plan]] = {
    "budget": lambda: ab.plan(task(), memory="90MiB"),
    "model": lambda: ab.plan(task(width=10), memory=MEMORY),
    "samples": lambda: ab.plan(task(samples=32), memory=MEMORY),
    "clipping": lambda: ab.plan(replace(task(), clip_norm=1.0), memory=MEMORY),
    "recomputation": lambda: ab.plan(task(), memory=MEMORY, recompute="none"),
    "micro-batch": lambda: ab.plan(task(), memory=MEMORY, micro_batch=2),
    "precision": lambda: ab.plan(task(), memory=MEMORY, precision="bf16"),
    "rehearsal": lambda: ab.plan(task(), memory=MEMORY, rehearsal=True),
}


@pytest.mark.nightly
def test_another_task_budget_or_wish_is_searched(searches: list[None]):
    ab.plan(task(), memory=MEMORY)
    searched: list[str] = []
    for name, other in OTHERS.items():
        before = len(searches)
        other()
        searched += [name] * (len(searches) - before)
    assert searched == list(OTHERS)  # each once


@pytest.mark.slow
def test_the_frontier_is_that_of_the_remembered_plan(searches: list[None]):
    first = ab.plan(task(), memory=MEMORY)
    second = ab.plan(task(), memory=MEMORY, frontier=True)
    assert second.choice == first.choice
    assert len(second.frontier) > len(first.frontier)
    third = ab.plan(task(), memory=MEMORY, frontier=True)
    assert [p.choice for p in third.frontier] == [p.choice for p in second.frontier]
    assert len(searches) == 2


@pytest.mark.slow
def test_a_choice_that_does_not_fit_any_more_is_searched_anew(searches: list[None]):
    first = ab.plan(task(), memory=MEMORY)
    assert first.choice.micro_batch < 256
    (path,) = stored()
    larger = first.choice.model_copy(update={"micro_batch": 256})
    path.write_text(first.model_copy(update={"choice": larger}).to_json())
    second = ab.plan(task(), memory=MEMORY)
    assert len(searches) == 2
    assert second.choice.micro_batch < 256
    assert ab.plan(task(), memory=MEMORY).choice == second.choice
    assert len(searches) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    ["{", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("", '{"version": 1}'))],
)
def test_a_damaged_file_is_as_good_as_none(searches: list[None], content: str):
    ab.plan(task(), memory=MEMORY)
    (path,) = stored()
    path.write_text(content)
    ab.plan(task(), memory=MEMORY)
    assert len(searches) == 2


def test_without_a_budget_what_is_free_now_counts(searches: list[None]):
    first = ab.plan(task())
    second = ab.plan(task())
    assert len(searches) == 1
    assert second.choice == first.choice
    free = ab.Machine.here().device.budget_bytes
    assert second.budget_bytes == pytest.approx(free, rel=0.2)


@pytest.mark.slow
def test_predicted_times_are_corrected_by_the_measured_one(searches: list[None]):
    first = ab.plan(task(), memory=MEMORY)
    for plan in (first, ab.plan(task(), memory=MEMORY, frontier=True)):
        assert plan.prediction is not None
        own = [p.step_seconds for p in plan.frontier if plan.choice.trains_like(p.choice)]
        assert own == [pytest.approx(plan.prediction.step_seconds)]
