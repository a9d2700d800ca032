"""Batches in tokens and batches that grow, on any number of ranks and resumed on another, are those of
a plain loop that takes sample after sample."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.equivalence.reference import plan_for
from torch import nn
from torch.utils.data import Dataset

import anybatch as ab
from anybatch.data import permutation

NUM_SAMPLES, SEED, LR = 90, 5, 0.02
LENGTHS = torch.randint(1, 12, (NUM_SAMPLES,), generator=torch.Generator().manual_seed(1)).tolist()


class World(NamedTuple):
    """A batch rule and a length of training; `by_lengths`: samples are padded and cut by length."""

    rule: Any
    training: dict[str, int]
    last: str = "keep"
    by_lengths: bool = False


WORLDS = {
    "tokens": World(ab.Tokens(60), {"epochs": 2}, by_lengths=True),
    "tokens that wrap": World(ab.Tokens(70), {"steps": 14}, "wrap", by_lengths=True),
    "tokens that cut nothing": World(ab.Tokens(60, of=LENGTHS), {"samples": 150}),
    "ramp": World(ab.Ramp(2, 17, 0.5), {"epochs": 2}),
    "ramp with its rate": World(ab.Ramp(3, 16, 0.7, "sqrt"), {"steps": 15}, "wrap"),
    "ramp in stages": World(
        ab.Ramp(24, 6, 1.0, "linear", lambda done: int(3 * done) / 3), {"samples": 160}
    ),
    "ramp in tokens": World(
        ab.Ramp(ab.Tokens(15), ab.Tokens(90), 0.4), {"epochs": 2}, "wrap", by_lengths=True
    ),
}


class Rows(Dataset):
    """Sequences of unequal length."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(2)
        self.rows = [torch.randn(n, 3, generator=draw, dtype=torch.float64) for n in LENGTHS]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def padded(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def squares(model, batch):
    there = batch.abs().sum(dim=2) > 0
    return ((model(batch)[:, :, 0] - batch.sum(dim=2).sin()) ** 2)[there].sum(), there.sum()


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def falls(done):
    return 1 - 0.5 * done


def task_of(name):
    world = WORLDS[name]
    return ab.Task(
        model=build,
        loss=squares,
        optimizer=lambda params: torch.optim.AdamW(params, lr=LR),
        schedule=lambda progress: falls(progress.fraction),
        train=Rows(),
        collate=padded,
        lengths=LENGTHS if world.by_lengths else None,
        global_batch=world.rule,
        last=world.last,
        seed=SEED,
        clip_norm=0.5,
        **world.training,
    )


class Step(NamedTuple):
    """What a step has: samples, and the part of training that was done before it."""

    samples: list[int]
    index: int
    taken: int


def plain_steps(world: World) -> list[Step]:
    """The steps of `world`, sample after sample, and nothing of anybatch but the order of an epoch."""
    training, rule = world.training, world.rule
    in_tokens = isinstance(getattr(rule, "start", rule), ab.Tokens)
    weights = LENGTHS if in_tokens else [1] * NUM_SAMPLES
    line = [s for e in range(9) for s in permutation(SEED, e, NUM_SAMPLES).tolist()]
    total = training.get("samples", training.get("epochs", 9) * NUM_SAMPLES)
    whole = sum(weights[s] for s in line[:total])
    found = [Step([], 0, 0)]
    for taken, sample in enumerate(line[:total]):
        step = found[-1]
        begun = sum(weights[s] for s in line[: step.taken]) / whole
        done = step.index / training["steps"] if "steps" in training else begun
        ended = world.last == "keep" and taken and taken % NUM_SAMPLES == 0
        if step.samples and (ended or sum(weights[s] for s in step.samples) >= amount(rule, done)):
            if len(found) == training.get("steps"):
                return found
            found.append(step := Step([], len(found), taken))
        step.samples.append(sample)
    return found


def count(size):
    return size.count if isinstance(size, ab.Tokens) else size


def amount(rule, done):
    if isinstance(rule, ab.Tokens):
        return rule.count
    part = min(1.0, done / rule.until)
    part = rule.shape(part) if rule.shape else part
    return round(count(rule.start) + (count(rule.stop) - count(rule.start)) * part)


def plain(name):
    """Parameters, sizes of steps and learning rates of a plain loop."""
    world, rows, model = WORLDS[name], Rows(), build()
    steps = plain_steps(world)
    in_tokens = isinstance(getattr(world.rule, "start", world.rule), ab.Tokens)
    weights = LENGTHS if in_tokens else [1] * NUM_SAMPLES
    whole = sum(weights[s] for step in steps for s in step.samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    before, rates = 0, []
    for step in steps:
        total, weight = squares(model, padded([rows[s] for s in step.samples]))
        (total / weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        done = step.index / len(steps) if "steps" in world.training else before / whole
        rate = LR * falls(before / whole)
        if isinstance(world.rule, ab.Ramp) and world.rule.learning_rate:
            follows = amount(world.rule, done) / count(world.rule.stop)
            rate *= follows if world.rule.learning_rate == "linear" else math.sqrt(follows)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        before += sum(weights[s] for s in step.samples)
        rates.append(rate)
    return list(model.parameters()), [len(step.samples) for step in steps], rates


def as_rank(rank, size, name, folder, until):
    """Trains, from where the run in `folder` is, until so many steps are done."""
    task = task_of(name)
    shares = tuple(1.0 + rank for rank in range(size))
    plan = plan_for(task, 4, parallel="replicate" if size > 1 else "single", shares=shares)
    with ab.Session(task, plan, checkpoints=folder) as session:
        session.resume()
        events = []
        for event in session.steps():
            events.append(event)
            if event.step == until:
                break
        session.save(wait=True)
        assert session.total_steps is not None
        finished = session.num_steps == session.total_steps
        parameters = [p.detach().clone() for p in session.model.parameters()]
    return parameters, events, finished


@pytest.mark.parametrize("name", WORLDS)
def test_ranks_and_restarts_take_the_steps_of_a_plain_loop(crew, name, tmp_path: Path):
    parameters, sizes, rates = plain(name)
    assert len(sizes) > 8
    middle, later = len(sizes) // 3, 2 * len(sizes) // 3
    events = []
    for ranks, until in ((1, middle), (3, later), (2, None)):
        results = crew(ranks, as_rank, name, str(tmp_path), until)
        events += results[0][1]
    assert results[0][2]
    assert [event.samples for event in events] == sizes
    assert [event.learning_rate for event in events] == pytest.approx(rates, rel=1e-12)
    for found, _, _ in results:
        for mine, wanted in zip(found, parameters, strict=True):
            torch.testing.assert_close(mine, wanted.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["tokens", "ramp"])
def test_a_run_that_goes_on_has_to_have_the_same_batch(crew, name, tmp_path: Path):
    crew(1, as_rank, name, str(tmp_path), 2)
    other = {"tokens": "tokens that wrap", "ramp": "ramp in stages"}[name]
    (outcome,) = crew.outcomes(1, as_rank, other, str(tmp_path), None)
    assert isinstance(outcome[0], ab.InputError)
    assert "global_batch was" in str(outcome[0])
