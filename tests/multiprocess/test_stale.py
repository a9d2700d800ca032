"""Stale gradients: those of a step are applied in the next one, each of them once."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from tests.equivalence.reference import mean_loss, plan_for, samples_of
from tests.equivalence.worlds import World, task_of
from tests.multiprocess.failing import RunsOut
from tests.multiprocess.relaxed import Ran, alike, as_ranks, deviation, digits, exact_digits
from torch.utils.data import default_collate

import anybatch as ab
from anybatch.data import Steps
from anybatch.errors import LossError
from anybatch.events import OutOfMemory, Replanned
from anybatch.plans import Exchange
from anybatch.runs.saving import Every, kept

WORLD = World(loss="weighted", optimizer="adamw", clip_norm=0.1, sometimes=True, global_batch=5)
STALE = {"parallel": "replicate", "exchange": Exchange(stale=True)}


def imitate(world, settled_after=(), lost=()):
    """The same by hand, in one process and one piece: gradients wait for one step, those of the steps
    `lost` for ever."""
    task = task_of(world)
    model = task.build_model()
    optimizer = task.optimizer(task.parameters_of(model))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    steps = Steps(
        num_samples=len(task.train),
        global_batch=task.global_batch,
        last=task.last,
        epochs=None,
        steps=task.steps,
        samples=None,
    )
    waiting, losses, norms = None, [], []

    def update(gradients):
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, task.clip_norm or 1e9)))
        optimizer.step()

    for step in range(task.steps):
        batch = default_collate([task.train[i] for i in samples_of(task, steps, step)])
        loss = mean_loss(task.loss(model, batch))
        now = torch.autograd.grad(loss, params, allow_unused=True)
        losses.append(loss.item())
        if waiting is not None:
            update(waiting)
        waiting = None if step in lost else now
        if step + 1 in settled_after or step + 1 == task.steps:
            if waiting is not None:
                update(waiting)
            waiting = None
    return Ran(model.state_dict(), losses)


@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 0.0, 2.0)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_it_computes_what_a_loop_by_hand_computes(crew, shares, optimizer):
    world = dataclasses.replace(WORLD, optimizer=optimizer)
    ranks = crew(len(shares), as_ranks, world, 2, shares, STALE)
    wanted = imitate(world)
    assert alike(ranks)
    assert deviation(ranks[0].parameters, wanted.parameters) < 1e-9
    assert ranks[0].losses == pytest.approx(wanted.losses, rel=1e-9)


def first_step(rank, size):
    task = task_of(World(steps=3, optimizer="adamw"))
    warnings.filterwarnings("error", ".*gradient of exactly zero")
    with ab.Session(task, plan_for(task, 3, shares=(1.0,) * size, **STALE)) as session:
        before = [p.detach().clone() for p in session.model.parameters()]
        steps = session.steps()
        done = next(steps)
        after = [p.detach().clone() for p in session.model.parameters()]
        next(steps)
        later = [p.detach().clone() for p in session.model.parameters()]
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    moved = [not torch.equal(a, b) for a, b in zip(after, later, strict=True)]
    return all(same), any(moved), done.grad_norm


def test_the_first_step_has_nothing_to_apply(crew):
    for unchanged, moved_later, norm in crew(2, first_step):
        assert unchanged
        assert moved_later
        assert norm == 0


def evaluated_in_between(rank, size, world, after):
    task = task_of(world)
    task = dataclasses.replace(task, valid=task.train, evaluate_every=100)
    losses = []
    with ab.Session(task, plan_for(task, 3, shares=(1.0,) * size, **STALE)) as session:
        for number, _ in enumerate(session.steps(), 1):
            if number in after:
                losses.append(session.evaluate().loss)
    return Ran(dict(session.model.state_dict()), losses)


def test_an_evaluation_sees_every_gradient_so_far(crew):
    ranks = crew(2, evaluated_in_between, WORLD, (4, 9))
    assert alike(ranks)
    assert deviation(ranks[0].parameters, imitate(WORLD, (4, 9)).parameters) < 1e-9
    short = dataclasses.replace(WORLD, steps=4)
    model = task_of(short).build_model()
    model.load_state_dict(imitate(short).parameters)
    task = task_of(short)
    loss = mean_loss(task.loss(model, default_collate(list(task.train))))
    assert ranks[0].losses[0] == pytest.approx(loss.item(), rel=1e-9)


def with_failure(rank, size, bad_rank, where):
    task = task_of(WORLD)
    events = []
    plan = plan_for(task, 2, shares=(1.0,) * size, **STALE)
    with ab.Session(task, plan, [events.append]) as session:
        memory = RunsOut(session.model, where, here=rank == bad_rank)
        for _ in session.steps():
            memory.num_steps += 1
    return Ran(dict(session.model.state_dict()), events=events)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_memory_that_runs_out_on_one_rank_leaves_all_in_step(crew, bad_rank, where):
    ranks = crew(2, with_failure, bad_rank, where)
    assert alike(ranks)
    assert deviation(ranks[0].parameters, imitate(WORLD).parameters) < 1e-9
    told = [e for e in ranks[0].events if isinstance(e, OutOfMemory | Replanned)]
    assert [type(e) for e in told] == [OutOfMemory, Replanned]
    assert (told[0].rank, told[0].step) == (bad_rank, 4)


def with_a_bad_step(rank, size, folder, bad_step, broken):
    """The loss of `bad_step` is `broken` on rank 1. What ends the run, the weights that it leaves, and
    those of one that goes on from what it has saved."""
    task, num_done, error = task_of(WORLD), 0, ""
    plan = plan_for(task, 3, shares=(1.0,) * size, **STALE)

    def loss(model, batch):
        found = task.loss(model, batch)
        if num_done == bad_step and rank == 1:
            found = dataclasses.replace(found, sum=broken(found.sum))
        return found

    with ab.Session(dataclasses.replace(task, loss=loss), plan, checkpoints=folder) as session:
        try:
            with kept(session, Every()) as steps:
                for _ in steps:
                    num_done += 1
        except LossError as caught:
            error = str(caught)
        left = Ran({n: t.detach().clone() for n, t in session.model.state_dict().items()})
    with ab.Session(task, plan, checkpoints=folder) as session:
        assert session.resume()
        gone_on = [step.loss for step in session.steps()]
    return error, left, Ran(dict(session.model.state_dict()), gone_on)


def not_a_number(loss):
    return loss * float("nan")


def without_a_gradient(loss):
    return loss + torch.sqrt(0 * loss)  # whose derivative is infinite there


def test_a_step_that_is_refused_leaves_the_gradient_under_way_as_it_was(crew, tmp_path):
    short, whole = imitate(dataclasses.replace(WORLD, steps=5)), imitate(WORLD, (5,))
    for error, left, gone_on in crew(2, with_a_bad_step, tmp_path, 5, not_a_number):
        assert error.startswith("the loss of step 6 is nan")
        assert deviation(left.parameters, short.parameters) < 1e-9
        assert gone_on.losses == pytest.approx(whole.losses[5:], rel=1e-9)
        assert deviation(gone_on.parameters, whole.parameters) < 1e-9


def test_a_gradient_that_is_not_finite_is_told_a_step_later_and_none_is_applied_twice(
    crew, tmp_path
):
    short, whole = imitate(dataclasses.replace(WORLD, steps=4)), imitate(WORLD, lost=(4,))
    for error, left, gone_on in crew(2, with_a_bad_step, tmp_path, 4, without_a_gradient):
        assert error.startswith(
            "the gradient of the step before step 6, which was under way, has the norm nan"
        )
        assert deviation(left.parameters, short.parameters) < 1e-9
        assert gone_on.losses == pytest.approx(whole.losses[5:], rel=1e-9)
        assert deviation(gone_on.parameters, whole.parameters) < 1e-9


def test_it_may_be_compressed(crew):
    world = dataclasses.replace(WORLD, dtype=torch.float32, clip_norm=None, optimizer="sgd")
    exact = crew(2, as_ranks, world, 2, (1.0, 1.0), STALE)
    knobs = {"parallel": "replicate", "exchange": Exchange(stale=True, compress="bf16")}
    half = crew(2, as_ranks, world, 2, (1.0, 1.0), knobs)
    assert alike(half)
    assert 0 < deviation(half[0].parameters, exact[0].parameters) < 2.0**-6


@pytest.mark.nightly
def test_digits_are_learned(crew):
    options = {"epochs": 6, "width": 8, "global_batch": 64}
    exact = exact_digits(crew, options)
    ranks = crew(2, digits, STALE, options)
    assert exact.evaluation.metrics["accuracy"] > 0.94
    accuracy = ranks[0].evaluation.metrics["accuracy"]
    assert accuracy >= 0.95 * exact.evaluation.metrics["accuracy"]
