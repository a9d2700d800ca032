"""A run that was stopped and resumed ends as one that was not, on whatever ranks it goes on."""

from __future__ import annotations

import dataclasses
import os
from functools import partial

import pytest
import torch
from tests.equivalence.reference import plan_for
from tests.equivalence.test_batch_norm import Images
from tests.equivalence.test_batch_norm import task_of as images
from tests.equivalence.worlds import World, task_of
from torch import nn

import anybatch as ab
from anybatch.errors import InputError
from anybatch.events import Evaluated, Event, StepDone
from anybatch.plans import Exchange, Outer
from anybatch.state import whole_state

STEPS = 9  # of 3 per epoch and a bit: stops fall in the middle of epochs


def plan_of(task, ranks, parallel="replicate", micro_batch=3, **knobs):
    if ranks == 1:
        return plan_for(task, micro_batch, **knobs)
    if parallel == "groups":
        parallel, knobs["sharding"] = "shard", ab.Sharding(over=2, reduce="last pass")
    knobs.setdefault("shares", tuple(float(1 + rank % 2) for rank in range(ranks)))
    return plan_for(task, micro_batch, parallel=parallel, **knobs)


def trained(task, plan, folder=None, *, resume=False, until=None):
    """Weights and losses. With a folder it saves when it stops, `until` so many steps are done."""
    losses = []
    with ab.Session(task, plan, checkpoints=folder) as session:
        if resume:
            assert session.resume()
        for event in session.steps():
            losses.append(event.loss)
            if event.step == until:
                break
            if task.valid is not None:  # a pass without gradient, and then a checkpoint
                session.evaluate()
                if folder is not None:
                    session.save(wait=True)
        if until:
            session.save(wait=True)
        state = whole_state(session.model)
    return {name: value.double() for name, value in state.items()}, losses


def on_rank(rank, size, make, plan, folder, options):
    if size == 1:
        return trained(make(), plan, folder, **options)
    # `Session` looks here for who started it.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    try:
        return trained(make(), plan, folder, **options)
    finally:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]


def run(crew, make, plan, folder=None, **options):
    """The same on the ranks of `plan`; what rank 0 got."""
    return crew(len(plan.shares), on_rank, make, plan, folder, options)[0]


def assert_close(found, wanted, tolerance=1e-6):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        distance = (found[name] - value).norm()
        assert distance <= tolerance * value.norm().clamp_min(1e-9), name


def tokens(**changes):
    world = World(
        num_samples=50,
        global_batch=16,
        loss="weighted",
        optimizer="adamw",
        clip_norm=0.5,
        tied=True,
        sometimes=True,
        frozen=True,
        groups=True,
        schedule="samples",
        steps=STEPS,
    )
    return task_of(dataclasses.replace(world, **changes))


def held_out():
    task = tokens()
    return dataclasses.replace(task, valid=task.train)


def pictures():
    return images(Images, num_samples=50, global_batch=16, ghost_batch=4, steps=STEPS)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, "single"), (1, "single")),
        ((1, "single"), (2, "replicate")),
        ((2, "replicate"), (3, "replicate")),
        ((3, "replicate"), (1, "single")),
        ((2, "shard"), (3, "shard")),
        ((3, "shard"), (1, "single")),
        ((1, "single"), (2, "shard")),
        ((2, "shard"), (2, "replicate")),
        ((4, "groups"), (1, "single")),
        ((3, "replicate"), (4, "groups")),
        ((4, "replicate"), (2, "replicate")),
    ],
    ids=lambda way: f"{way[0]}-{way[1]}",
)
def test_on_other_ranks(crew, tmp_path, before, after):
    wanted, losses = trained(tokens(), plan_of(tokens(), 1))
    first, second = (plan_of(tokens(), *way) for way in (before, after))
    _, early = run(crew, tokens, first, tmp_path, until=4)
    found, late = run(crew, tokens, second, tmp_path, resume=True)
    assert early + late == pytest.approx(losses, rel=1e-6)
    assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel"), [(2, "replicate"), (2, "shard"), (4, "groups")])
def test_saved_right_after_an_evaluation(crew, tmp_path, ranks, parallel):
    wanted, losses = trained(tokens(), plan_of(tokens(), 1))
    plan = plan_of(tokens(), ranks, parallel)
    _, early = run(crew, held_out, plan, tmp_path, until=4)
    found, late = run(crew, held_out, plan, tmp_path, resume=True)
    assert early + late == pytest.approx(losses, rel=1e-6)
    assert_close(found, wanted)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(1, "single"), (2, "replicate"), (2, "shard"), (4, "groups")],
)
def test_with_batch_norm(crew, tmp_path, ranks, parallel):
    wanted, _ = trained(pictures(), plan_of(pictures(), 1, micro_batch=4))
    _, _ = run(crew, pictures, plan_of(pictures(), 1, micro_batch=4), tmp_path, until=5)
    plan = plan_of(pictures(), ranks, parallel, micro_batch=8)
    found, _ = run(crew, pictures, plan, tmp_path, resume=True)
    assert_close(found, wanted)


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_in_the_middle_of_an_epoch(tmp_path, steps):
    wanted, losses = trained(tokens(), plan_of(tokens(), 1))
    _, early = trained(tokens(), plan_of(tokens(), 1), tmp_path, until=steps)
    found, late = trained(tokens(), plan_of(tokens(), 1), tmp_path, resume=True)
    assert early + late == losses  # to the bit: nothing is another computation
    assert_close(found, wanted, 0.0)


class Stream(torch.utils.data.IterableDataset):
    """Random numbers of its own, in each epoch others."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        for i in torch.randperm(len(self.samples)).tolist():
            yield self.samples[i]


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.02, amsgrad=True, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=0.02, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.05),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_any_optimizer(tmp_path, name):
    def task():
        return dataclasses.replace(tokens(groups=False), optimizer=OPTIMIZERS[name])

    wanted, _ = trained(task(), plan_of(task(), 1))
    trained(task(), plan_of(task(), 1), tmp_path, until=4)
    found, _ = trained(task(), plan_of(task(), 1), tmp_path, resume=True)
    assert_close(found, wanted, 0.0)


SCHEDULERS = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=20),
    "warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "chained": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=3),
            torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
        ],
        [3],
    ),
}


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_with_any_scheduler(tmp_path, name, interval):
    def task():
        changes = {"scheduler": SCHEDULERS[name], "scheduler_interval": interval}
        return dataclasses.replace(tokens(), schedule=None, **changes)

    wanted, _ = trained(task(), plan_of(task(), 1))
    trained(task(), plan_of(task(), 1), tmp_path, until=5)
    found, _ = trained(task(), plan_of(task(), 1), tmp_path, resume=True)
    assert_close(found, wanted, 0.0)


def on_plateau():
    """The rate is halved after each evaluation whose loss is not half of the best before."""
    plain = tokens()
    return dataclasses.replace(
        plain,
        schedule=None,
        scheduler=partial(
            torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0, threshold=0.5
        ),
        valid=plain.train,
        evaluate_every=2,
    )


def test_with_a_rate_that_falls_on_a_plateau(tmp_path):
    wanted, losses = trained(on_plateau(), plan_of(on_plateau(), 1))
    _, early = trained(on_plateau(), plan_of(on_plateau(), 1), tmp_path, until=5)
    found, late = trained(on_plateau(), plan_of(on_plateau(), 1), tmp_path, resume=True)
    assert early + late == losses
    assert_close(found, wanted, 0.0)


def test_a_rate_that_falls_on_a_plateau_on_several_ranks(crew):
    wanted, _ = trained(on_plateau(), plan_of(on_plateau(), 1))
    found, _ = run(crew, on_plateau, plan_of(on_plateau(), 2))
    assert_close(found, wanted)


def test_a_plateau_is_told_by_the_evaluations_of_the_task_alone():
    """Those that a loop asks for beside them leave the rate as it is."""
    events, task = list[Event](), on_plateau()
    with ab.Session(task, plan_of(task, 1), sinks=[events.append]) as session:
        for step in session.steps():
            if step.step % 2 == 0:
                session.evaluate()
    rates = [event.learning_rate for event in events if isinstance(event, StepDone)]
    losses = {event.step: event.loss for event in events if isinstance(event, Evaluated)}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=rates[0])
    scheduler, wanted = task.scheduler(optimizer), list[float]()
    for step in range(1, STEPS + 1):
        wanted.append(optimizer.param_groups[0]["lr"])
        if step in losses:
            scheduler.step(losses[step])
    assert rates == wanted
    assert rates[-1] < rates[5] < rates[0]


def test_with_a_stream_and_dropout(tmp_path):
    def task():
        plain = tokens()
        return dataclasses.replace(
            plain,
            train=Stream(list(plain.train)),
            model=lambda: nn.Sequential(plain.build_model(), nn.Dropout(0.2)),
            loss=lambda model, batch: plain.loss(model[0], batch),
        )

    wanted, losses = trained(task(), plan_of(task(), 1))
    _, early = trained(task(), plan_of(task(), 1), tmp_path, until=5)
    found, late = trained(task(), plan_of(task(), 1), tmp_path, resume=True)
    assert early + late == losses
    assert_close(found, wanted, 0.0)


@pytest.mark.parametrize("precision", ["fp16", "bf16-weights", "fp16-weights", "bf16-pure"])
def test_in_half_precision(tmp_path, precision):
    def task():
        return tokens(dtype=torch.float32)

    plan = plan_of(task(), 1, precision=precision)
    wanted, losses = trained(task(), plan)
    _, early = trained(task(), plan, tmp_path, until=4)
    found, late = trained(task(), plan, tmp_path, resume=True)
    assert early + late == losses
    assert_close(found, wanted, 0.0)


@pytest.mark.parametrize(
    ("before", "after"),
    [("fp32", "bf16-weights"), ("bf16-weights", "fp32"), ("fp16", "fp32"), ("fp32", "bf16-pure")],
)
def test_in_another_precision(tmp_path, before, after):
    def task():
        return tokens(dtype=torch.float32, frozen=False)  # what is not trained has no master

    with ab.Session(task(), plan_of(task(), 1, precision=before), checkpoints=tmp_path) as session:
        for _ in session.steps():
            pass
        session.save(wait=True)
        first = session.model
    with ab.Session(task(), plan_of(task(), 1, precision=after), checkpoints=tmp_path) as session:
        assert session.resume()
        assert not list(session.steps())
        second = session.model
    # Nothing but the rounding of pure half-precision weights is lost on the way.
    tolerance = 0.01 if after == "bf16-pure" else 0.0
    assert_close(second.state_dict(), first.state_dict(), tolerance)


def local_steps():
    return tokens(steps=8)


def test_ranks_that_take_steps_by_themselves(crew, tmp_path):
    plan = plan_of(local_steps(), 2, exchange=Exchange(every=2, outer=Outer()))
    wanted, _ = run(crew, local_steps, plan)
    run(crew, local_steps, plan, tmp_path, until=4)
    found, _ = run(crew, local_steps, plan, tmp_path, resume=True)
    assert_close(found, wanted, 0.0)


def test_the_option_that_was_changed_in_the_task_counts(tmp_path):
    task = dataclasses.replace(tokens(groups=False), schedule=None)
    trained(task, plan_of(task, 1), tmp_path, until=4)
    slower = dataclasses.replace(
        task, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-9, weight_decay=0.0)
    )
    with ab.Session(slower, plan_of(slower, 1), checkpoints=tmp_path) as session:
        assert session.resume()
        before = whole_state(session.model)
        before = {name: value.clone() for name, value in before.items()}
        next(session.steps())
        assert_close(whole_state(session.model), before, 1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch": 8}, "global_batch was 16 and is 8"),
        ({"seed": 3}, "seed was 0 and is 3"),
        ({"num_samples": 60}, "the number of training samples was 50 and is 60"),
        ({"tied": False}, "is missing"),
    ],
)
def test_another_task_is_refused(tmp_path, changes, words):
    trained(tokens(), plan_of(tokens(), 1), tmp_path, until=2)
    other = tokens(**changes)
    with (
        ab.Session(other, plan_of(other, 1), checkpoints=tmp_path) as session,
        pytest.raises(InputError, match=words),
    ):
        session.resume()


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path):
    with ab.Session(tokens(), plan_of(tokens(), 1), checkpoints=tmp_path / "none") as session:
        assert not session.resume()
        assert next(session.steps()).step == 1


def test_without_a_folder_nothing_can_be_saved():
    with ab.Session(tokens(), plan_of(tokens(), 1)) as session:
        for what in (session.save, session.resume):
            with pytest.raises(InputError, match="no folder for checkpoints"):
                what()
