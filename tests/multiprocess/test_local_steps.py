"""Local steps: ranks train by themselves, and their weights are averaged every k steps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.equivalence.reference import mean_loss, plan_for, samples_of
from tests.equivalence.worlds import World, task_of
from tests.multiprocess.relaxed import Ran, alike, as_ranks, deviation, digits, exact_digits
from torch.utils.data import default_collate

import anybatch as ab
from anybatch.data import Steps, share
from anybatch.events import OutOfMemory, Replanned
from anybatch.plans import Exchange, Outer

WORLD = World(num_samples=37, global_batch=16, loss="weighted", optimizer="adamw", steps=12)


def local(every, **knobs):
    return {"parallel": "replicate", "exchange": Exchange(every=every, **knobs)}


def imitate(world, shares, every, outer):
    """The same by hand, in one process: one model and optimizer per rank, averages in between."""
    task = task_of(world)
    models = [task.build_model() for _ in shares]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [task.optimizer(task.parameters_of(model)) for model in models]
    steps = Steps(
        num_samples=len(task.train),
        global_batch=task.global_batch,
        last=task.last,
        epochs=None,
        steps=task.steps,
        samples=None,
    )
    common = [p.detach().clone() for p in models[0].parameters()]
    momenta = [torch.zeros_like(p) for p in common]
    weights = [0.0] * len(shares)
    for step in range(task.steps):
        indices = samples_of(task, steps, step)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            own = [indices[i] for i in share(len(indices), shares, rank)]
            if not own:
                continue
            returned = task.loss(model, default_collate([task.train[i] for i in own]))
            optimizer.zero_grad()
            mean_loss(returned).backward()
            optimizer.step()
            weights[rank] += float(returned.weight)
        if (step + 1) % every == 0 or step + 1 == task.steps:
            for i in range(len(common)):
                each = [list(model.parameters())[i].detach() for model in models]
                parts = [w / sum(weights) for w in weights]
                moved = sum(part * (common[i] - p) for part, p in zip(parts, each, strict=True))
                if outer is None:
                    common[i] -= moved
                else:
                    momenta[i].mul_(outer.momentum).add_(moved)
                    common[i] -= outer.lr * (moved + outer.momentum * momenta[i])
                for p in each:
                    p.copy_(common[i])
            weights = [0.0] * len(shares)
    return models[0].state_dict()


@pytest.mark.parametrize("outer", [None, Outer(), Outer(lr=1.0, momentum=0.0)])
@pytest.mark.parametrize(("shares", "every"), [((1.0, 1.0), 4), ((2.0, 1.0, 1.0), 5)])
def test_it_computes_what_a_loop_by_hand_computes(crew, shares, every, outer):
    ranks = crew(len(shares), as_ranks, WORLD, 3, shares, local(every, outer=outer))
    assert alike(ranks)
    assert deviation(ranks[0].parameters, imitate(WORLD, shares, every, outer)) < 1e-9


def test_an_outer_optimizer_that_does_nothing_is_plain_averaging(crew):
    plain = crew(2, as_ranks, WORLD, 3, (1.0, 1.0), local(4))
    outer = crew(2, as_ranks, WORLD, 3, (1.0, 1.0), local(4, outer=Outer(lr=1.0, momentum=0.0)))
    assert deviation(outer[0].parameters, plain[0].parameters) < 1e-12


def test_a_short_last_step_may_leave_a_rank_without_samples(crew):
    world = dataclasses.replace(WORLD, num_samples=33)  # 16, 16, 1
    ranks = crew(2, as_ranks, world, 3, (1.0, 1.0), local(4))
    assert alike(ranks)
    assert deviation(ranks[0].parameters, imitate(world, (1.0, 1.0), 4, None)) < 1e-9


def test_it_may_do_so_where_the_loss_is_scaled(crew):
    world = dataclasses.replace(WORLD, num_samples=33, dtype=torch.float32)
    ranks = crew(2, as_ranks, world, 3, (1.0, 1.0), {**local(4), "precision": "fp16"})
    assert alike(ranks)
    assert deviation(ranks[0].parameters, imitate(world, (1.0, 1.0), 4, None)) < 2.0**-8


@pytest.mark.parametrize("every", [2, 6])
def test_nothing_crosses_within_a_round(crew, every):
    exact, _ = crew(2, as_ranks, WORLD, 3, (1.0, 1.0), {"parallel": "replicate"})
    ran, _ = crew(2, as_ranks, WORLD, 3, (1.0, 1.0), local(every))
    assert [bool(sent) for sent in ran.step_bytes] == [
        (step + 1) % every == 0 for step in range(12)
    ]
    assert sum(ran.step_bytes) <= sum(exact.step_bytes) / every


def test_movements_may_cross_in_16_bits(crew):
    world = dataclasses.replace(WORLD, dtype=torch.float32)
    whole = crew(2, as_ranks, world, 3, (1.0, 1.0), local(4))
    half = crew(2, as_ranks, world, 3, (1.0, 1.0), local(4, compress="bf16"))
    assert alike(half)
    assert 0 < deviation(half[0].parameters, whole[0].parameters) < 2.0**-8
    assert sum(half[0].step_bytes) < 0.6 * sum(whole[0].step_bytes)


def with_failure(rank, size, bad_rank):
    """One rank runs out of memory in the second step of a round."""
    task = task_of(WORLD)
    left, events, done = [1], [], [0]

    def fail(*_):
        if rank == bad_rank and done[0] == 1 and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("tried to allocate more than there is")

    plan = plan_for(task, 4, shares=(1.0,) * size, **local(4))
    with ab.Session(task, plan, [events.append]) as session:
        session.model.body.register_forward_hook(fail)
        for _ in session.steps():
            done[0] += 1
        micro_batch = session.plan.choice.micro_batch
    return Ran(dict(session.model.state_dict()), events=[micro_batch, *events])


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_memory_that_runs_out_is_a_matter_of_one_rank(crew, bad_rank):
    ranks = crew(2, with_failure, bad_rank)
    assert alike(ranks)
    assert deviation(ranks[0].parameters, imitate(WORLD, (1.0, 1.0), 4, None)) < 1e-9
    assert [ran.events[0] for ran in ranks] == [2 if rank == bad_rank else 4 for rank in (0, 1)]
    told = [type(e) for e in ranks[0].events if isinstance(e, OutOfMemory | Replanned)]
    assert told == ([OutOfMemory, Replanned] if bad_rank == 0 else [])  # only rank 0 speaks


def with_an_error(rank, size):
    task = task_of(WORLD)
    with ab.Session(task, plan_for(task, 4, shares=(1.0,) * size, **local(4))) as session:
        if rank == 1:
            session.model.body.register_forward_hook(lambda *_: 1 / 0)
        for _ in session.steps():
            pass


def test_a_rank_that_fails_for_good_is_missed_at_the_end_of_the_round(crew):
    (first, _), (second, _) = crew.outcomes(2, with_an_error)
    assert isinstance(second, ZeroDivisionError)
    assert type(first).__name__ == "PeerLost"
    assert "while the weights were averaged" in str(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "exchange",
    [Exchange(every=4), Exchange(every=8), Exchange(every=8, outer=Outer())],
    ids=["every 4", "every 8", "every 8, outer"],
)
def test_digits_are_learned_with_fewer_bytes(crew, exchange):
    options = {"epochs": 6, "width": 8, "global_batch": 64}
    exact = exact_digits(crew, options)
    ranks = crew(2, digits, {"parallel": "replicate", "exchange": exchange}, options)
    assert exact.evaluation.metrics["accuracy"] > 0.94
    accuracy = ranks[0].evaluation.metrics["accuracy"]
    assert accuracy >= 0.95 * exact.evaluation.metrics["accuracy"]
    assert alike(ranks)  # buffers too
    # Running statistics cross with the weights, and there is one more round at the end.
    assert sum(ranks[0].step_bytes) < 1.1 / exchange.every * sum(exact.step_bytes)
