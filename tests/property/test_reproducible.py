"""Grains of any size, in any number of parts, give the update of the plain loop."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import assume, example, given, settings
from tests.equivalence.reference import assert_equal, train, train_plainly
from tests.equivalence.worlds import World, task_of
from tests.property.test_exactness import learnable, worlds

import anybatch as ab


@pytest.mark.slow
@settings(max_examples=40)
@given(world=worlds, samples=st.integers(1, 24), parts=st.integers(1, 12))
@example(world=World(sometimes=True, optimizer="adamw", global_batch=5), samples=2, parts=2)
@example(world=World(data="ragged", lengths=True, last="wrap", loss="pair"), samples=2, parts=5)
@example(world=World(num_samples=17, global_batch=17, loss="weighted"), samples=4, parts=3)
def test_any_grains_give_the_update_of_the_plain_loop(world, samples, parts):
    if world.last == "drop" and world.num_samples < world.global_batch:
        return
    task = task_of(world)
    assume(learnable(world, task))
    grained = dataclasses.replace(task, reproducible=ab.Grains(samples, parts))
    ours = train(grained, min(samples, world.global_batch))
    assert_equal(ours, train_plainly(task), tolerance=1e-6)
