"""Several ranks in one process compute what one computes with the whole global batch in one piece."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
from tests.equivalence.reference import plan_for, train_plainly
from tests.equivalence.test_batch_norm import NORMS, Images
from tests.equivalence.test_batch_norm import task_of as images
from tests.equivalence.worlds import World, loss_of, task_of
from torch import nn

import anybatch as ab
from anybatch.errors import LossError
from anybatch.events import OutOfMemory, Replanned, StepDone
from anybatch.parallel.in_process import InProcessRanks
from anybatch.rank import Rank

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}


class Trained:
    """What `train` leaves behind: by rank, parameters and buffers; of rank 0, the rest."""

    def __init__(self):
        self.parameters, self.states, self.losses, self.events = [], [], [], []
        self.evaluated = None


def plan_of(task, shares, micro_batch, **knobs):
    return plan_for(
        task,
        micro_batch,
        parallel="in-process",
        shares=tuple(shares),
        devices=("cpu",) * len(shares),
        **knobs,
    )


def train(task, shares, micro_batch=3, wrap=None, **knobs):
    """`task`, trained by ranks in this process; each step is a run of its own."""
    plan = plan_of(task, shares, micro_batch, **knobs)
    result, ranks = Trained(), {}
    with InProcessRanks(plan.devices, plan.shares) as crew:
        tasks = [group.own(task) for group in crew.groups]

        def begin(group):
            sink = result.events.append if group.rank == 0 else (lambda event: None)
            mine = tasks[group.rank] if wrap is None else wrap(task, group)
            ranks[group.rank] = rank = Rank(mine, plan, group, group.device, sink)
            rank.begin()

        crew.run(begin)
        try:
            while (done := crew.run(lambda group: ranks[group.rank].step())) is not None:
                result.losses.append(done.loss)
            if task.valid is not None:
                result.evaluated = crew.run(lambda group: ranks[group.rank].evaluate())
            for number in range(len(shares)):
                model = ranks[number].model
                result.parameters.append([p.detach().clone() for p in model.parameters()])
                result.states.append({n: v.clone() for n, v in model.state_dict().items()})
        finally:
            crew.run(lambda group: ranks[group.rank].close())
    return result


def deviation(one, other):
    return max(
        float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(one, other, strict=True)
    )


def check(world, shares, micro_batch=3, **knobs):
    trained = train(task_of(world), shares, micro_batch, **knobs)
    plain = train_plainly(task_of(world))
    wanted = [p.detach() for p in plain.model.parameters()]
    tolerance = TOLERANCE[world.dtype]
    assert trained.losses == pytest.approx(plain.losses, rel=tolerance)
    for parameters in trained.parameters:
        assert deviation(parameters, wanted) < tolerance
        for mine, first in zip(parameters, trained.parameters[0], strict=True):
            assert torch.equal(mine, first)
    return trained


@pytest.mark.parametrize("global_batch", [1, 7, 100, 101])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_global_batch_on_any_number_of_devices(size, global_batch):
    world = World(num_samples=230, global_batch=global_batch, loss="weighted", optimizer="adamw")
    check(world, (1.0,) * size, micro_batch=max(1, global_batch // 5))


@pytest.mark.parametrize("shares", [(5.0, 2.0, 1.0), (0.0, 1.0), (1.0, 0.0, 3.0), (2.5, 1.5)])
def test_unequal_shares_are_weighed_exactly(shares):
    check(World(loss="weighted", optimizer="adamw", clip_norm=0.1), shares)


@pytest.mark.parametrize("data", ["tuples", "dicts", "ragged"])
@pytest.mark.parametrize("loss", ["mean", "counted on device"])
def test_any_data_and_loss(data, loss):
    check(World(data=data, loss=loss, schedule="samples", groups=True), (1.0, 1.0))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parameters_that_no_sample_of_a_step_uses_are_not_moved(optimizer):
    world = World(sometimes=True, tied=True, frozen=True, optimizer=optimizer, global_batch=5)
    check(world, (1.0, 1.0, 1.0), micro_batch=2)


def test_half_weights_with_master_copies_agree_on_all_ranks():
    world = World(dtype=torch.float32, loss="counted")
    many = train(task_of(world), (1.0, 1.0), 4, precision="bf16-weights").parameters
    alone = train(task_of(world), (1.0,), 4, precision="bf16-weights").parameters
    assert all(torch.equal(a, b) for a, b in zip(*many, strict=True))
    assert deviation(many[0], alone[0]) < 1e-2  # bfloat16 has 8 bits


def test_held_out_samples_are_counted_once():
    world = World(loss="counted on device", num_samples=20)
    task = dataclasses.replace(
        task_of(world), valid=task_of(dataclasses.replace(world, seed=5)).train
    )
    three, one = (train(task, (1.0,) * size).evaluated for size in (3, 1))
    assert three.samples == one.samples == 20
    assert three.loss == pytest.approx(one.loss, rel=1e-9)
    assert three.metrics == pytest.approx(one.metrics, rel=1e-9)


def test_only_rank_0_speaks_to_the_readers():
    events = train(task_of(World(steps=3)), (1.0, 1.0)).events
    assert [type(event) for event in events] == [StepDone] * 3


# -------------------------------------------------------------------------------------------- buffers


@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 0.0, 1.0)])
@pytest.mark.parametrize("norm", ["usual", "cumulative", "not tracking"])
def test_running_statistics_are_those_of_all_samples(norm, shares):
    task = images(lambda: Images(**NORMS[norm]), num_samples=45, global_batch=17, ghost_batch=4)
    trained = train(task, shares, 4)
    wanted = train_plainly(task).model.state_dict()
    for state in trained.states:
        assert state.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
            assert torch.equal(state[name], trained.states[0][name])


class Remembers(nn.Module):
    """Keeps a buffer of its own kind, replaced in every pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1, dtype=torch.float64)
        self.register_buffer("last", torch.zeros(0, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.last = x[-1].clone()
        return self.layer(x)


def test_other_buffers_are_those_of_the_lowest_rank_that_wrote_them():
    x = torch.arange(36.0, dtype=torch.float64).reshape(12, 3)
    task = ab.Task(
        model=Remembers,
        loss=lambda model, batch: ab.Loss(model(batch[0]).sum(), len(batch[0])),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=torch.utils.data.TensorDataset(x),
        global_batch=6,
        epochs=1,
        shuffle=False,
    )
    for shares, last in (((1.0, 1.0), 8), ((0.0, 1.0), 11)):
        states = train(task, shares, 3).states
        assert all(torch.equal(state["last"], x[last]) for state in states)
        assert states[0]["last"].data_ptr() != states[1]["last"].data_ptr()


# --------------------------------------------------------------------------------------- random state


def drawing(log, hands_over):
    """A task whose loss draws from all generators, and may give the turn away in the middle."""

    def wrap(task, group):
        def loss(model, batch):
            drawn = [random.random(), float(torch.rand(())), float(np.random.rand())]  # noqa: NPY002
            if hands_over:
                group.between_passes()
            drawn += [random.random(), float(torch.rand(())), float(np.random.rand())]  # noqa: NPY002
            log.append((group.rank, *drawn))
            total = loss_of("counted", model, batch)
            if hands_over:
                group.between_passes()
            return ab.Loss(total.sum * (1 + drawn[1]), total.weight)

        return dataclasses.replace(task, loss=loss)

    return wrap


def test_turns_in_the_middle_of_a_pass_change_nothing():
    """The ranks' passes interleave pass by pass, or in the middle of passes: same draws, same bits."""
    logs, results = ([], []), []
    for log, hands_over in zip(logs, (False, True), strict=True):
        wrap = drawing(log, hands_over)
        results.append(train(task_of(World(steps=6)), (1.0,) * 3, 2, wrap).parameters)
    assert sorted(logs[0]) == sorted(logs[1])
    assert len({entry[1:] for entry in logs[0]}) == len(logs[0])
    for one, other in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_callers_generators_are_left_as_they_were():
    torch.manual_seed(7)
    random.seed(7)
    expected = float(torch.rand(())), random.random()
    torch.manual_seed(7)
    random.seed(7)
    train(task_of(World(steps=3)), (1.0,) * 3, 2, drawing([], True))
    assert (float(torch.rand(())), random.random()) == expected


# ------------------------------------------------------------------------------------------- failures


def failing(rank, step, where, error, interleaved=False):
    """One rank fails once: at its first pass of a step, in forward or in backward."""
    left, passes = [1], itertools.count()

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, mine):
            ctx.mine = mine
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if ctx.mine and where == "backward":
                raise error()
            return gradient, None

    def wrap(task, group):
        def loss(model, batch):
            if interleaved:
                group.between_passes()
            mine = False
            if group.rank == rank and next(passes) >= step and left[0]:
                left[0] -= 1
                mine = True
            if mine and where == "forward":
                raise error()
            total = loss_of("counted", model, batch)
            return ab.Loss(Fail.apply(total.sum, mine), total.weight)

        return dataclasses.replace(task, loss=loss)

    return wrap


def no_memory():
    return torch.OutOfMemoryError("tried to allocate more than there is")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_memory_that_runs_out_on_one_rank_leaves_no_trace(rank, where, interleaved):
    world = World(loss="counted", optimizer="adamw")
    wrap = failing(rank, 5, where, no_memory, interleaved)
    trained = train(task_of(world), (1.0,) * 3, 4, wrap)
    plain = train_plainly(task_of(world))
    for parameters in trained.parameters:
        assert deviation(parameters, [p.detach() for p in plain.model.parameters()]) < 1e-6
    told = [event for event in trained.events if isinstance(event, OutOfMemory | Replanned)]
    assert [type(event) for event in told] == [OutOfMemory, Replanned]
    assert (told[0].rank, told[0].phase) == (rank, where)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_on_one_rank_is_raised_with_its_own_type(rank):
    wrap = failing(rank, 5, "forward", lambda: LookupError("not in the table"))
    with pytest.raises(LookupError, match="not in the table") as caught:
        train(task_of(World(loss="counted")), (1.0,) * 3, 4, wrap)
    assert caught.value.__notes__ == [f"raised on rank {rank} of 3, cpu"]


def test_an_error_that_all_ranks_see_is_raised_once():
    def wrap(task, group):
        return dataclasses.replace(
            task, loss=lambda m, b: ab.Loss(m(b[0], b[3]).sum() * torch.nan, 1)
        )

    with pytest.raises(LossError, match=r"the loss of step 1 is nan in micro-batch 0 .* of rank 0"):
        train(task_of(World()), (1.0,) * 3, 4, wrap)


def test_a_model_that_was_built_before_is_trained_by_every_rank():
    """Every rank needs its own; the caller's is that of rank 0."""
    world = World(steps=4)
    model = task_of(world).build_model()
    task = dataclasses.replace(task_of(world), model=model)
    wanted = train(task_of(world), (1.0, 1.0)).parameters
    found = train(task, (1.0, 1.0)).parameters
    for one, other in zip(wanted, found, strict=True):
        assert deviation(one, other) == 0
    assert deviation([p.detach() for p in model.parameters()], found[0]) == 0
