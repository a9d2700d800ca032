"""A sharded model is trained to the weights of a plain one."""

from __future__ import annotations

import dataclasses
import time
from copy import deepcopy
from functools import partial

import pytest
import torch
from tests.equivalence.decoder import Decoder, next_word
from tests.equivalence.reference import train, train_plainly
from tests.equivalence.sharding import CPU, Sharded
from tests.equivalence.worlds import World, task_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.errors import PeerFailed
from anybatch.parallel.shard import Shard
from anybatch.parallel.whole import full_state_dict, load_full_state_dict
from anybatch.plans import Recompute

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}


def as_ranks(rank, size, world, micro_batch, shares, options):
    return Sharded(task_of(world), micro_batch, shares, **options).train()


def check(crew, world, shares, micro_batch=3, **options):
    ranks = crew(len(shares), as_ranks, world, micro_batch, tuple(shares), options)
    plain = train_plainly(task_of(world))
    tolerance = TOLERANCE[world.dtype]
    wanted = plain.model.state_dict()
    found = ranks[0].state
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        distance = (found[name].double() - value.double()).norm()
        assert distance <= tolerance * value.double().norm(), name
    for run in ranks:
        assert run.losses == pytest.approx(plain.losses, rel=tolerance)
        if plain.norms:
            assert run.norms == pytest.approx(plain.norms, rel=tolerance)
    return ranks, plain


@pytest.mark.parametrize("global_batch", [1, 7, 101])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_any_global_batch_on_any_number_of_ranks(crew, size, global_batch):
    world = World(
        num_samples=230,
        global_batch=global_batch,
        loss="weighted",
        optimizer="adamw",
        clip_norm=0.5,
    )
    check(crew, world, (1.0,) * size, micro_batch=max(1, global_batch // 5))


@pytest.mark.parametrize("shares", [(5.0, 2.0, 1.0), (0.0, 1.0), (1.0, 0.0, 3.0)])
@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.nightly), "adamw"])
def test_unequal_shares_are_weighed_exactly(crew, shares, optimizer):
    check(crew, World(loss="pair", optimizer=optimizer, clip_norm=0.1), shares)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("size", [2, 3])
def test_parameters_tied_frozen_or_used_by_few_samples(crew, size, optimizer):
    world = World(
        sometimes=True, tied=True, frozen=True, optimizer=optimizer, global_batch=5, loss="pair"
    )
    check(crew, world, (1.0,) * size, micro_batch=2)


@pytest.mark.parametrize("size", [2, 3])
def test_single_precision(crew, size):
    world = World(dtype=torch.float32, loss="pair", global_batch=7, tied=True)
    check(crew, world, (1.0,) * size, micro_batch=2)


@pytest.mark.parametrize("reduce", ["every pass", "last pass"])
def test_gradients_added_up_after_each_pass_or_after_the_last(crew, reduce):
    world = World(loss="pair", optimizer="adamw", sometimes=True)
    check(crew, world, (3.0, 1.0), micro_batch=2, reduce=reduce)


@pytest.mark.parametrize("blocks", [("body",), (".",)])
def test_recompute_gathers_again(crew, blocks):
    check(crew, World(loss="pair"), (1.0, 1.0), recompute=Recompute(blocks=blocks))


def test_machines_replicate_what_their_ranks_divide(crew):
    world = World(loss="pair", optimizer="adamw", clip_norm=0.1, sometimes=True, tied=True)
    check(crew, world, (2.0, 1.0, 1.0, 1.0), micro_batch=2, over=2)


# ------------------------------------------------------------------------ a decoder, and its state


ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def decoder_task(dtype=torch.float64, steps=6, optimizer=ADAMW, **options):
    draw = torch.Generator().manual_seed(3)
    return ab.Task(
        model=partial(Decoder, dtype=dtype, **options),
        loss=next_word,
        optimizer=optimizer,
        train=TensorDataset(torch.randint(0, 23, (40, 9), generator=draw)),
        global_batch=11,
        steps=steps,
        clip_norm=1.0,
    )


def decoder_as_ranks(rank, size, options, group_options):
    torch.manual_seed(0 if rank == 0 else 100 + rank)  # the weights are those of rank 0
    return Sharded(
        decoder_task(**options), 2, (2.0,) + (1.0,) * (size - 1), **group_options
    ).train()


def trained_plainly(**options):
    torch.manual_seed(0)
    return train_plainly(decoder_task(**options))


TILED = Recompute(blocks=("layers.*",), tiled=("layers.*.mlp",), chunked_attention=True)


@pytest.mark.slow
@pytest.mark.parametrize("repeated", [1, 2])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_tied_decoder_with_blocks_run_more_than_once(crew, size, repeated):
    (first, *others) = crew(size, decoder_as_ranks, {"repeated": repeated}, {})
    plain = trained_plainly(repeated=repeated)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(first.state[name], value, rtol=1e-6, atol=1e-9)
    assert first.state["head.weight"].data_ptr() == first.state["embed.weight"].data_ptr()
    assert all(run.state == {} for run in others)  # whole values only where they are used


@pytest.mark.slow
@pytest.mark.parametrize("repeated", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_mlps_in_tiles_are_gathered_with_their_block(crew, repeated):
    first, _ = crew(2, decoder_as_ranks, {"repeated": repeated}, {"recompute": TILED})
    plain = trained_plainly(repeated=repeated)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(first.state[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [None, Recompute(blocks=("layers.*",)), TILED])
@pytest.mark.parametrize(
    "precision", [pytest.param("bf16", marks=pytest.mark.nightly), "bf16-weights"]
)
def test_half_precision_is_that_of_one_rank(crew, precision, recompute):
    """Float32 masters are kept in parts, weights gathered in half precision, those of norms not. What
    differs is where the rounded gradients of micro-batches are added up."""
    task = {"dtype": torch.float32, "optimizer": SGD}
    ranks = crew(2, decoder_as_ranks, task, {"precision": precision, "recompute": recompute})
    torch.manual_seed(0)
    alone = train(decoder_task(**task), 2, precision=precision)
    assert ranks[0].losses == pytest.approx(alone.losses, rel=1e-3)
    for name, value in alone.model.state_dict().items():
        assert ranks[0].state[name].dtype == torch.float32
        assert (ranks[0].state[name] - value).norm() < 5e-3 * value.norm().clamp_min(1e-2), name


def moved_to_other_ranks(rank, size, state):
    """Goes on from a state that other ranks left; returns what comes out at once, and after 3 steps."""
    mine = Sharded(decoder_task(steps=3), 2, (1.0,) * size)
    load_full_state_dict(mine.model, state if rank == 0 else None)
    return full_state_dict(mine.model), mine.train()


def test_weights_go_on_with_other_ranks_and_in_plain_torch(crew):
    (first, _) = crew(2, decoder_as_ranks, {"steps": 3}, {})
    (same, onward), *_ = crew(3, moved_to_other_ranks, first.state)
    for name, value in first.state.items():
        assert torch.equal(same[name], value)

    task = decoder_task(steps=3)
    model = task.build_model()
    model.load_state_dict(first.state)
    plain = train_plainly(dataclasses.replace(task, model=model))
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(onward.state[name], value, rtol=1e-6, atol=1e-9)


def refused(rank, size, change, path):
    mine = Sharded(decoder_task(), 2, (1.0,) * size)
    state = full_state_dict(mine.model)
    if rank == 0:
        change(state)
        torch.save(state, path)
    try:
        ab.load_weights(mine.model, path)
    except ab.InputError as error:
        return str(error)
    finally:
        mine.group.close()


def without_norm(state):
    del state["norm.weight"]


def with_more(state):
    state["another"] = torch.zeros(2)


def of_another_shape(state):
    state["norm.bias"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_norm, "'norm.weight' is missing"),
        (with_more, "'another' is not in the model"),
        (of_another_shape, "'norm.bias' has the shape (3,) in the file and (16,) in the model"),
    ],
)
def test_weights_of_another_model_are_refused_on_all_ranks(crew, change, words, tmp_path):
    messages = crew(2, refused, change, tmp_path / "w.pt")
    assert messages[0] == messages[1]
    assert words in messages[0]


def evaluated_between_steps(rank, size):
    mine = Sharded(decoder_task(steps=2), 2, (1.0,) * size)
    tokens = mine.task.train[:4]
    found = []
    for step in range(2):
        mine.model.train()
        assert mine._attempt(step)
        mine.model.eval()
        with torch.no_grad():
            found.append(float(next_word(mine.model, tokens).sum))
    mine.finish()
    return found


def test_evaluation_between_steps_sees_the_new_weights(crew):
    torch.manual_seed(0)
    found = crew(2, evaluated_between_steps)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def builds_in_turn(rank, size):
    """When this rank began to build, and when it was done: by a clock that all processes share."""
    span = []

    def make():
        span.append(time.monotonic())
        model = Decoder()
        span.append(time.monotonic())
        return model

    group = Shard((1.0,) * size, CPU)
    group.build(make)
    group.close()
    return span


def test_ranks_build_one_after_the_other_and_rank_0_last(crew):
    spans = crew(3, builds_in_turn)
    assert spans[2][1] <= spans[1][0] <= spans[1][1] <= spans[0][0]


def cannot_build(rank, size):
    group = Shard((1.0,) * size, CPU)
    try:
        group.build(lambda: 1 / 0 if rank == 1 else Decoder())
    finally:
        group.close()


def test_a_model_that_cannot_be_built_on_one_rank_stops_all(crew):
    (first, _), (second, _) = crew.outcomes(2, cannot_build)
    assert isinstance(second, ZeroDivisionError)
    assert isinstance(first, PeerFailed)
    assert "rank 1 failed with ZeroDivisionError: division by zero." in str(first)


class Checkpointed(nn.Module):
    """A block that the script checkpoints by itself, run so many times."""

    def __init__(self, times, reentrant):
        super().__init__()
        self.embed = nn.Linear(4, 8, dtype=torch.float64)
        block = [nn.Linear(8, 8, dtype=torch.float64), nn.Tanh()]
        self.blocks = nn.ModuleList([nn.Sequential(*block), nn.Sequential(*deepcopy(block))])
        self.times, self.reentrant = times, reentrant

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            for _ in range(self.times):
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def _squares(model, batch):
    return ab.Loss(model(batch[0]).square().sum(), len(batch[0]))


def checkpointed_task(times, reentrant):
    draw = torch.Generator().manual_seed(0)
    return ab.Task(
        model=partial(Checkpointed, times, reentrant),
        loss=_squares,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        train=TensorDataset(torch.randn(12, 4, generator=draw, dtype=torch.float64)),
        global_batch=12,
        steps=2,
    )


def checkpointed_as_ranks(rank, size, times, reentrant):
    try:
        run = Sharded(checkpointed_task(times, reentrant), 3, (1.0,) * size)
        return run.train().state
    except ab.InputError as error:
        return str(error)


@pytest.mark.parametrize(("times", "reentrant"), [(1, True), (2, False), (2, True)])
def test_checkpoints_of_the_script_are_right_or_refused(crew, times, reentrant):
    found = crew(2, checkpointed_as_ranks, times, reentrant)[0]
    if times > 1 and reentrant:
        assert "'blocks.1' runs several times in one pass" in found
        return
    wanted = train_plainly(checkpointed_task(times, reentrant)).model.state_dict()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)
