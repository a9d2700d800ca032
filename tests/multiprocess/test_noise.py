"""Every rank measures the gradient of its own first micro-batch, before ranks add theirs up."""

from __future__ import annotations

import pytest
import torch
from tests.equivalence.noise import by_hand, same, standing
from tests.equivalence.reference import plan_for
from tests.equivalence.worlds import World, task_of

import anybatch as ab
from anybatch.compute import Replica
from anybatch.plans import Exchange


def as_ranks(rank, size, world, micro_batch, knobs, stands=True, measured=True):
    """The first steps of `world`, and the parameters after them."""
    task = standing(task_of(world)) if stands else task_of(world)
    plan = plan_for(
        task, micro_batch, **{"parallel": "replicate", "shares": (1.0,) * size, **knobs}
    )
    sum_norm = Replica.sum_norm
    if not measured:
        Replica.sum_norm = lambda self: None
    try:
        with ab.Session(task, plan) as session:
            steps = session.steps()
            done = [next(steps) for _ in range(5)]
        return done, [p.detach() for p in session.model.parameters()]
    finally:
        Replica.sum_norm = sum_norm


@pytest.mark.parametrize("micro_batch", [2, 16])
@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 0.0, 1.0)])
@pytest.mark.parametrize("loss", ["weighted", "counted on device"])
def test_the_gradients_of_ranks_are_measured_before_they_cross(crew, loss, shares, micro_batch):
    world = World(loss=loss, sometimes=True, tied=True, last="wrap")
    for done, _ in crew(len(shares), as_ranks, world, micro_batch, {"shares": shares}):
        for number, one in enumerate(done):
            wanted = by_hand(task_of(world), number, micro_batch, shares)
            assert same(one, wanted, rel=1e-9)


@pytest.mark.parametrize("micro_batch", [2, 40])
def test_of_samples_in_order_of_length_the_first_rank_measures_a_few(crew, micro_batch):
    world = World(data="ragged", lengths=True, loss="counted", num_samples=90, global_batch=40)
    for done, _ in crew(2, as_ranks, world, micro_batch, {}):
        for number, one in enumerate(done[:2]):
            assert same(one, by_hand(task_of(world), number, 3), rel=1e-9)


@pytest.mark.parametrize("precision", ["fp16", "bf16-weights"])
def test_in_half_precision_too(crew, precision):
    world = World(loss="weighted", dtype=torch.float32, last="wrap")
    for done, _ in crew(2, as_ranks, world, 8, {"precision": precision}):
        for number, one in enumerate(done):
            assert same(one, by_hand(task_of(world), number, 8, (1.0, 1.0)), rel=5e-2)


@pytest.mark.parametrize(
    "knobs",
    [
        {"exchange": Exchange(every=2)},
        {"exchange": Exchange(stale=True)},
        {"parallel": "shard"},
    ],
    ids=["local steps", "stale", "shard"],
)
def test_nothing_is_measured_where_the_two_gradients_do_not_belong_together(crew, knobs):
    for done, _ in crew(2, as_ranks, World(last="wrap"), 2, knobs):
        assert all(one.part_weight is one.part_grad_norm is None for one in done)


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_training_is_the_same_to_the_bit_without_it(crew, micro_batch):
    world = World(loss="weighted", optimizer="adamw", last="wrap")
    ((with_it, ours), *_), ((without, theirs), *_) = (
        crew(2, as_ranks, world, micro_batch, {}, False, measured) for measured in (True, False)
    )
    assert with_it[0].part_weight
    assert without[0].part_weight is None
    for one, other in zip(with_it, without, strict=True):
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
