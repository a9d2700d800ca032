"""Plans of reproducible runs: the grain is the task's, and what sums need is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.planner.tasks import deep_task
from tests.unit.planner.test_kernel_rule import task_of as images

import anybatch as ab
from anybatch.errors import NoPlanFits
from anybatch.estimate import footprint, subject_of, sums_of
from anybatch.planner.ranks import Layout, of_one_rank
from anybatch.runs.planning import PlanOptions, serves_again
from anybatch.units import format_bytes

GPU = ab.Machine.describe("24GiB")


def grained(**changes: Any) -> ab.Task:
    return deep_task(**{"global_batch": 64, "reproducible": ab.Grains(samples=4), **changes})


def test_the_grain_is_the_micro_batch_under_any_budget():
    for memory in ("1GiB", "24GiB"):
        plan = ab.plan(grained(), GPU, memory=memory)
        assert (plan.choice.micro_batch, plan.task.grain, plan.task.part) == (4, 4, 8)
        assert all(choice.micro_batch == 4 for choice in plan.ladder)
        assert plan.parallel == "single"
    told = dict(plan.explain())["reproducible"]
    assert "grains of 4 in 8 parts of 2 grains each" in told


@pytest.mark.parametrize(
    ("global_batch", "ghost", "grains", "cut"),
    [
        (512, None, ab.Grains(), (32, 64)),
        (512, 48, ab.Grains(), (48, 96)),
        (100, None, ab.Grains(), (13, 13)),
        (1, None, ab.Grains(), (1, 1)),
        (5, None, ab.Grains(), (1, 1)),
        (5, 32, ab.Grains(), (5, 5)),
        (1000, None, ab.Grains(samples=1000), (1000, 1000)),
        (1000, None, ab.Grains(parts=64), (16, 16)),
        (1_000_000, None, ab.Grains(parts=64), (32, 15648)),
    ],
)
def test_how_a_step_is_cut(global_batch, ghost, grains, cut):
    assert grains.cut(global_batch, ghost) == cut


def test_one_rank_holds_three_sums_beside_its_gradients_and_eight_hold_none():
    one = ab.plan(grained(), memory="1GiB", recompute="none")
    whole = ab.plan(deep_task(global_batch=64), memory="1GiB")
    subject = of_one_rank(subject_of(grained()), Layout())
    peak = footprint(subject, one.choice, ab.Machine.here("1GiB").device).peak
    gradients = 4 * one.task.trainable_parameters
    assert 4 * gradients <= peak.by_kind["gradients"] <= 4.1 * gradients  # places are aligned
    assert not subject.speaks
    sums = sums_of(one.task, (1.0,) * 8)
    assert (sums.kept, sums.slots) == (0, 1)
    assert sums_of(one.task, (1.0,) * 3).slots == 2
    assert sums_of(whole.task, (1.0,)) is None


def test_a_grain_that_does_not_fit_is_refused():
    with pytest.raises(NoPlanFits, match="a grain of 4 samples of the reproducible run") as caught:
        ab.plan(grained(), GPU, memory="642MiB")
    assert "smaller grains (reproducible=anybatch.Grains(n))" in str(caught.value)
    least = caught.value.least_bytes
    assert least is not None
    assert f"Give it at least {format_bytes(least)}" in str(caught.value)
    assert ab.plan(grained(), GPU, memory=least).choice.micro_batch == 4


def test_more_ranks_than_parts_are_told():
    plan = ab.plan(grained(), ab.Machine.describe("16 x 24GiB"))
    assert plan.parallel == "replicate"
    assert plan.balance == "fixed"
    assert any("leaves 8 of 16 ranks without work" in notice for notice in plan.notices)


def test_nothing_is_tuned_by_time():
    plan = ab.plan(images(reproducible=ab.Grains(samples=8)), GPU)
    assert plan.kernels.channels_last
    assert not plan.kernels.autotune
    assert any("no measured time may decide" in notice for notice in plan.notices)


def test_what_depends_on_the_cut_elsewhere_is_not_told():
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(64, 64))

    free = ab.plan(deep_task(model=model, global_batch=64), GPU)
    fixed = ab.plan(grained(model=model), GPU)
    assert any("random numbers" in notice for notice in free.notices)
    assert not any("random numbers" in notice for notice in fixed.notices)


def test_a_resumed_run_keeps_its_plan_only_with_its_grains():
    plan = ab.plan(grained())
    assert serves_again(plan, grained(), None, PlanOptions())
    assert not serves_again(plan, grained(reproducible=ab.Grains(samples=8)), None, PlanOptions())
    assert not serves_again(plan, grained(reproducible=False), None, PlanOptions())
