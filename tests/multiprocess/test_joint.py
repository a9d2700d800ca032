"""A loss that compares all samples of the global batch, over processes: every rank hears of every
sample, and none waits for one that failed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from tests.crew import RankError
from tests.equivalence.joint import compare, encode, encode_all, task_of
from tests.equivalence.reference import plan_for, train_plainly
from torch.distributed.tensor import DTensor

import anybatch as ab
from anybatch.errors import InputError, LossError
from anybatch.events import OutOfMemory, StepDone
from anybatch.parallel.whole import full_state_dict


def state_of(model):
    """Of a divided model on rank 0 alone."""
    if any(isinstance(param, DTensor) for param in model.parameters()):
        return full_state_dict(model)
    return {name: value.clone() for name, value in model.state_dict().items()}


def as_ranks(rank, size, micro_batch, shares, knobs, options):
    task = task_of(**options)
    plan = plan_for(task, micro_batch, shares=shares, **knobs)
    with ab.Session(task, plan) as session:
        losses = [step.loss for step in session.steps()]
        found = session.evaluate().loss if task.valid is not None else None
        state = state_of(session.model)
    return state, losses, found


def deviation(one, other):
    return max(float((one[n] - v).norm() / v.norm().clamp_min(1e-30)) for n, v in other.items())


def check(crew, shares, micro_batch, options=(), **knobs):
    options = dict(options)
    ranks = crew(len(shares), as_ranks, micro_batch, shares, knobs, options)
    plain = train_plainly(task_of(**options))
    wanted = {n: v.double() for n, v in plain.model.state_dict().items()}
    for rank, (state, losses, _) in enumerate(ranks):
        assert losses == pytest.approx(plain.losses, rel=1e-9)
        if rank and not state:
            continue
        assert deviation({n: v.double() for n, v in state.items()}, wanted) < 1e-8
        assert all(torch.equal(v, ranks[0][0][n]) for n, v in state.items())
    return ranks


@pytest.mark.parametrize("micro_batch", [5, 10, 35])
def test_two_ranks(crew, micro_batch):
    check(crew, (1.0, 1.0), micro_batch, parallel="replicate")


@pytest.mark.parametrize("shares", [(3.0, 1.0, 2.0), (1.0, 0.0, 1.0), (0.0, 1.0)])
def test_unequal_shares_and_ranks_without_samples(crew, shares):
    check(crew, shares, 5, parallel="replicate")


HANDED = {"loss": ab.JointLoss(encode_all, compare)}
"""Of a divided model, whose parameters no comparison can use."""


@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 1.0, 2.0), (0.0, 1.0)])
@pytest.mark.parametrize("micro_batch", [5, 10, 35])
def test_ranks_that_have_a_part_of_the_model_each(crew, shares, micro_batch):
    check(crew, shares, micro_batch, HANDED, parallel="shard")


def test_a_parameter_that_is_divided_cannot_be_compared_with(crew):
    with pytest.raises(RankError) as raised:
        crew(2, as_ranks, 5, (1.0, 1.0), {"parallel": "shard"}, {})
    assert "compare uses a parameter of the model itself" in str(raised.value.error)


def test_fewer_samples_than_ranks(crew):
    options = {"global_batch": 2, "norm": False}
    check(crew, (1.0, 1.0, 1.0), 1, options, parallel="replicate")


def test_gradients_that_cross_in_half(crew):
    exact = crew(2, as_ranks, 5, (1.0, 1.0), {"parallel": "replicate"}, {})
    knobs = {"parallel": "replicate", "exchange": ab.Exchange(compress="bf16")}
    halved = crew(2, as_ranks, 5, (1.0, 1.0), knobs, {})
    assert halved[0][1] == pytest.approx(exact[0][1], rel=1e-2)
    assert halved[0][1] != exact[0][1]


def test_evaluation_is_that_of_one_process(crew):
    held_out = torch.utils.data.TensorDataset(*(t[:50] for t in task_of().train.tensors))
    options = {"valid": held_out, "evaluate_every": 100, **HANDED}
    (one,) = crew(1, as_ranks, 35, (1.0,), {}, options)
    for parallel in ("replicate", "shard"):
        for ranks in crew(3, as_ranks, 5, (2.0, 1.0, 1.0), {"parallel": parallel}, options):
            assert ranks[2] == pytest.approx(one[2], rel=1e-9)


@pytest.mark.slow
def test_reproducible_runs_have_the_same_bits(crew):
    options = {
        "dtype": torch.float32,
        "dropout": 0.2,
        "reproducible": ab.Grains(samples=5, parts=4),
    }
    runs = [
        crew(
            size,
            as_ranks,
            5,
            (1.0,) * size,
            {"parallel": "replicate" if size > 1 else "single"},
            options,
        )
        for size in (1, 2, 4)
    ]
    first, losses, _ = runs[0][0]
    for ranks in runs[1:]:
        for state, told, _ in ranks:
            assert told == losses
            assert all(torch.equal(value, first[name]) for name, value in state.items())


class Failing:
    """A joint loss whose memory runs out once on one rank, in step 3."""

    def __init__(self, where, here):
        self.where, self.left, self.num_steps = where, int(here), 0

    def fail(self, where):
        if where == self.where and self.num_steps == 2 and self.left:
            self.left -= 1
            raise torch.OutOfMemoryError("tried to allocate more than there is")

    def encode(self, model, batch):
        self.fail("again" if torch.is_grad_enabled() else "encoding")
        return encode_all(model, batch)

    def compare(self, model, encoded):
        self.fail("comparison")
        return compare(model, encoded)


def failing(rank, size, where, who, micro_batch, parallel):
    failing = Failing(where, rank == who)
    loss = ab.JointLoss(failing.encode, failing.compare)
    task = task_of(300, loss=loss, global_batch=40)
    plan = plan_for(task, micro_batch, parallel=parallel, shares=(1.0,) * size)
    events = []

    def sink(event):
        events.append(event)
        if isinstance(event, StepDone):
            failing.num_steps += 1

    losses = []
    with ab.Session(task, plan, [sink]) as session:
        for done in session.steps():
            losses.append(done.loss)
            failing.num_steps = len(losses)
        state = state_of(session.model)
    return state, losses, [(e.step, e.rank) for e in events if isinstance(e, OutOfMemory)]


@pytest.mark.parametrize("parallel", ["replicate", "shard"])
@pytest.mark.parametrize(
    ("where", "micro_batch"), [("encoding", 5), ("comparison", 5), ("again", 5), ("again", 20)]
)
@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_memory_that_runs_out_on_one_rank(crew, where, micro_batch, who, parallel):
    ranks = crew(2, failing, where, who, micro_batch, parallel)
    plain = train_plainly(task_of(300, global_batch=40))
    wanted = {n: v.double() for n, v in plain.model.state_dict().items()}
    assert ranks[0][2] == [(3, who)]
    for rank, (state, losses, _) in enumerate(ranks):
        assert losses == pytest.approx(plain.losses, rel=1e-9)
        assert (rank and not state) or deviation(
            {n: v.double() for n, v in state.items()}, wanted
        ) < 1e-8


def parted(rank, size):
    def rows(model, batch):
        left = encode(model, batch)["left"]
        return left if rank == 0 else left[:, :3]

    task = task_of(loss=ab.JointLoss(rows, lambda model, z: z.square().mean()))
    plan = plan_for(task, 5, parallel="replicate", shares=(1.0, 1.0))
    with ab.Session(task, plan) as session:
        next(iter(session.steps()))


def test_ranks_that_encode_in_different_shapes(crew):
    with pytest.raises(RankError) as raised:
        crew(2, parted)
    assert isinstance(raised.value.error, InputError)
    assert "rank 0 and rank 1 encode samples in different shapes ([5] float64 and [3]" in str(
        raised.value.error
    )


def stepping(rank, size, parts):
    task = task_of()
    model = task.build_model()
    optimizer = task.optimizer(model.parameters())
    losses = []
    with ab.Step(model, optimizer, task.loss, micro_batch=5, ghost_batch=5, clip_norm=0.5) as step:
        for number in range(2):
            start = 35 * number + sum(parts[:rank])
            mine = [t[start : start + parts[rank]] for t in task.train.tensors]
            losses.append(step(mine if parts[rank] else None).loss)
    return model.state_dict(), losses


@pytest.mark.parametrize("parts", [(20, 15), (5, 0, 30)])
def test_a_script_of_several_processes(crew, parts):
    ranks = crew(len(parts), stepping, parts)
    plain = train_plainly(dataclasses.replace(task_of(), shuffle=False, steps=2))
    for state, losses in ranks:
        assert losses == pytest.approx(plain.losses, rel=1e-9)
        wanted = {n: v.double() for n, v in plain.model.state_dict().items()}
        assert deviation({n: v.double() for n, v in state.items()}, wanted) < 1e-8
    assert not dist.is_initialized()


def stepping_without_samples(rank, size):
    task = task_of()
    model = task.build_model()
    optimizer = task.optimizer(model.parameters())
    with ab.Step(model, optimizer, task.loss, micro_batch=5, ghost_batch=5) as step:
        step([t[:10] for t in task.train.tensors])
        before = state_of(model)
        with pytest.raises(LossError) as raised:
            step(None)
        kept = all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    return str(raised.value), kept


def test_a_step_without_samples_on_any_rank_is_told_as_with_any_loss(crew):
    for told, kept in crew(2, stepping_without_samples):
        assert told.startswith("the total weight of step 2 is zero")
        assert kept
