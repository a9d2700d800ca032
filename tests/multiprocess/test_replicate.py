"""Several ranks compute what one computes with the whole global batch in one piece."""

from __future__ import annotations

import pytest
import torch
from tests.crew import RankError
from tests.equivalence.reference import plan_for, train_plainly
from tests.equivalence.worlds import World, task_of
from tests.multiprocess.failing import RunsOut
from torch import nn

import anybatch as ab
from anybatch.events import OutOfMemory, Replanned

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}


def as_ranks(rank, size, world, micro_batch, shares, knobs):
    """`world` trained by this rank together with the others."""
    task = task_of(world)
    plan = plan_for(task, micro_batch, parallel="replicate", shares=shares, **knobs)
    events = []
    with ab.Session(task, plan, [events.append]) as session:
        losses = [step.loss for step in session.steps()]
    return [p.detach() for p in session.model.parameters()], losses, events


def deviation(one, other):
    return max(
        float((a - b).double().norm() / b.double().norm().clamp_min(1e-30))
        for a, b in zip(one, other, strict=True)
    )


def check(crew, world, shares, micro_batch=3, **knobs):
    ranks = crew(len(shares), as_ranks, world, micro_batch, tuple(shares), knobs)
    plain = train_plainly(task_of(world))
    wanted = [p.detach() for p in plain.model.parameters()]
    for parameters, losses, _ in ranks:
        assert deviation(parameters, wanted) < TOLERANCE[world.dtype]
        assert losses == pytest.approx(plain.losses, rel=TOLERANCE[world.dtype])
        for mine, first in zip(parameters, ranks[0][0], strict=True):
            assert torch.equal(mine, first)
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("global_batch", [1, 7, 100, 101])
@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.nightly)])
def test_any_global_batch_on_any_number_of_ranks(crew, size, global_batch):
    world = World(num_samples=230, global_batch=global_batch, loss="weighted", optimizer="adamw")
    check(crew, world, (1.0,) * size, micro_batch=max(1, global_batch // 5))


@pytest.mark.parametrize("shares", [(5.0, 2.0, 1.0), (0.0, 1.0), (1.0, 0.0, 3.0), (2.5, 1.5)])
def test_unequal_shares_are_weighed_exactly(crew, shares):
    check(crew, World(loss="weighted", optimizer="adamw", clip_norm=0.1), shares)


@pytest.mark.parametrize("data", ["tuples", "dicts", "ragged"])
@pytest.mark.parametrize("loss", ["mean", "counted on device"])
def test_any_data_and_loss(crew, data, loss):
    check(crew, World(data=data, loss=loss, schedule="samples", groups=True), (1.0, 1.0))


@pytest.mark.parametrize("shares", [(1.0, 1.0), (5.0, 0.0, 1.0)])
def test_samples_of_unequal_length_are_shared_by_length(crew, shares):
    world = World(data="ragged", lengths=True, loss="counted", optimizer="adamw", last="wrap")
    check(crew, world, shares, micro_batch=1)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parameters_that_no_sample_of_a_step_uses_are_not_moved(crew, optimizer):
    world = World(sometimes=True, tied=True, frozen=True, optimizer=optimizer, global_batch=5)
    check(crew, world, (1.0, 1.0, 1.0), micro_batch=2)


def test_half_weights_with_master_copies_agree_on_all_ranks(crew):
    world = World(dtype=torch.float32, loss="counted")
    ranks = crew(2, as_ranks, world, 4, (1.0, 1.0), {"precision": "bf16-weights"})
    alone = crew(1, as_ranks, world, 4, (1.0,), {"precision": "bf16-weights"})
    for mine, first in zip(ranks[0][0], ranks[1][0], strict=True):
        assert torch.equal(mine, first)
    assert deviation(ranks[0][0], alone[0][0]) < 1e-2  # bfloat16 has 8 bits


def as_ranks_with_failure(rank, size, world, shares, bad_rank, where):
    """As `as_ranks`, but one rank runs out of memory once, in step 4."""
    task = task_of(world)
    plan = plan_for(task, 4, parallel="replicate", shares=shares)
    events = []
    with ab.Session(task, plan, [events.append]) as session:
        memory = RunsOut(session.model, where, here=rank == bad_rank)
        for _ in session.steps():
            memory.num_steps += 1
    return [p.detach() for p in session.model.parameters()], events


@pytest.mark.parametrize("where", ["forward", "backward", "end of backward"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_memory_that_runs_out_on_one_rank_leaves_no_trace(crew, bad_rank, where):
    world = World(loss="counted", optimizer="adamw")
    ranks = crew(2, as_ranks_with_failure, world, (1.0, 1.0), bad_rank, where)
    plain = train_plainly(task_of(world))
    for parameters, _ in ranks:
        assert deviation(parameters, [p.detach() for p in plain.model.parameters()]) < 1e-6
    told = [e for e in ranks[0][1] if isinstance(e, OutOfMemory | Replanned)]
    assert [type(e) for e in told] == [OutOfMemory, Replanned]
    phase = "forward" if where == "forward" else "backward"
    assert (told[0].rank, told[0].step, told[0].phase) == (bad_rank, 4, phase)
    assert not ranks[1][1]  # only rank 0 speaks


def with_an_error(rank, size):
    task = task_of(World())
    plan = plan_for(task, 4, parallel="replicate", shares=(1.0,) * size)
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


def with_a_different_task(rank, size, change):
    world = World(**({change[0]: change[1]} if rank == 1 else {}))
    task = task_of(world)
    plan = plan_for(task_of(World()), 4, parallel="replicate", shares=(1.0,) * size)
    with ab.Session(task, plan):
        pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("global_batch", 8), "the global batch of rank 0 and rank 1 differ (16 and 8)"),
        (("num_samples", 36), "the number of training samples of rank 0 and rank 1 differ"),
        (("seed", 5), "the seed of rank 0 and rank 1 differ (0 and 5)"),
    ],
)
def test_ranks_that_were_started_differently_are_told_apart(crew, change, words):
    with pytest.raises(RankError) as caught:
        crew(2, with_a_different_task, change)
    assert isinstance(caught.value.error, ab.InputError)
    assert words in str(caught.value.error)


def test_a_plan_for_ranks_needs_them():
    task = task_of(World())
    plan = plan_for(task, 4, parallel="replicate", shares=(1.0, 1.0))
    with pytest.raises(ab.InputError, match="for 2 ranks, and here is 1"), ab.Session(task, plan):
        pass


def normalised(ghost_batch, norm=None):
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(45, 4, 3, generator=draw, dtype=torch.float64) * 3 + 1
    targets = torch.randn(45, 2, generator=draw, dtype=torch.float64)

    def build():
        return nn.Sequential(
            nn.Conv1d(4, 6, 1, dtype=torch.float64),
            norm(6) if norm else nn.BatchNorm1d(6, dtype=torch.float64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(18, 4, dtype=torch.float64),
            nn.BatchNorm1d(4, dtype=torch.float64, momentum=None),
            nn.Linear(4, 2, dtype=torch.float64),
        )

    def loss(model, batch):
        x, y = batch
        return ab.Loss((model(x) - y).square().sum(), len(y))

    return ab.Task(
        model=build,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        train=torch.utils.data.TensorDataset(inputs, targets),
        global_batch=21,
        steps=20,
        ghost_batch=ghost_batch,
    )


def with_norms(rank, size, ghost_batch, micro_batch, knobs):
    task = normalised(ghost_batch)
    plan = plan_for(task, micro_batch, parallel="replicate", **knobs)
    with ab.Session(task, plan) as session:
        for _ in session.steps():
            pass
    return session.model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shares", "ghost_batch", "knobs"),
    [
        ((1.0, 1.0), 4, {}),
        ((1.0, 1.0, 1.0), 5, {}),
        ((1.0, 1.0), 21, {}),  # one ghost batch: one rank has all of it
        ((1.0, 1.0), 21, {"norms": "synchronised"}),
        ((5.0, 2.0, 1.0), 10, {"norms": "synchronised"}),
        ((1.0, 1.0, 1.0), 2, {"norms": "synchronised"}),  # some ranks have nothing in most passes
    ],
)
def test_batch_norm_sees_the_same_samples_on_any_number_of_ranks(crew, shares, ghost_batch, knobs):
    size = 21 if "norms" in knobs else -(-11 // ghost_batch) * ghost_batch
    states = crew(len(shares), with_norms, ghost_batch, min(size, 21), {"shares": shares, **knobs})
    plain = train_plainly(normalised(ghost_batch)).model.state_dict()
    assert deviation(states[0].values(), plain.values()) < 1e-6
    for name in plain:
        for state in states[1:]:
            assert torch.equal(state[name], states[0][name])
