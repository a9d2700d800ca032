"""The precision is chosen only where that is asked for; that another would be faster is said."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tests.unit.planner.tasks import deep_task
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.machine import Machine
from anybatch.planner.make import precisions_of
from anybatch.plans import Plan


@cache
def planned(
    device: str, precision: str, width: int = 4096, batch: int = 4096, frontier: bool = False
) -> Plan:
    task = deep_task(
        model=lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(3)]),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        train=TensorDataset(torch.zeros(2, width)),
        global_batch=batch,
        last="wrap",
    )
    return ab.plan(task, Machine.describe(device), precision=precision, frontier=frontier)


def seconds(plan: Plan) -> float:
    assert plan.prediction
    return plan.prediction.step_seconds


@pytest.mark.parametrize(
    ("device", "precisions"),
    [
        ("h100-80gb", ("fp32", "tf32", "bf16")),
        ("24GiB", ("fp32", "tf32", "bf16")),
        ("t4", ("fp32", "fp16")),
    ],
)
def test_a_device_has_the_precisions_that_it_computes_in(device, precisions):
    assert precisions_of(Machine.describe(device).device) == precisions


@pytest.mark.parametrize(("device", "fastest"), [("h100-80gb", "bf16"), ("t4", "fp16")])
def test_of_an_open_precision_the_fastest_is_taken_and_the_others_stay_candidates(device, fastest):
    plan = planned(device, "auto")
    assert plan.choice.precision == fastest
    assert seconds(plan) == pytest.approx(seconds(planned(device, fastest)))
    slower = {c.choice.precision for c in plan.rejected if c.step_seconds > 1.5 * seconds(plan)}
    assert "fp32" in slower
    assert not any("would take about" in notice for notice in plan.notices)


def test_among_equals_the_most_exact_is_taken():
    tiny = planned("h100-80gb", "auto", 16, 8)
    assert tiny.choice.precision == "fp32"
    shown = planned("h100-80gb", "auto", 16, 8, frontier=True)
    assert shown.choice == tiny.choice
    assert {c.choice.precision for c in shown.rejected} >= {"fp32", "bf16"}


def test_float32_where_half_of_it_is_much_faster_is_told_with_the_ratio():
    plan, half = planned("h100-80gb", "fp32"), planned("h100-80gb", "bf16")
    assert plan.choice.precision == "fp32"
    (told,) = [notice for notice in plan.notices if "In bf16 a step would take about" in notice]
    ratio = float(told.split("take about ")[1].split("%")[0]) / 100
    assert ratio == pytest.approx(seconds(half) / seconds(plan), rel=0.5)
    assert not any("would take about" in notice for notice in half.notices)


@pytest.mark.parametrize("device", ["t4", "v100-16gb"])
def test_nothing_is_said_of_what_the_device_has_not(device):
    assert not any("would take about" in notice for notice in planned(device, "fp32").notices)


def test_another_name_is_refused_with_those_that_there_are():
    with pytest.raises(ab.InputError, match="where a plan is made, auto"):
        planned("t4", "half")
