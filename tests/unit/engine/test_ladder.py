"""Where a run goes when memory runs out, and when it comes back."""

import dataclasses
import itertools

import pytest
import torch
from tests.equivalence.reference import plan_for, train
from tests.equivalence.worlds import World, task_of

import anybatch as ab
from anybatch.engine import ladder
from anybatch.engine.ladder import (
    STEPS,
    WAITS,
    Ladder,
    nothing_leaner,
)
from anybatch.events import Evaluated, OutOfMemory, Replanned, StepDone
from anybatch.oom import MemoryFailure
from anybatch.plans import Choice, Plan, TaskIdentity

MIB = 1 << 20

TASK = task_of(World(num_samples=64, global_batch=16))


def plan_of(micro_batch=16, **more):
    return plan_for(TASK, micro_batch, **more)


def run(steps, fails):
    """(attempts that failed, micro-batch of each step) of a run in which `fails(step, size)` says when
    memory runs out."""
    way, plan = Ladder(), plan_of()
    lost, sizes = [], []
    for step in range(steps):
        while fails(step, plan.choice.micro_batch):
            lost.append(step)
            plan, seconds = way.down(plan)
            assert seconds == 0
        sizes.append(plan.choice.micro_batch)
        way.committed()
        plan, _ = way.up(plan) or (plan, 0)
    return lost, sizes


def test_a_plan_that_never_fits_is_tried_ever_more_rarely():
    lost, sizes = run(4000, lambda _, size: size > 8)
    assert set(sizes) == {8}
    waits = [b - a for a, b in itertools.pairwise(lost)]
    assert waits == [STEPS * 2**n for n in range(len(waits))]
    assert len(waits) >= 5
    # After any number of steps: less than 2% of them are lost, the first descent aside.
    assert all((i + 1) / step < 0.02 for i, step in enumerate(lost[1:]))


def test_no_pattern_of_failures_costs_more_than_one_attempt_in_so_many_steps():
    draw = torch.Generator().manual_seed(0)
    limits = torch.randint(1, 17, (5000 // 50 + 1,), generator=draw).tolist()
    lost, _ = run(5000, lambda step, size: step % 50 == 49 and size > max(limits[step // 50], 1))
    # A descent goes down four rungs at most, and every rung is climbed after so many steps.
    assert len(lost) <= 4 + 5000 / STEPS


def test_memory_that_comes_back_is_used_again_rung_by_rung():
    lost, sizes = run(1000, lambda step, size: step < 10 and size > 2)
    assert lost == [0, 0, 0]
    assert [(size, len(list(same))) for size, same in itertools.groupby(sizes)] == [
        (2, STEPS),
        (4, STEPS),
        (8, STEPS),
        (16, 1000 - 3 * STEPS),
    ]


def test_the_plan_before_a_try_is_that_after_it():
    rungs = (Choice(micro_batch=16, evaluation_batch=4), Choice(micro_batch=2, evaluation_batch=2))
    first = plan_of(evaluation_batch=8, ladder=rungs)
    way = Ladder()
    second, _ = way.down(first)
    third, _ = way.down(second)
    assert third.choice == rungs[1]
    for _ in range(STEPS):
        assert way.up(third) is None
        way.committed()
    again, num_steps = way.up(third)
    assert (again, num_steps) == (second, STEPS)
    assert way.down(again) == (third, 0)


def test_an_evaluation_batch_that_failed_by_itself_stays():
    way, first = Ladder(), plan_of(16)
    lean, _ = way.down(first)
    assert lean.choice.evaluation_batch == 8
    halved = lean.model_copy(
        update={"choice": lean.choice.model_copy(update={"evaluation_batch": 4})}
    )
    for _ in range(STEPS):
        way.committed()
    again, _ = way.up(halved)
    assert (again.choice.micro_batch, again.choice.evaluation_batch) == (16, 4)


def test_the_leanest_plan_is_waited_for_if_it_has_worked():
    plan = plan_of(1)
    new = Ladder()
    assert new.down(plan) is None
    way = Ladder()
    way.committed()
    assert [way.down(plan) for _ in WAITS] == [(plan, seconds) for seconds in WAITS]
    assert way.down(plan) is None
    way.committed()
    assert way.down(plan) == (plan, WAITS[0])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_grows_back_to_its_plan_and_ends_the_same(monkeypatch, num_workers):
    monkeypatch.setattr(ladder, "STEPS", 3)
    world = World(num_samples=64, data="tuples", loss="pair", optimizer="adamw", steps=12)
    task = dataclasses.replace(task_of(world), num_workers=num_workers)
    short = {2, 3}
    seen = []
    plain_loss = task.loss

    def loss(model, batch):
        seen.append(batch[0][0].shape[0])
        if len(steps) in short and seen[-1] == 16:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB.")
        return plain_loss(model, batch)

    steps, events = [], []

    def sink(event):
        events.append(event)
        if isinstance(event, StepDone):
            steps.append(event)

    ours = train(dataclasses.replace(task, loss=loss), 16, sinks=[sink])
    calm = train(task, 16)
    assert [s.micro_batch for s in steps] == [16, 16, 8, 8, 8] + [16] * 7
    assert [(e.step, e.reason) for e in events if isinstance(e, Replanned)] == [
        (3, "memory ran out in forward"),
        (6, "tried again after 3 steps"),
    ]
    (failure,) = [e for e in events if isinstance(e, OutOfMemory)]
    assert failure.then == "micro-batch 8, fp32, recompute none"
    assert failure.fragmented_bytes is None or failure.fragmented_bytes >= 0
    assert ours.losses == pytest.approx(calm.losses, rel=1e-9)


def test_the_batch_of_evaluations_is_halved():
    world = World(num_samples=64, data="tuples", loss="pair", steps=6)
    task = task_of(world)
    plain_loss, failing, sizes = task.loss, [True], []

    def loss(model, batch):
        if not torch.is_grad_enabled():
            sizes.append(len(batch[0][0]))
            if failing[0] and sizes[-1] > 4:
                raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB.")
        return plain_loss(model, batch)

    task = dataclasses.replace(task, loss=loss, valid=task.train, evaluate_every=1)
    events = []
    with ab.Session(task, plan_for(task, 16), [events.append]) as session:
        for done in session.steps():
            failing[0] = done.step < 1
            sizes.append(None)
    losses = [e.loss for e in events if isinstance(e, Evaluated)]
    assert len(losses) == 6
    changes = [(e.step, e.after) for e in events if isinstance(e, Replanned)]
    assert changes == [(1, "evaluation batch 8"), (1, "evaluation batch 4")]


def test_the_sentence_tells_of_memory_that_grows_after_the_first_step():
    choice = Choice(micro_batch=1, evaluation_batch=1, precision="fp32")
    identity = TaskIdentity(name="t", global_batch=8, parameters=1, trainable_parameters=1)
    plan = Plan(task=identity, device="cpu", budget_bytes=64 * MIB, enforced=True, choice=choice)
    failure = MemoryFailure("refused", None)
    told = nothing_leaner(plan, "forward", failure, 30)
    for words in ("too small", "grew until step 30", "keeps something of each step", ".item()"):
        assert words in told
    first = nothing_leaner(plan, "forward", failure, 1)
    assert "too small" in first
    assert "grew" not in first
