"""DistributedDataParallel carries a run, and the result is that of the plain loop in one piece."""

from __future__ import annotations

import os

import pytest
import torch
from tests.equivalence.reference import plan_for
from tests.equivalence.worlds import World, task_of
from tests.multiprocess.failing import RunsOut
from tests.multiprocess.relaxed import TOLERANCE, Ran, alike, as_ranks, deviation, plainly

import anybatch as ab
from anybatch.events import OutOfMemory, Replanned
from anybatch.plans import Exchange

DDP = {"parallel": "ddp"}


def check(crew, world, shares, micro_batch=3, **knobs):
    ranks = crew(len(shares), as_ranks, world, micro_batch, tuple(shares), {**DDP, **knobs})
    plain = plainly(world)
    for ran in ranks:
        assert deviation(ran.parameters, plain.parameters) < TOLERANCE[world.dtype]
        assert ran.losses == pytest.approx(plain.losses, rel=TOLERANCE[world.dtype])
    assert alike(ranks)
    return ranks


@pytest.mark.parametrize("global_batch", [1, 7, 101])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_global_batch_on_any_number_of_ranks(crew, size, global_batch):
    world = World(num_samples=230, global_batch=global_batch, loss="weighted", optimizer="adamw")
    check(crew, world, (1.0,) * size, micro_batch=max(1, global_batch // 5))


@pytest.mark.parametrize("shares", [(5.0, 2.0, 1.0), (0.0, 1.0), (1.0, 0.0, 3.0)])
def test_unequal_numbers_of_passes_and_ranks_without_samples(crew, shares):
    check(crew, World(loss="weighted", optimizer="adamw", clip_norm=0.1), shares)


@pytest.mark.parametrize("loss", ["mean", "pair", "counted on device"])
def test_any_form_of_loss(crew, loss):
    check(crew, World(data="ragged", loss=loss, schedule="samples", groups=True), (1.0, 1.0))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parameters_that_no_sample_of_a_step_uses_are_not_moved(crew, optimizer):
    world = World(sometimes=True, tied=True, frozen=True, optimizer=optimizer, global_batch=5)
    check(crew, world, (1.0, 1.0, 1.0), micro_batch=2)


def test_the_network_is_crossed_once_per_step_however_many_passes(crew):
    world = World(dtype=torch.float32, global_batch=16)
    fine = check(crew, world, (1.0, 1.0), micro_batch=1)
    coarse = check(crew, world, (1.0, 1.0), micro_batch=16)
    assert fine[0].step_bytes == coarse[0].step_bytes


def as_ranks_with_failure(rank, size, world, bad_rank, where, knobs):
    """As `as_ranks`, but one rank runs out of memory once, in step 4."""
    task = task_of(world)
    plan = plan_for(task, 4, shares=(1.0,) * size, **DDP, **knobs)
    events = []
    with ab.Session(task, plan, [events.append]) as session:
        memory = RunsOut(session.model, where, here=rank == bad_rank)
        for _ in session.steps():
            memory.num_steps += 1
    return Ran(dict(session.model.state_dict()), events=events)


@pytest.mark.parametrize("where", ["forward", "backward", "end of backward"])
@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_memory_that_runs_out_on_one_rank_leaves_no_trace(crew, bad_rank, where, micro_batches):
    world = World(loss="counted", optimizer="adamw", global_batch=8 * micro_batches)
    ranks = crew(2, as_ranks_with_failure, world, bad_rank, where, {})
    plain = plainly(world)
    for ran in ranks:
        assert deviation(ran.parameters, plain.parameters) < 1e-6
    told = [e for e in ranks[0].events if isinstance(e, OutOfMemory | Replanned)]
    assert [type(e) for e in told] == [OutOfMemory, Replanned]
    assert (told[0].rank, told[0].step) == (bad_rank, 4)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_powersgd_is_alike_on_all_ranks_after_a_failure(crew, where):
    knobs = {"exchange": Exchange(compress="powersgd")}
    ranks = crew(2, as_ranks_with_failure, World(dtype=torch.float32), 1, where, knobs)
    assert alike(ranks)


def with_an_error(rank, size):
    task = task_of(World())
    plan = plan_for(task, 4, shares=(1.0,) * size, **DDP)
    with ab.Session(task, plan) as session:
        if rank == 1:
            session.model.body.register_forward_hook(lambda *_: 1 / 0)
        for _ in session.steps():
            pass


def test_an_error_on_one_rank_stops_all_and_is_named(crew):
    (first, _), (second, _), (third, _) = crew.outcomes(3, with_an_error)
    assert isinstance(second, ZeroDivisionError)
    for error in (first, third):
        assert type(error).__name__ == "PeerFailed"
        assert "rank 1 failed in step 1 with ZeroDivisionError" in str(error)


def with_a_death(rank, size):
    task = task_of(World())
    plan = plan_for(task, 4, shares=(1.0,) * size, **DDP)

    def die(*_):
        if rank == 1 and steps_done[0] == 3:
            os._exit(1)

    steps_done = [0]
    with ab.Session(task, plan) as session:
        session.model.body.register_forward_hook(die)
        for _ in session.steps():
            steps_done[0] += 1


def test_a_rank_that_dies_is_told_by_the_others(crew):
    (first, _), (second, _) = crew.outcomes(2, with_a_death)
    assert isinstance(second, EOFError | OSError)
    assert type(first).__name__ == "PeerLost"
    assert "a rank did not answer" in str(first)


def model_is_the_users(rank, size):
    task = task_of(World())
    names = []
    with ab.Session(task, plan_for(task, 4, shares=(1.0,) * size, **DDP)) as session:
        names.append(list(session.model.state_dict()))
        calls = []
        session.model.register_forward_hook(lambda *_: calls.append(session.model.embed))
        next(iter(session.steps()))
    names.append(list(session.model.state_dict()))
    left = [p._post_accumulate_grad_hooks for p in session.model.parameters()]
    return names, len(calls), type(session.model).__name__, [h for h in left if h]


def test_the_model_keeps_its_names_and_hooks_run_once_per_pass(crew):
    plain = list(task_of(World()).build_model().state_dict())
    for names, num_calls, kind, hooks_left in crew(2, model_is_the_users):
        assert names == [plain, plain]
        assert num_calls == 2  # 8 samples of 16, by 4
        assert kind == "Model"
        assert not hooks_left
