"""Any cut of any task gives the update of the plain loop."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, example, given, settings
from tests.equivalence.reference import assert_equal, samples_of, train, train_plainly
from tests.equivalence.worlds import DATA, IGNORED, LOSSES, OPTIMIZERS, World, task_of
from tests.equivalence.worlds import samples_of as make_samples

from anybatch.data import Steps

worlds = st.builds(
    World,
    data=st.sampled_from(DATA),
    lengths=st.booleans(),
    loss=st.sampled_from(LOSSES),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    num_samples=st.integers(1, 40),
    global_batch=st.integers(1, 24),
    last=st.sampled_from(["keep", "drop", "wrap"]),
    clip_norm=st.sampled_from([None, 0.05, 1.0]),
    schedule=st.sampled_from([None, "samples", "torch"]),
    tied=st.booleans(),
    sometimes=st.booleans(),
    frozen=st.booleans(),
    groups=st.booleans(),
    seed=st.integers(0, 3),
)


def learnable(world: World, task) -> bool:
    """Whether every global batch has something to learn from."""
    if world.last == "drop" and world.num_samples < world.global_batch:
        return False
    if not world.loss.startswith(("pair", "counted")):
        return True
    samples = make_samples(World(num_samples=world.num_samples, seed=world.seed, data="tuples"))
    if world.data in ("ragged", "lists"):
        samples = [((None, s[1]), None) for s in task.train]
    counts = [int((sample[0][1] != IGNORED).sum()) for sample in samples]
    steps = Steps(
        num_samples=world.num_samples,
        global_batch=world.global_batch,
        last=world.last,
        steps=world.steps,
    )
    return all(sum(counts[i] for i in samples_of(task, steps, s)) for s in range(world.steps))


@pytest.mark.nightly
@settings(max_examples=100)
@given(world=worlds, micro_batch=st.integers(1, 24))
def test_any_cut_of_many_tasks(world, micro_batch):
    check(world, micro_batch)


@settings(max_examples=20)
@given(world=worlds, micro_batch=st.integers(1, 24))
@example(world=World(sometimes=True, optimizer="adamw", global_batch=5), micro_batch=2)
@example(world=World(optimizer="adagrad", tied=True, data="lists", loss="pair"), micro_batch=3)
@example(world=World(num_samples=1, global_batch=1), micro_batch=1)
@example(world=World(data="ragged", lengths=True, last="wrap", loss="pair"), micro_batch=2)
@example(world=World(loss="counted on device", data="ragged", clip_norm=0.05), micro_batch=1)
def test_any_cut_gives_the_update_of_the_plain_loop(world, micro_batch):
    check(world, micro_batch)


def check(world, micro_batch):
    if world.last == "drop" and world.num_samples < world.global_batch:
        return
    task = task_of(world)
    assume(learnable(world, task))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours = train(task, min(micro_batch, world.global_batch))
        assert_equal(ours, train_plainly(task), tolerance=1e-6)
    finally:
        torch.set_num_threads(before)
