"""A reproducible run has the same bits on any number of ranks, under any plan, after any failure."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.equivalence.reference import plan_for, train_plainly
from tests.equivalence.reproducible import digest, loss, task_of
from tests.equivalence.worlds import World
from tests.equivalence.worlds import task_of as task_of_world
from tests.multiprocess.failing import RunsOut

import anybatch as ab
from anybatch.errors import InputError
from anybatch.events import OutOfMemory
from anybatch.plans import Choice, Exchange, KernelChoices, Recompute

GRAIN = 4
WAYS = {
    "blocks": Recompute(blocks=("body.*",)),
    "some blocks": Recompute(blocks=("body.1", "body.2")),
    "matmuls kept": Recompute(blocks=("body.*",), keep="matmuls"),
    "nested": Recompute(blocks=("body",), nested=True),
    "host": Recompute(to_host=True),
}


def plan_of(task, shares, grain=GRAIN, **knobs):
    if len(shares) > 1:
        knobs |= {"parallel": "replicate", "shares": shares}
    return plan_for(task, grain, **knobs)


def trained(options, shares, knobs, folder=None, until=None, resume=False, failing=None):
    """The digest at the end, the losses, and the events of rank 0."""
    task = task_of(**options)
    events, losses = [], []
    plan = plan_of(task, shares, **knobs)
    with ab.Session(task, plan, [events.append], checkpoints=folder) as session:
        memory = RunsOut(session.model, *failing) if failing else None
        if resume:
            assert session.resume()
        for step in session.steps():
            losses.append(step.loss)
            if memory is not None:
                memory.num_steps += 1
            if step.step == until:
                session.save(wait=True)
                break
        return digest(session.model), losses, events


def on_rank(rank, size, options, shares, knobs, folder=None, until=None, resume=False, bad=None):
    if bad is not None:
        bad = bad[0], bad[1] == rank
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    try:
        return trained(options, shares, knobs, folder, until, resume, bad)
    finally:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]


def run(crew, shares, options=None, knobs=None, **more):
    """Digest, losses and events, the same on all ranks."""
    options, knobs = options or {}, knobs or {}
    if len(shares) == 1:
        return trained(options, shares, knobs, **more)
    ranks = crew(len(shares), on_rank, options, shares, knobs, *more.values())
    assert len({found for found, _, _ in ranks}) == 1
    return ranks[0]


@cache
def alone(*options):
    """What one rank makes of the task."""
    return trained(dict(options), (1.0,), {})[:2]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_hundred_steps(crew, num_ranks):
    options = {"steps": 100}
    assert run(crew, (1.0,) * num_ranks, options)[:2] == alone(*options.items())


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(1.0,) * 3, (5.0, 2.0, 1.0), (0.0, 1.0)])
def test_any_number_of_ranks(crew, shares):
    assert run(crew, shares)[:2] == alone()


@pytest.mark.slow
def test_more_ranks_than_parts(crew):
    options = {"reproducible": ab.Grains(samples=8, parts=3), "steps": 12}
    one = trained(options, (1.0,), {"grain": 8})
    four = run(crew, (1.0,) * 4, options, {"grain": 8})
    assert one[:2] == four[:2]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_any_way_to_recompute(crew, way, num_ranks):
    assert run(crew, (1.0,) * num_ranks, knobs={"recompute": WAYS[way]})[:2] == alone()


@pytest.mark.parametrize("update", ["as given", "in parts"])
def test_updates_some_parameters_at_a_time(update):
    assert trained({}, (1.0,), {"update": update})[:2] == alone()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"stream": True, "steps": 12},
        {"lengths": [1 + i % 7 for i in range(90)], "norm": False, "steps": 12},
        {"global_batch": 1, "norm": False, "steps": 12},
        {"global_batch": 37, "last": "wrap", "steps": 12},
        {"last": "drop", "steps": 12},
    ],
    ids=lambda options: "-".join(options),
)
def test_any_data(crew, options):
    grain = 1 if options.get("global_batch") == 1 else GRAIN
    one = trained(options, (1.0,), {"grain": grain})
    two = run(crew, (1.0, 1.0), options, {"grain": grain})
    assert one[:2] == two[:2]


def test_processes_that_load():
    assert trained({"num_workers": 1, "steps": 5}, (1.0,), {})[:2] == alone(("steps", 5))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-weights", "bf16-pure"])
def test_any_precision(crew, precision):
    options, knobs = {"steps": 5, "norm": False}, {"precision": precision}
    one = trained(options, (1.0,), knobs)
    three = run(crew, (1.0,) * 3, options, knobs)
    assert one[:2] == three[:2]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_memory_that_runs_out_on_one_rank(crew, where, bad_rank):
    choice = Choice(micro_batch=GRAIN, evaluation_batch=GRAIN, recompute=WAYS["blocks"])
    found = run(
        crew,
        (1.0, 1.0),
        knobs={"ladder": (choice,)},
        folder=None,
        until=None,
        resume=False,
        bad=(where, bad_rank),
    )
    assert any(isinstance(event, OutOfMemory) for event in found[2])
    assert found[:2] == alone()


def test_memory_that_runs_out_alone():
    choice = Choice(micro_batch=GRAIN, evaluation_batch=GRAIN, recompute=WAYS["nested"])
    found = trained({}, (1.0,), {"ladder": (choice,)}, failing=("backward", True))
    assert any(isinstance(event, OutOfMemory) for event in found[2])
    assert found[:2] == alone()


HALVED = {"reproducible": ab.Grains(samples=4, parts=8), "global_batch": 32, "steps": 2}
"""Two ranks have four parts each, of one pass: in the middle of them more sums wait than at the end."""


def out_of_memory_in(passes):
    """`HALVED` on one rank; memory runs out in passes of these numbers."""
    num_passes = 0

    def failing(model, batch):
        nonlocal num_passes
        num_passes += 1
        if num_passes in passes:
            raise torch.OutOfMemoryError("tried to allocate more than there is")
        return loss(model, batch)

    return {**HALVED, "loss": failing}


def failing_in_turn(rank, size, bad_rank):
    """What comes of it and the number of failures told, for each pass in which memory runs out: in the
    first attempt, and in the second one too."""
    choices = tuple(
        Choice(micro_batch=GRAIN, evaluation_batch=GRAIN, recompute=WAYS[way])
        for way in ("blocks", "nested")
    )
    found = []
    for number in range(1, 5):
        for passes in ({number}, {number, 2 * number}):
            options = out_of_memory_in(passes if rank == bad_rank else ())
            result = on_rank(rank, size, options, (1.0,) * size, {"ladder": choices})
            failures = [event for event in result[2] if isinstance(event, OutOfMemory)]
            found.append((result[:2], len(failures)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("bad_rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_memory_that_runs_out_in_any_pass_once_or_twice(crew, bad_rank):
    first, second = crew(2, failing_in_turn, bad_rank)
    undisturbed = trained(HALVED, (1.0,), {})[:2]
    assert first == [(undisturbed, 1), (undisturbed, 2)] * 4
    assert [one for one, _ in second] == [undisturbed] * 8


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1), (2, 3)])
def test_a_run_that_goes_on_elsewhere(crew, tmp_path, before, after):
    """Stopped in the middle of an epoch, and resumed on other ranks with other recomputation."""
    run(crew, (1.0,) * before, folder=tmp_path, until=14)
    knobs = {"recompute": WAYS["blocks"]}
    found = run(crew, (1.0,) * after, knobs=knobs, folder=tmp_path, until=None, resume=True)
    assert found[0] == alone()[0]
    assert found[1] == alone()[1][14:]


class Sharing(torch.nn.Module):
    """Counts its passes in a buffer that two modules have."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3 * 12, 5)
        count = torch.zeros(())
        self.register_buffer("count", count)
        self.inner.register_buffer("count", count)

    def forward(self, x, flags):
        self.count += 1
        return self.inner(x.flatten(1))


def test_a_buffer_that_two_modules_have_stays_one():
    task = task_of(model=Sharing, ghost_batch=None, steps=2)
    with ab.Session(task, plan_of(task, (1.0,))) as session:
        model = session.model
        list(session.steps())
        assert model.count is model.inner.count
        assert model.count == 4  # each step as its first part left it: two grains


def held_out_loss(shares, evaluation_batch):
    task = task_of(steps=2)
    task = replace(task, valid=torch.utils.data.Subset(task.train, range(23)))
    plan = plan_of(task, shares)
    choice = plan.choice.model_copy(update={"evaluation_batch": evaluation_batch})
    with ab.Session(task, plan.model_copy(update={"choice": choice})) as session:
        list(session.steps())
        return session.evaluate().loss.hex()


def held_out_on_rank(rank, size, shares, evaluation_batch):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    try:
        return held_out_loss(shares, evaluation_batch)
    finally:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]


@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 3.0)])
def test_an_evaluation_has_the_same_bits(crew, shares):
    """A schedule may depend on it."""
    expected = held_out_loss((1.0,), 23)
    assert held_out_loss((1.0,), 2) == expected
    assert set(crew(2, held_out_on_rank, shares, 7)) == {expected}


def test_threads_are_put_back():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        task = task_of(steps=1)
        with ab.Session(task, plan_of(task, (1.0,))) as session:
            assert torch.get_num_threads() == 1
            list(session.steps())
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_another_grain_has_other_bits_and_the_same_result():
    """The check that the tests above could fail: what they compare does depend on the cut."""
    world = World(loss="weighted", optimizer="adamw", dtype=torch.float32)
    found = []
    for samples in (1, 3):
        task = task_of_world(world)
        task = task.__class__(**{**vars(task), "reproducible": ab.Grains(samples=samples)})
        with ab.Session(task, plan_for(task, samples)) as session:
            list(session.steps())
        found.append(session.model)
    assert digest(found[0]) != digest(found[1])
    plain = [p.detach() for p in train_plainly(task_of_world(world)).model.parameters()]
    for model in found:
        for one, other in zip(model.parameters(), plain, strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm()


# ------------------------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parallel": "shard", "shares": (1.0, 1.0)}, "parallel is 'shard'"),
        (
            {"parallel": "replicate", "shares": (1.0, 1.0), "exchange": Exchange(stale=True)},
            "exchange asks for gradients applied one step late",
        ),
        (
            {
                "parallel": "replicate",
                "shares": (1.0, 1.0),
                "norms": "synchronised",
            },
            "norms is 'synchronised'",
        ),
        (
            {"parallel": "replicate", "shares": (1.0, 1.0), "balance": "measured"},
            "balance is 'measured'",
        ),
        ({"kernels": KernelChoices(compile=True)}, "kernels asks for compiled blocks"),
        ({"chunked_head": "head"}, "chunked_head is 'head'"),
        ({"grain": 8}, "choice.micro_batch is 8"),
    ],
)
def test_a_plan_whose_bits_would_depend_on_it(changes, told):
    with pytest.raises(ValueError, match="the run is to be reproducible, but") as caught:
        plan_for(task_of(), changes.pop("grain", GRAIN), **changes)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ({"parallel": "shard", "ranks": 2}, "parallel is 'shard'"),
        ({"micro_batch": 8}, "micro_batch is 8"),
        ({"chunked_loss": True}, "chunked_loss is True"),
        (
            {"exchange": Exchange(compress="bf16"), "ranks": 2},
            "exchange is 'gradients sent in bf16'",
        ),
        ({"norms": "synchronised", "ranks": 2}, "norms is 'synchronised'"),
        ({"balance": "measured", "ranks": 2}, "balance is 'measured'"),
        ({"compile": True}, "compile is True"),
    ],
)
def test_a_wish_that_bits_would_depend_on(wish, told):
    with pytest.raises(InputError, match="and the run is to be reproducible, but") as caught:
        ab.plan(task_of(), **wish)
    assert told in str(caught.value)


def test_grains_that_would_cut_ghost_batches():
    with pytest.raises(InputError, match="grains of 3 samples would cut ghost batches"):
        ab.plan(task_of(reproducible=ab.Grains(samples=3)))


@pytest.mark.parametrize(
    ("grains", "told"),
    [
        (ab.Grains(samples=0), "reproducible.samples is 0"),
        (ab.Grains(parts=0), "reproducible.parts is 0"),
        ("yes", "reproducible is a value of type str"),
    ],
)
def test_grains_that_are_none(grains, told):
    with pytest.raises(InputError, match=told):
        task_of(reproducible=grains)
