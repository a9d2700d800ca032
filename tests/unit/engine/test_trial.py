"""A trial takes the fastest choice by the clock, leaves no trace, and is made only where it pays."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from tests.equivalence.reference import plan_for
from tests.unit.engine.noisy import BATCH, keep_time_by, loss, noisy_task, told
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.engine.trial import affordable
from anybatch.estimate import subject_of
from anybatch.events import CompileDecided, OutOfMemory, Replanned, Tried
from anybatch.plans import KernelChoices, Rival


@pytest.fixture
def task():
    return noisy_task()


def with_rivals(task, micro_batch, others, **changes):
    """A plan of `micro_batch` whose rivals have the others; all are predicted alike."""
    plan = plan_for(task, micro_batch)
    rivals = tuple(
        Rival(
            choice=plan.choice.model_copy(update={"micro_batch": size}),
            prediction=told(),
        )
        for size in others
    )
    return plan.model_copy(update={"rivals": rivals, "prediction": told(), **changes})


class Clock:
    """Passes of so many samples take so many seconds by it."""

    def __init__(self, seconds):
        self.seconds, self.now = seconds, 0.0

    def __call__(self):
        return self.now


def run(monkeypatch, task, plan, seconds, num_steps=3, trial=True, failing=None, idle=0.0):
    """The weights after some steps, what was told, and the plan that was followed. In each pass other
    processes have the core for `idle` seconds of its time."""
    clock, events = Clock(seconds), []
    keep_time_by(monkeypatch, clock, idle)

    def counted(model, batch):
        size = len(batch[0])
        clock.now += clock.seconds.get(size, 0.0)
        if size == failing:
            raise MemoryError
        return loss(model, batch)

    task = dataclasses.replace(task, loss=counted)
    with ab.Session(task, plan, [events.append], trial=trial) as session:
        for _, _ in zip(range(num_steps), session.steps(), strict=False):
            pass
        state = {name: t.detach().clone() for name, t in session.model.state_dict().items()}
        return state, events, session.plan


def of_kind(events, kind):
    return [event for event in events if isinstance(event, kind)]


def test_the_fastest_is_followed_and_nothing_of_the_trial_remains(monkeypatch, task):
    plan = with_rivals(task, 2, (4, 6, 12))
    # Per sample: 1.0, 0.75, 0.5, 0.6.
    seconds = {2: 2.0, 4: 3.0, 6: 3.0, 12: 7.2}
    state, events, followed = run(monkeypatch, task, plan, seconds)
    assert followed.choice.micro_batch == 6
    assert followed.rivals == ()
    (tried,) = of_kind(events, Tried)
    assert tried.taken == followed.choice.describe()
    assert len(tried.choices) == 4
    # Passes of a step of 12 samples; those that were slower by a third were tried no further.
    assert tried.pass_seconds == pytest.approx((None, None, 6.0, 7.2))
    (new,) = of_kind(events, Replanned)
    assert new.plan["choice"]["micro_batch"] == 6
    # To the bit the run that had this plan from the beginning.
    plain, _, _ = run(monkeypatch, task, plan_for(task, 6), seconds)
    assert all(torch.equal(state[name], plain[name]) for name in plain)
    assert followed.prediction is not None
    assert followed.prediction.peak_bytes == 1000


def test_the_time_of_a_step_is_predicted_anew(monkeypatch, task):
    plan = plan_for(task, 4).model_copy(update={"prediction": told()})
    _, events, followed = run(monkeypatch, task, plan, {4: 0.6})
    assert of_kind(events, Tried)[0].pass_seconds == pytest.approx((1.8,))
    prediction = followed.prediction
    assert prediction is not None
    assert prediction.step_parts == pytest.approx({"forward": 0.6, "backward": 1.2, "update": 0.1})
    assert prediction.step_seconds == pytest.approx(1.9)
    assert "measured in passes" in prediction.seconds_method


def test_the_time_in_which_others_had_the_core_is_not_predicted(monkeypatch, task):
    plan = plan_for(task, 4).model_copy(update={"prediction": told()})
    _, events, _ = run(monkeypatch, task, plan, {4: 0.6}, idle=0.2)
    assert of_kind(events, Tried)[0].pass_seconds == pytest.approx((1.2,))


def test_what_is_faster_by_chance_is_not_followed(monkeypatch, task):
    plan = with_rivals(task, 2, (4,))
    _, events, followed = run(monkeypatch, task, plan, {2: 2.0, 4: 3.9})
    assert followed.choice.micro_batch == 2
    assert of_kind(events, Tried)
    assert not of_kind(events, Replanned)


def test_a_rival_without_room_is_not_followed(monkeypatch, task):
    plan = with_rivals(task, 2, (4,))
    state, events, followed = run(monkeypatch, task, plan, {2: 2.0, 4: 1.0}, failing=4)
    assert followed.choice.micro_batch == 2
    assert of_kind(events, Tried)[0].pass_seconds == pytest.approx((12.0, None))
    assert not of_kind(events, OutOfMemory)  # nothing was to be done again
    plain, _, _ = run(monkeypatch, task, plan_for(task, 2), {})
    assert all(torch.equal(state[name], plain[name]) for name in plain)


def test_a_plan_that_fails_its_trial_is_replaced(monkeypatch, task):
    plan = with_rivals(task, 2, (4,))
    _, events, followed = run(monkeypatch, task, plan, {2: 1.0, 4: 9.0}, failing=2)
    assert followed.choice.micro_batch == 4
    assert not of_kind(events, OutOfMemory)


def test_a_given_plan_is_followed_as_it_is(monkeypatch, task):
    plan = with_rivals(task, 2, (4,))
    _, events, followed = run(monkeypatch, task, plan, {2: 9.0, 4: 1.0}, trial=False)
    assert followed.choice.micro_batch == 2
    assert not of_kind(events, Tried)


@pytest.mark.parametrize(
    ("num_steps", "expected", "rounds"),
    [
        (30, None, None),
        (50, (), 2),
        (100, (), 4),
        (400, (4,), 4),
        (800, (4, 6), 4),
        (1000, (4, 6, 12), 4),
        (None, (4, 6, 12), 4),
    ],
)
def test_a_trial_takes_a_fiftieth_of_the_run_at_most(task, num_steps, expected, rounds):
    plan = with_rivals(task, 2, (4, 6, 12))
    found = affordable(plan, num_steps)
    if found is None:
        assert expected is None
        return
    taken, number = found
    sizes = [rival.choice.micro_batch for rival in taken]
    assert (tuple(sizes), number) == (expected, rounds)
    if num_steps is not None:
        part = min(BATCH, 2 * max([2, *sizes])) / BATCH
        assert (1 + number) * part * (1 + len(taken)) <= 0.02 * num_steps


def test_a_short_run_has_a_trial_of_fewer_rounds(monkeypatch, task):
    plan = plan_for(task, 4).model_copy(update={"prediction": told()})
    short = dataclasses.replace(task, steps=90)
    _, events, followed = run(monkeypatch, short, plan, {4: 0.6})
    assert of_kind(events, Tried)[0].pass_seconds == pytest.approx((1.8,))
    assert followed.prediction is not None
    assert followed.prediction.step_seconds == pytest.approx(1.9)


def test_a_plan_with_rivals_is_read_back_and_its_faults_are_named(task):
    plan = with_rivals(task, 2, (4,))
    assert ab.Plan.from_json(plan.to_json()) == plan
    edited = plan.to_json().replace('"micro_batch": 4', '"micro_batch": 5')
    with pytest.raises(ab.InputError, match=r"rivals\.0\.micro_batch is 5, which would cut"):
        ab.Plan.from_json(edited)


def test_ranks_follow_the_choice_that_is_fastest_for_the_slowest_of_them(crew):
    found = crew(2, functools.partial(on_a_rank, {0: {2: 2.0, 4: 2.0}, 1: {2: 2.2, 4: 9.0}}))
    assert [sizes for sizes, _ in found] == [2, 2]
    other = crew(2, functools.partial(on_a_rank, {0: {2: 2.0, 4: 4.1}, 1: {2: 3.2, 4: 4.2}}))
    assert [sizes for sizes, _ in other] == [4, 4]
    assert torch.equal(other[0][1], other[1][1])


def on_a_rank(seconds, rank, size):
    """The micro-batch followed, and a weight."""
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 4, generator=draw), torch.randn(48, 3, generator=draw))
    task = ab.Task(
        model=functools.partial(nn.Linear, 4, 3),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        train=data,
        global_batch=24,
        steps=1200,
    )
    plan = with_rivals(task, 2, (4,), parallel="replicate", shares=(1.0, 1.0))
    with pytest.MonkeyPatch.context() as patch:
        state, _, followed = run(patch, task, plan, seconds[rank])
    return followed.choice.micro_batch, state["weight"]


def test_ranks_whose_norms_meet_in_passes_have_no_trial(crew):
    """A pass that fails on one of them alone would leave the other waiting in the middle of its own."""
    first, second = crew(2, normalised)
    events, weight = first
    assert not of_kind(events, Tried)
    (decision,) = of_kind(events, CompileDecided)
    assert decision.reason == "the ranks cannot run passes each by itself, so none can be timed"
    (failure,) = of_kind(events, OutOfMemory)
    assert (failure.step, failure.rank) == (2, 0)
    assert torch.equal(weight, second[1])


def normalised(rank, size):
    """The events of a run with synchronised norms, and a weight. In the second pass memory runs out on
    rank 0."""
    num_passes = 0

    def failing(model, batch):
        nonlocal num_passes
        num_passes += 1
        if (rank, num_passes) == (0, 2):
            raise MemoryError
        return loss(model, batch)

    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 4, generator=draw), torch.randn(48, 3, generator=draw))
    task = ab.Task(
        model=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)),
        loss=failing,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        train=data,
        global_batch=16,
        ghost_batch=16,
        steps=1200,
    )
    plan = plan_for(task, 8, parallel="replicate", shares=(1.0, 1.0), norms="synchronised")
    leaner = plan.choice.model_copy(update={"micro_batch": 4})
    kernels = KernelChoices(compile_if_faster="open")
    plan = plan.model_copy(update={"ladder": (leaner,), "prediction": told(), "kernels": kernels})
    events = []
    with ab.Session(task, plan, [events.append], trial=True) as session:
        for _, _ in zip(range(3), session.steps(), strict=False):
            pass
        return events, session.model[1].weight.detach().clone()


def test_where_samples_differ_in_length_a_step_is_predicted_by_its_padded_size(monkeypatch):
    """The first passes are those of the longest samples; most others are far shorter."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 9, (400,), generator=draw).tolist()
    lengths[::20] = [64] * 20
    data = [torch.randn(length, generator=draw) for length in lengths]
    per_value, clock = 0.001, Clock({})
    keep_time_by(monkeypatch, clock)

    def counted(model, batch):
        if type(batch) is torch.Tensor:  # not when the step is planned
            clock.now += batch.numel() * per_value
        return model(batch.unsqueeze(2)).square().sum(), len(batch)

    task = ab.Task(
        model=functools.partial(nn.Linear, 1, 1),
        loss=counted,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
        train=data,
        lengths=lengths,
        collate=lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True),
        global_batch=100,
        steps=1200,
    )
    plan = plan_for(task, 2).model_copy(update={"task": subject_of(task).identity})
    plan = plan.model_copy(update={"prediction": told()})
    events, ends = [], []
    with ab.Session(task, plan, [events.append], trial=True) as session:
        for _, _ in zip(range(9), session.steps(), strict=False):
            ends.append(clock.now)
        followed = session.plan
    assert of_kind(events, Tried)
    parts = followed.prediction.step_parts
    assert parts["update"] == pytest.approx(0.1)
    measured = (ends[-1] - ends[0]) / 8
    assert parts["forward"] + parts["backward"] == pytest.approx(measured, rel=0.15)
