"""Passes over real samples find the choice that fits, whether a trace has predicted it or not."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from tests.equivalence.reference import plan_for
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.compute import Replica
from anybatch.engine import Rehearsed
from anybatch.errors import NoPlanFits
from anybatch.planner import kernel_rule
from anybatch.planner.ranks import reserve_of
from anybatch.plans import Candidate, KernelChoices, Prediction, Recompute, Rival
from anybatch.rank.rehearsing import Rehearsing
from anybatch.units import format_bytes

WIDTH = 64
PARAMETERS = 4 * WIDTH * WIDTH
FIXED = 5 << 20


def task_of(global_batch: int, ghost: int | None) -> ab.Task:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    if ghost:
        model.append(nn.BatchNorm1d(WIDTH, affine=False))
    return ab.Task(
        model=model,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.AdamW(params),
        train=TensorDataset(torch.zeros(global_batch, WIDTH)),
        global_batch=global_batch,
        ghost_batch=ghost,
        steps=1,
    )


def rehearsed(plan, peak_of, task, in_default_layout=None, seconds=None, **options):
    """What is planned where passes under a choice take `peak_of` it, and which choices were tried."""
    model = task.build_model()
    replica = Replica(
        model,
        lambda: task.optimizer(task.parameters_of(model)),
        task.loss,
        plan.choice,
        torch.device("cpu"),
        task.global_batch,
    )
    tried = []

    def rehearse(choice, kernels):
        tried.append(choice)
        if kernels is not None:
            return in_default_layout
        used = peak_of(choice)
        took = (seconds or {}).get(choice.micro_batch, 0.01)
        return None if used is None else Rehearsed(took, used)

    try:
        return Rehearsing(plan, replica, rehearse, PARAMETERS, **options).plan(), tried
    finally:
        replica.close()


def untraced(task, budget, per_sample, bend=0):
    """The same for a plan without a prediction, and the sizes that were tried."""
    unit = task.ghost_batch or 1
    plan = plan_for(task, min(unit, task.global_batch)).model_copy(update={"budget_bytes": budget})

    def peak_of(choice):
        size = choice.micro_batch
        used = FIXED + per_sample * size + bend * size * size
        return used if used <= budget else None

    found, tried = rehearsed(plan, peak_of, task)
    return found, [choice.micro_batch for choice in tried]


@given(
    st.integers(1, 4096),
    st.sampled_from([None, 4, 7]),
    st.integers(1 << 10, 4 << 20),
    st.integers(0, 2000),
    st.integers(4, 512),
)
def test_what_is_planned_was_run_and_is_the_largest_that_fitted(
    batch, ghost, per_sample, bend, mebibytes
):
    budget = mebibytes << 20
    task = task_of(batch, ghost)
    unit = min(ghost or 1, batch)
    room = budget - reserve_of(budget, "cpu")

    def peak(size):
        return FIXED + per_sample * size + bend * size * size + 2 * PARAMETERS

    try:
        found, tried = untraced(task, budget, per_sample, bend)
    except NoPlanFits:
        assert peak(unit) > room
        return
    size = found.choice.micro_batch
    assert len(tried) <= 8
    assert size % unit == 0 or size == batch
    assert size == max(one for one in tried if peak(one) <= room)
    assert found.prediction.peak_bytes == peak(size)
    assert found.prediction.rehearsed
    assert sum(found.prediction.by_kind.values()) == peak(size)


def test_nearly_the_largest_that_fits_is_found():
    budget = 64 << 20
    found, tried = untraced(task_of(4096, None), budget, 100 << 10)
    most = (budget - reserve_of(budget, "cpu") - FIXED - 2 * PARAMETERS) // (100 << 10)
    assert 0.85 * most <= found.choice.micro_batch <= most
    assert len(tried) <= 6


def test_a_budget_that_is_not_there_is_no_limit():
    task = task_of(96, None)
    assert plan_for(task, 32).budget_bytes is None
    found, _ = untraced(task, 1 << 40, 1 << 20)
    assert found.choice.micro_batch == 96


BUDGET = 100 << 20
ROOM = BUDGET - reserve_of(BUDGET, "cpu")
BLOCKS = Recompute(blocks=("0",))


def traced(predicted=90 << 20, **changes):
    """A plan of 64 in micro-batches of 16 that was predicted to take so many bytes."""
    task = task_of(64, None)
    plan = plan_for(task, 16)
    choice = plan.choice
    leaner = [choice.model_copy(update={"micro_batch": size}) for size in (8, 4, 2, 1)]
    leaner.append(choice.model_copy(update={"micro_batch": 1, "recompute": BLOCKS}))
    told = Prediction(
        peak_bytes=predicted,
        evaluation_peak_bytes=1 << 20,
        step_seconds=1.0,
        step_parts={"forward": 0.3, "backward": 0.6, "update": 0.1},
        by_kind={"activations": predicted},
    )
    given = {"prediction": told, "ladder": tuple(leaner), "budget_bytes": BUDGET, **changes}
    return task, plan.model_copy(update=given)


def test_a_prediction_that_holds_costs_one_try():
    task, plan = traced()
    found, tried = rehearsed(plan, lambda choice: 92 << 20, task)
    assert [choice.micro_batch for choice in tried] == [16]
    assert found.choice == plan.choice
    peak = (92 << 20) + 2 * PARAMETERS  # the optimizer's states come with the first update
    assert found.prediction.peak_bytes == peak
    assert found.prediction.by_kind["allocator and libraries"] == peak - (90 << 20)
    assert sum(found.prediction.by_kind.values()) == peak
    # 64 samples at 10 ms, and the update as it was predicted.
    assert found.prediction.step_seconds == pytest.approx(0.74)


def test_what_is_remembered_is_measured_anew():
    task, plan = traced()
    before, _ = rehearsed(plan, lambda choice: 92 << 20, task)
    found, _ = rehearsed(before, lambda choice: 94 << 20, task)
    peak = (94 << 20) + 2 * PARAMETERS
    assert found.prediction.by_kind["allocator and libraries"] == peak - (90 << 20)
    assert sum(found.prediction.by_kind.values()) == found.prediction.peak_bytes == peak


def test_the_reasons_are_those_of_the_choice_that_was_taken():
    task, plan = traced()
    choices = [plan.choice.model_copy(update={"micro_batch": size}) for size in (32, 8, 12, 4)]
    facts = [(95, 0.9, "fits, but ..."), (50, 1.2, "fits, but ..."), (70, 1.1, "fits, but ..."),
             (30, 2.4, "fits, but ...")]  # fmt: skip
    choices.append(choices[-1].model_copy(update={"recompute": BLOCKS}))
    facts.append((80, 0.9, "fits, but ..."))
    rejected = [
        Candidate(choice=choice, peak_bytes=mebibytes << 20, step_seconds=seconds, reason=reason)
        for choice, (mebibytes, seconds, reason) in zip(choices, facts, strict=True)
    ]
    plan = plan.model_copy(update={"rejected": tuple(rejected)})
    found, _ = rehearsed(plan, lambda choice: choice.micro_batch * 11 << 20, task)
    assert found.choice.micro_batch == 8
    assert found.rejected[-1].reason == "fits, but was not rehearsed; predicted to be 25% faster"
    told = {one.choice.micro_batch: one.reason for one in found.rejected[:-1]}
    larger = "is larger than what fitted in the rehearsal"
    assert told == {
        16: "needed more memory in the rehearsal than the budget leaves",
        32: larger,
        12: larger,
        4: "fits, but is predicted to take 2.0 times as long",
    }


def test_a_choice_that_is_too_large_is_replaced_by_the_largest_that_is_not():
    task, plan = traced()
    found, tried = rehearsed(plan, lambda choice: (choice.micro_batch * 7 << 20) + 1, task)
    assert [choice.micro_batch for choice in tried] == [16, 8, 13]
    assert found.choice.micro_batch == 13
    assert [c.micro_batch for c in found.ladder] == [6, 3, 1, 1]
    assert found.ladder[-1].recompute == BLOCKS


def test_what_takes_memory_whatever_the_size_leaves_no_room_unused():
    task, plan = traced()
    found, tried = rehearsed(plan, lambda choice: (60 << 20) + (choice.micro_batch * 5 << 19), task)
    assert [choice.micro_batch for choice in tried] == [16, 8, 13]  # (96 - 60) / 2.5 is 14.4
    assert found.choice.micro_batch == 13


@pytest.mark.parametrize("per_sample", range(7_800_000, 12_000_000, 300_000))
def test_peaks_that_vary_a_little_lead_to_the_same_size(per_sample):
    task, plan = traced()
    found, _ = rehearsed(plan, lambda choice: choice.micro_batch * per_sample, task)
    assert found.choice.micro_batch == 8  # the 64 samples of a step in whole passes


def test_much_room_is_used_only_where_memory_bound_the_choice():
    task, plan = traced()
    found, tried = rehearsed(plan, lambda choice: choice.micro_batch * 2 << 20, task)
    assert [choice.micro_batch for choice in tried] == [16, 32]  # 64 would take 128 MiB
    assert found.choice.micro_batch == 32
    task, plan = traced(predicted=40 << 20)
    found, tried = rehearsed(plan, lambda choice: choice.micro_batch * 2 << 20, task)
    assert [choice.micro_batch for choice in tried] == [16]


def test_what_does_not_fit_recomputes_and_at_last_returns_freed_memory():
    def only(allowed):
        return lambda choice: 1 << 20 if allowed(choice) else None

    task, plan = traced(enforced=True)
    found, _ = rehearsed(plan, only(lambda c: c.recompute == BLOCKS), task)
    assert found.choice.recompute == BLOCKS
    assert found.choice.freed_memory == "kept"
    found, _ = rehearsed(plan, only(lambda c: c.freed_memory == "returned"), task)
    assert found.choice.freed_memory == "returned"
    assert found.choice.recompute == Recompute()
    # A whole batch that would fit so is left to the plan that cuts it, which is faster.
    whole = {"is_fixed": True, "may_return": False}
    found, tried = rehearsed(plan, only(lambda c: c.freed_memory == "returned"), task, **whole)
    assert found is None
    assert [choice.freed_memory for choice in tried] == ["kept"]
    # Where no budget is enforced freed memory is never returned.
    task, plan = traced()
    with pytest.raises(NoPlanFits):
        rehearsed(plan, only(lambda c: c.freed_memory == "returned"), task)


def test_the_least_budget_that_is_named_is_one_under_which_it_fits():
    task, plan = traced()
    least = 130 << 20

    def peak_of(choice):
        return least + (choice.micro_batch << 20) + (5 << 20) * (choice.recompute == BLOCKS)

    with pytest.raises(NoPlanFits, match=r"micro-batch 1, fp32, recompute none") as refused:
        rehearsed(plan, peak_of, task)
    said = f"the budget of {format_bytes(BUDGET)}, of which {format_bytes(ROOM)} are planned for:"
    assert said in str(refused.value)
    named = refused.value.least_bytes
    needs = least + (1 << 20) + 2 * PARAMETERS
    assert needs + 2 * reserve_of(needs, "cpu") <= named < 1.1 * needs
    found, _ = rehearsed(plan.model_copy(update={"budget_bytes": named}), peak_of, task)
    assert found.prediction.peak_bytes <= named - reserve_of(named, "cpu")


def test_a_fixed_choice_is_measured_and_not_changed():
    task, plan = traced()
    found, tried = rehearsed(plan, lambda choice: 20 << 20, task, is_fixed=True)
    assert tried == [plan.choice]
    assert found.choice == plan.choice
    found, tried = rehearsed(plan, lambda choice: 200 << 20, task, is_fixed=True)
    assert tried == [plan.choice]
    assert found is None


@pytest.mark.parametrize(
    ("seconds", "bytes_", "stays"),
    [(0.005, 92 << 20, False), (0.0098, 92 << 20, True), (0.005, 99 << 20, True)],
)
def test_images_are_channels_last_unless_torch_s_layout_is_measured_to_be_faster(
    seconds, bytes_, stays
):
    task, plan = traced()
    kernels = KernelChoices(channels_last=True)
    plan = plan.model_copy(update={"kernels": kernels, "notices": (kernel_rule._CHANNELS_LAST,)})
    found, tried = rehearsed(
        plan,
        lambda choice: 90 << 20,
        task,
        in_default_layout=Rehearsed(seconds, bytes_),
    )
    assert len(tried) == 2
    assert found.kernels.channels_last == stays
    if stays:
        assert found.notices == plan.notices
    else:
        assert found.prediction.peak_bytes == (92 << 20) + 2 * PARAMETERS
        assert found.prediction.step_seconds == pytest.approx(0.1 + 64 * 0.005)
        (notice,) = found.notices
        assert "default layout" in notice
        assert "take 320 ms in it and 640 ms on channels-last images" in notice


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ({8: 0.0097, 4: 0.02}, 16),  # too little faster to be sure of
        ({8: 0.008, 4: 0.02}, 8),
        ({8: 0.008, 4: 0.0079}, 8),
        ({8: 0.008, 4: 0.007}, 4),
        ({8: 0.02, 2: 0.001}, 16),  # 2 does not fit
    ],
)
def test_of_rivals_the_one_that_is_measured_to_be_faster_is_taken(seconds, taken):
    task, plan = traced()
    rivals = [
        Rival(
            choice=(choice := plan.choice.model_copy(update={"micro_batch": size})),
            ladder=plan.ladder[-1:],
            prediction=plan.prediction.model_copy(update={"choice": choice}),
        )
        for size in (8, 4, 2)
    ]
    plan = plan.model_copy(update={"rivals": tuple(rivals)})
    found, tried = rehearsed(
        plan,
        lambda choice: 200 << 20 if choice.micro_batch == 2 else 92 << 20,
        task,
        seconds=seconds,
    )
    assert [choice.micro_batch for choice in tried] == [16, 8, 4, 2]
    assert found.choice.micro_batch == taken
    assert not found.rivals
    assert found.prediction.choice == found.choice
    # 64 samples, and the update as it was predicted.
    assert found.prediction.step_seconds == pytest.approx(0.1 + 64 * seconds.get(taken, 0.01))
    if taken != 16:
        assert found.ladder == plan.ladder[-1:]


def test_no_time_decides_the_layout_of_a_reproducible_run():
    task, plan = traced()
    identity = plan.task.model_copy(update={"grain": 16, "part": 16})
    changes = {"kernels": KernelChoices(channels_last=True), "task": identity}
    found, tried = rehearsed(plan.model_copy(update=changes), lambda choice: 90 << 20, task)
    assert len(tried) == 1
    assert found.kernels.channels_last


class Branching(nn.Module):
    """What a trace on fake tensors cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 256), nn.Linear(256, 1)

    def forward(self, x):
        hidden = self.first(x).relu()
        return self.second(hidden if hidden.detach().numpy().any() else -hidden)


@pytest.fixture
def branching():
    data = TensorDataset(torch.randn(256, WIDTH), torch.randn(256, 1))
    return ab.Task(
        model=Branching,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params),
        train=data,
        global_batch=128,
        steps=2,
    )


def test_a_model_that_no_trace_can_follow_is_measured(branching):
    before = torch.get_rng_state()
    plan = ab.plan(branching)
    assert torch.equal(torch.get_rng_state(), before)
    assert plan.prediction is not None
    assert "measured" in plan.prediction.method
    assert plan.prediction.step_seconds > 0
    assert any("measured instead" in notice for notice in plan.notices)
    assert ab.Plan.from_json(plan.to_json()) == plan


def test_the_samples_of_a_stream_are_not_spent_on_measuring(branching):
    rows = [(torch.randn(WIDTH), torch.randn(1)) for _ in range(256)]

    class Once(torch.utils.data.IterableDataset):
        def __iter__(self):
            while rows:
                yield rows.pop()

    plan = ab.plan(dataclasses.replace(branching, train=Once()))
    assert len(rows) >= 254  # two were looked at for their shapes
    assert plan.prediction is None
    assert any("Nothing is predicted" in notice for notice in plan.notices)


@pytest.mark.parametrize(
    ("micro_batch", "expected"), [(8, "False False False"), (4, "False True False")]
)
def test_passes_have_gradients_to_add_to_where_those_of_a_step_do(micro_batch, expected, capfd):
    def loss(model, batch):
        print(model[0].weight.grad is not None)  # a list would be restored after the passes
        return model(batch[0]).square().mean()

    task = dataclasses.replace(task_of(8, None), loss=loss)
    with ab.Session(task, plan_for(task, micro_batch)) as session:
        session.rehearsed(is_fixed=True)
    assert capfd.readouterr().out.split() == expected.split()
