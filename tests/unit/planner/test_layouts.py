"""Whether the model is divided over the ranks is weighed like everything else."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests.unit.planner.tasks import deep_task
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.estimate import subject_of
from anybatch.machine import Machine
from anybatch.planner import Wishes, layouts_of, make_plan
from anybatch.planner.costs import Costs
from anybatch.planner.exchange import seconds_of_exchange
from anybatch.planner.knobs import knobs
from anybatch.planner.ranks import Layout, rank_of
from anybatch.planner.setting import setting_of
from anybatch.plans import Exchange, Link, Plan, Recompute

GIB = 1 << 30
WIDTH, BLOCKS = 2048, 8


class Block(nn.Module):
    """(B, WIDTH) to (B, WIDTH); 64 MiB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Heavy(nn.Module):
    """Weights, gradients and Adam's states: 2 GiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean(dim=1, keepdim=True)


class Scaled(Heavy):
    """With a parameter that cannot be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def heavy_task(**changes: Any) -> ab.Task:
    data = TensorDataset(torch.zeros(2, WIDTH), torch.zeros(2, 1))
    fields = {"model": Heavy, "train": data, "global_batch": 1 << 17, "last": "wrap"}
    return deep_task(**{**fields, **changes})


@cache
def planned(budget: float, parallel: Any = None, device: str = "h100-80gb", **wishes: Any) -> Plan:
    machine = Machine.describe(device, count=4).with_budget(int(budget * GIB))
    return ab.plan(heavy_task(), machine, parallel=parallel, **wishes)


def seconds(plan: Plan) -> float:
    assert plan.prediction
    return plan.prediction.step_seconds


@pytest.mark.slow
def test_the_faster_layout_is_taken_and_the_other_stays_with_its_reason():
    plan = planned(3.9)
    whole, divided = planned(3.9, "replicate"), planned(3.9, "shard")
    assert plan.parallel == "shard"
    assert plan.choice == divided.choice
    assert seconds(plan) == pytest.approx(seconds(divided))
    assert 1.03 * seconds(plan) < seconds(whole)
    assert any("divided, which is predicted to be faster" in notice for notice in plan.notices)
    others = [c for c in plan.rejected if c.parallel == "replicate"]
    assert others
    for other in others:
        slower = other.step_seconds > 1.01 * seconds(plan)
        assert slower or "planned for by" in other.reason


@pytest.mark.slow
def test_over_a_slow_link_the_model_stays_whole():
    device = Machine.describe("h100-80gb", count=4).with_budget(int(3.7 * GIB)).device
    subject, wishes = subject_of(heavy_task()), Wishes()

    def made(link: Link | None) -> Plan:
        layouts = layouts_of([device] * 4, None, link=link)
        return make_plan(subject, device, wishes, limited=True, layouts=layouts)

    assert made(None).parallel == "shard"
    slow = Link(bytes_per_second=1e9, hop_seconds=1e-4, measured=True)
    plan = made(slow)
    assert plan.parallel == "replicate"
    assert plan.link == slow


def test_where_memory_is_plenty_each_rank_has_the_whole_model():
    plan = planned(64.0, frontier=True)
    assert plan.parallel == "replicate"
    assert not any("divided" in notice for notice in plan.notices)
    asked = plan.choice.micro_batch, plan.choice.recompute
    alike = [c for c in plan.rejected if (c.choice.micro_batch, c.choice.recompute) == asked]
    divided = [c for c in alike if c.parallel == "shard"]
    assert [c.choice.optimizer_states for c in divided] == ["device", "host"]
    assert plan.prediction
    peaks = [plan.prediction.peak_bytes, *(c.peak_bytes for c in divided)]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow
def test_where_the_whole_model_fits_no_rank_it_is_divided():
    with pytest.raises(ab.NoPlanFits):
        planned(2.6, "replicate")
    plan = planned(2.6)
    assert plan.parallel == "shard"
    assert any("with its state does not fit on each rank" in notice for notice in plan.notices)


@pytest.mark.nightly
def test_the_least_memory_is_that_of_the_leanest_layout():
    least = []
    for parallel in ("replicate", "shard", None):
        with pytest.raises(ab.NoPlanFits) as caught:
            planned(1.0, parallel)
        assert caught.value.least_bytes
        least.append(caught.value.least_bytes)
    assert least[2] == min(least)
    told = str(caught.value)
    assert "divided over 4 ranks" in told
    assert planned(least[2] / GIB).parallel == "shard"


@pytest.mark.slow
def test_where_a_part_of_the_model_is_too_much_it_lies_in_host_memory():
    plan = planned(2.2)
    assert plan.parallel == "shard"
    assert plan.choice.optimizer_states == "host"
    assert {choice.optimizer_states for choice in plan.ladder} == {
        "host"
    }  # it is not moved in a run
    assert plan.prediction
    on_device = {"parameters", "gradients", "optimizer state"} & plan.prediction.by_kind.keys()
    assert sum(plan.prediction.by_kind[kind] for kind in on_device) == 0
    assert seconds(plan) > seconds(planned(3.9))


def test_states_that_were_on_the_device_stay_there():
    plan = planned(3.9)
    assert {choice.optimizer_states for choice in (plan.choice, *plan.ladder)} == {"device"}


def test_groups_of_ranks_that_divide_a_model_each_hold_more_and_tell_each_other_less():
    wholly, halves = (
        planned(64.0, sharding=ab.Sharding(over=over), micro_batch=64) for over in (4, 2)
    )
    assert wholly.parallel == halves.parallel == "shard"
    assert wholly.prediction
    assert halves.prediction
    for kind in ("parameters", "gradients", "optimizer state"):
        assert halves.prediction.by_kind[kind] == 2 * wholly.prediction.by_kind[kind]
    parts = [plan.prediction.step_parts for plan in (wholly, halves)]
    assert parts[1]["exchange of gradients"] < parts[0]["exchange of gradients"]
    assert parts[1]["update"] == pytest.approx(2 * parts[0]["update"])
    assert "groups of 2, which replicate each other" in dict(halves.explain())["ranks"]


def test_gradients_that_are_kept_whole_cross_once_and_take_their_bytes():
    often, once = (
        planned(20.0, sharding=ab.Sharding(reduce=reduce), micro_batch=64, device="rtx-4090")
        for reduce in ("every pass", "last pass")
    )
    assert often.prediction
    assert once.prediction
    assert once.prediction.by_kind["gradients"] == 4 * often.prediction.by_kind["gradients"]
    parts = [plan.prediction.step_parts["exchange of gradients"] for plan in (often, once)]
    assert parts[1] < 0.8 * parts[0]


def test_one_rank_replicates_nothing():
    plan = ab.plan(deep_task(), Machine.describe("h100-80gb"), parallel="replicate")
    assert plan.parallel == "single"


def test_groups_have_to_divide_the_ranks_and_a_model_that_is_to_be_divided():
    machine = Machine.describe("h100-80gb", count=4)
    with pytest.raises(ab.InputError, match="over 3 ranks, which does not divide"):
        ab.plan(heavy_task(), machine, sharding=ab.Sharding(over=3))
    with pytest.raises(ab.InputError, match="parallel is 'replicate' and sharding is given"):
        ab.plan(heavy_task(), machine, parallel="replicate", sharding=ab.Sharding(over=2))


def test_a_model_that_cannot_be_divided_is_not():
    machine = Machine.describe("h100-80gb", count=4)
    plan = ab.plan(heavy_task(model=Scaled), machine.with_budget(3 * GIB))
    assert plan.parallel == "replicate"
    assert {c.parallel for c in plan.rejected} == {"replicate"}
    with pytest.raises(ab.InputError, match="cannot be divided over ranks"):
        ab.plan(heavy_task(model=Scaled), machine, parallel="shard")


def test_an_exchange_that_is_not_exact_is_between_whole_models():
    assert planned(3.9, exchange=Exchange(compress="bf16")).parallel == "replicate"


def costs_of(parallel: Any, device: str = "h100-80gb") -> Costs:
    where = Machine.describe(device, count=4).device
    layout = Layout(parallel, (1.0,) * 4)
    rank = rank_of(subject_of(heavy_task()), layout, where)
    return Costs(rank, setting_of(rank, where, layout=layout))


def test_knobs_are_those_of_a_rank_that_holds_a_part():
    costs = costs_of("shard")
    choice = costs.choice(Recompute(), 1024)
    here = costs.peak(choice)
    found = {knob.what: knob.peak_bytes for knob in knobs(costs, choice)}
    assert all(peak < here for peak in found.values())
    assert "8 devices, state divided" in found
    assert "state divided over the 4 devices" not in found
    assert "8-bit optimizer (torchao)" not in found


def test_the_devices_that_there_are_come_before_more_of_them():
    costs = costs_of("replicate")
    choice = costs.choice(Recompute(), 1024)
    found = {knob.what: knob for knob in knobs(costs, choice)}
    own, more = found["state divided over the 4 devices"], found["8 devices, state divided"]
    assert own.peak_bytes == costs_of("shard").peak(choice)
    assert more.peak_bytes < own.peak_bytes
    assert not own.remark
    assert more.remark


def exchanged(parallel: Any, micro_batch: int, passes: int) -> float:
    """Over links that are slow for such a device."""
    costs = costs_of(parallel, "rtx-4090")
    choice = costs.choice(Recompute(), micro_batch)
    return seconds_of_exchange(costs.subject, costs.setting, choice, passes)


def test_gradients_cross_once_per_step_and_weights_in_every_pass():
    few, many = (exchanged("replicate", 1, passes) for passes in (1, 64))
    assert few == many
    few, more, many = (exchanged("shard", 1, passes) for passes in (1, 2, 64))
    assert many - few == pytest.approx(63 * (more - few))  # and one vote per step
    assert 0 < few - (more - few) < 0.1 * few
    assert few > exchanged("replicate", 1, 1)


def test_what_crosses_beside_the_computing_takes_no_time_but_for_one_group():
    small, large = (exchanged("shard", size, 1) for size in (1, 1 << 15))
    assert large < 0.2 * small
    assert large > 0
