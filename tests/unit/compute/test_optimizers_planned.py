"""What a plan makes of the update, and of where the optimizer's states lie."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from tests.unit.planner.tasks import deep_task
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.errors import NoPlanFits
from anybatch.machine import Machine
from anybatch.plans import Choice, Plan
from anybatch.process.cuda_driver import TYPICAL_CONTEXT_BYTES

MIB = 1 << 20
WIDTH, LAYERS = 2048, 16
WEIGHTS = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
CONTEXT = TYPICAL_CONTEXT_BYTES


def wide() -> nn.Module:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    )


def wide_task(optimizer: Any = torch.optim.AdamW, **changes: Any) -> ab.Task:
    return deep_task(
        model=wide,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=partial(optimizer, lr=1e-3),
        train=TensorDataset(torch.zeros(64, WIDTH)),
        global_batch=64,
        **changes,
    )


@cache
def planned(bytes_: int, optimizer: Any = torch.optim.AdamW, frontier: bool = False) -> Plan:
    machine = Machine.describe(f"{bytes_ // MIB}MiB")
    return ab.plan(wide_task(optimizer), machine, frontier=frontier)


def predicted(plan: Plan) -> Any:
    assert plan.prediction is not None
    return plan.prediction


class Own(torch.optim.AdamW):
    """May do anything."""


def test_a_fused_update_stores_nothing_in_between():
    plan = planned(4 << 30)
    assert plan.choice.update == "fused"
    first, later = predicted(plan).commit_bytes
    assert first == pytest.approx(2 * WEIGHTS, rel=0.01)  # the states
    assert later < 0.01 * WEIGHTS
    assert ("update", "fused: one kernel, no temporary tensors") in plan.explain()


def test_on_a_cpu_too():
    plan = ab.plan(wide_task(), memory=4 << 30)
    assert plan.choice.update == "fused"
    assert predicted(plan).commit_bytes[1] < 0.01 * WEIGHTS


def test_without_a_fused_kernel_it_is_done_in_parts():
    plan = planned(4 << 30, torch.optim.RMSprop)
    assert plan.choice.update == "in parts"
    _, later = predicted(plan).commit_bytes
    assert 32 * MIB < later < 0.6 * WEIGHTS


def test_states_go_to_the_host_where_nothing_else_fits():
    budget = CONTEXT + int(3.3 * WEIGHTS)  # weights, gradients and states are four times
    plan = planned(budget)
    assert plan.choice.optimizer_states == "host"
    assert predicted(plan).by_kind["optimizer state"] < 1000  # numbers of steps
    assert predicted(plan).peak_bytes <= budget
    ample = planned(8 << 30)
    assert ample.choice.optimizer_states == "device"
    # They come and go, one after the other, at the 10 GB/s of a device of which no more is known.
    crossing = predicted(plan).step_parts["update"] - predicted(ample).step_parts["update"]
    assert crossing == pytest.approx(2 * 2 * WEIGHTS / 1e10, rel=0.01)


def test_else_they_stay_and_the_host_is_a_candidate_and_the_last_rung():
    plan = planned(8 << 30, frontier=True)
    assert plan.ladder[-1].optimizer_states == "host"
    assert all(rung.optimizer_states == "device" for rung in plan.ladder[:-1])
    asked = plan.choice.micro_batch, plan.choice.recompute
    alike = [c for c in plan.rejected if (c.choice.micro_batch, c.choice.recompute) == asked]
    (candidate,) = [c for c in alike if c.choice.optimizer_states == "host"]
    assert candidate.peak_bytes < predicted(plan).peak_bytes - 1.2 * WEIGHTS
    assert "times as long" in candidate.reason


def test_not_for_an_optimizer_that_may_look_at_all_parameters():
    with pytest.raises(NoPlanFits) as caught:
        planned(CONTEXT + int(3.3 * WEIGHTS), Own)
    assert "host memory" not in str(caught.value)


@pytest.mark.slow
def test_what_would_fit_if_nothing_does():
    with pytest.raises(NoPlanFits) as caught:
        planned(CONTEXT + int(1.5 * WEIGHTS))
    told = str(caught.value)
    assert "optimizer states in host memory) is predicted to need" in told
    assert "update in backward" in told


def test_the_plan_file_keeps_both(tmp_path):
    choice = Choice(micro_batch=1, evaluation_batch=1, update="in parts", optimizer_states="host")
    plan = planned(8 << 30).model_copy(update={"choice": choice})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").choice == choice


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "where all memory is the host's: make it 'device'"),
        ({"choice": {"precision": "fp16"}}, "take bf16"),
        ({"ladder": ({"micro_batch": 1, "evaluation_batch": 1},)}, "is not moved in a run"),
        ({"sharding": {"over": 2}}, "does not divide the number of ranks, 1"),
        ({"parallel": "single", "sharding": {"over": 1}}, "which divides no model"),
    ],
)
def test_what_a_divided_model_cannot_have_is_told(changes, words):
    choice = {"micro_batch": 1, "evaluation_batch": 1, "optimizer_states": "host"}
    plan = planned(8 << 30).model_dump() | {"rivals": (), "ladder": (), "kernels": {}}
    fields = plan | {"parallel": "shard"} | changes | {"choice": choice | changes.get("choice", {})}
    with pytest.raises(ValueError, match=words):
        Plan(**fields)
