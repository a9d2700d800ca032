"""What happened within a step was told under another number than the step itself.

Symptom: "Memory ran out in step 0" was said of what the progress bar called step 1, and a mark in the
report or a note in TensorBoard stood one step before the curve that it explained.

Mechanism: the engine told the index that random state is keyed by, which counts the steps before.
"""

import dataclasses
import re
from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.reference import plan_for
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.engine.watchdog import Word
from anybatch.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    OutOfMemory,
    Overflowed,
    Replanned,
    Skipped,
    StepDone,
)
from anybatch.report.sentences import describe

STEP = 3
"""In which everything goes wrong, and after which the model is evaluated and saved."""

BATCH, BAD = 8, 8 * (STEP - 1) + 3


def squares(model, batch):
    """So small that no gradient overflows by itself."""
    x, y = batch
    return ab.Loss(1e-3 * F.mse_loss(model(x)[:, 0].float(), y, reduction="sum"), len(y))


def task_of() -> ab.Task:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * (STEP + 1), 4, generator=draw)
    data = TensorDataset(x, x.sum(1))
    return ab.Task(
        model=partial(nn.Linear, 4, 1),
        loss=squares,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        train=data,
        valid=TensorDataset(*data[:6]),
        global_batch=BATCH,
        steps=STEP + 1,
        shuffle=False,
        evaluate_every=STEP,
        bad_data="skip",
    )


def going_wrong(events: list[Event]) -> ab.Task:
    """In step `STEP` memory runs out, then a sample has a NaN, then the gradient overflows; in the
    evaluation after it memory runs out again. The last of `events` tells what comes next."""
    task = task_of()
    task.train.tensors[0][BAD] = torch.nan

    def loss(model, batch):
        found = squares(model, batch)
        in_step = torch.is_grad_enabled()
        num_done = sum(isinstance(event, StepDone) for event in events)
        if num_done != (STEP - 1 if in_step else STEP):
            return found
        if isinstance(events[-1], StepDone):
            raise torch.OutOfMemoryError("tried to allocate more than there is")
        overflows = in_step and isinstance(events[-1], Skipped)
        return dataclasses.replace(found, sum=found.sum * (1e6 if overflows else 1.0))

    return dataclasses.replace(task, loss=loss)


def kinds(events: Sequence[Event]) -> list[type[Event]]:
    """In order, each once: memory runs out on every rank."""
    return list(dict.fromkeys(map(type, events)))


def on_rank(rank, size, folder):
    """The events of a run in which everything goes wrong on rank 0."""
    events: list[Event] = []
    task = going_wrong(events)
    layout = {"parallel": "replicate", "shares": (1.0,) * size} if size > 1 else {}
    plan = plan_for(task, 4, precision="fp16", **layout)
    with ab.Session(task, plan, [events.append], checkpoints=folder) as session:
        for done in session.steps():
            if done.step == STEP:
                session.save(wait=True)
    return events


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_all_that_happens_in_a_step_has_its_number(crew, ranks, tmp_path):
    events = crew(ranks, on_rank, tmp_path)[0]
    ends = [number for number, event in enumerate(events) if isinstance(event, StepDone)]
    assert [events[end].step for end in ends] == [1, 2, 3, 4]
    within, after = events[ends[1] + 1 : ends[2]], events[ends[2] + 1 : ends[3]]
    assert kinds(within) == [OutOfMemory, Replanned, Skipped, Overflowed]
    assert kinds(after) == [OutOfMemory, Replanned, Evaluated, CheckpointSaved]
    for event in (*within, *after):
        assert event.step == STEP
        assert re.search(rf"\bstep {STEP}\b", describe(event), re.IGNORECASE)
    assert not events[: ends[0]]
    assert not events[ends[3] + 1 :]


def test_what_cannot_be_mended_in_a_step_has_its_number():
    events: list[Event] = []
    task = dataclasses.replace(going_wrong(events), bad_data="stop", loss=squares)
    told = rf"^sample {BAD} \(epoch 0\) makes the loss of step {STEP} nan"
    with (
        ab.Session(task, plan_for(task, 4), [events.append]) as session,
        pytest.raises(ab.LossError, match=told),
    ):
        list(session.steps())
    assert [event.step for event in events if isinstance(event, StepDone)] == [1, 2]


def test_the_watchdog_has_the_numbers_of_the_steps(tmp_path):
    places: list[str] = []

    def loss(model, batch):
        pulse = session._pulse
        places.append(Word(step=pulse.step, phase=pulse.phase).where)
        return squares(model, batch)

    task = dataclasses.replace(task_of(), loss=loss)
    plan = plan_for(task, BATCH)
    with ab.Session(task, plan, checkpoints=tmp_path) as session:
        session.evaluate()
        for done in session.steps():
            if done.step == STEP:
                session.save(wait=True)
                break
    assert places == [
        "before the first step, evaluation",
        *("in step 1, forward", "in step 2, forward", "in step 3, forward"),
        "after step 3, evaluation",
    ]
    places.clear()
    with ab.Session(task, plan, checkpoints=tmp_path) as session:
        assert session.resume()
        session.evaluate()
        list(session.steps())
        session.evaluate()
    assert places == [
        *("after step 3, evaluation", "in step 4, forward", "after step 4, evaluation"),
    ]
