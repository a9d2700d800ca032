"""Ctrl-C while a step was committed left half of it.

Symptom: after a KeyboardInterrupt during the update the parameters were those after the step, buffers
and the position those before it: a loop that was begun again, in a notebook say, made the same update
twice.

Mechanism: Python raises KeyboardInterrupt between any two instructions of the main thread, and only
there. What had been staged was dropped and buffers were put back whatever had been done by then.
"""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import torch
from tests.equivalence.reference import plan_for
from torch import nn
from torch.nn.functional import cross_entropy

import anybatch as ab
from anybatch.errors import Stopped
from anybatch.events import StepDone
from anybatch.runs.saving import Every, kept

NUMBERS = signal.SIGINT, signal.SIGTERM


@pytest.fixture(autouse=True)
def as_in_a_fresh_process():
    own = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler or signal.SIG_DFL)


class Strikes:
    """Sends this process a signal at the n-th passing of a place, counted while it is armed: planning
    passes places, too."""

    def __init__(self, place="", at=0, number=signal.SIGINT, armed=True):
        self.place, self.at, self.number, self.armed = place, at, number, armed
        self.passed = 0

    def __call__(self, place):
        if place == self.place and self.armed:
            self.passed += 1
            if self.passed == self.at:
                os.kill(os.getpid(), self.number)


class SGD(torch.optim.SGD):
    """Passes a place before its update, and one after it."""

    def __init__(self, parameters, strikes):
        super().__init__(parameters, lr=0.5, momentum=0.9)
        self.strikes = strikes

    def step(self, closure=None):
        self.strikes("before")
        result = super().step(closure)
        self.strikes("after")
        return result


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def loss(strikes, model, batch):
    strikes("loss")
    return cross_entropy(model(batch[0]), batch[1])


X = torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (64,), generator=torch.Generator().manual_seed(1))


def task_of(strikes):
    def schedule(progress):
        strikes("schedule")
        return 1 / (1 + progress.step)

    return ab.Task(
        model=model_of,
        loss=partial(loss, strikes),
        optimizer=partial(SGD, strikes=strikes),
        train=torch.utils.data.TensorDataset(X, Y),
        global_batch=16,
        steps=6,
        ghost_batch=4,
        schedule=schedule,
    )


def trained(strikes):
    """State of the model after all steps, the steps that were told, and after how many there was an
    interrupt. The loop is begun again then."""
    task = task_of(strikes)
    events, interrupted = [], []
    with ab.Session(task, plan_for(task, 16), [events.append]) as session:
        while session.num_steps < 6:
            try:
                for _ in session.steps():
                    pass
            except KeyboardInterrupt:
                interrupted.append(session.num_steps)
        state = {name: value.clone() for name, value in session.model.state_dict().items()}
    return state, [e.step for e in events if isinstance(e, StepDone)], interrupted


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


PLACES = {"loss": 2, "schedule": 3, "before": 3, "after": 3}  # and the steps that are done by then


@pytest.mark.parametrize("place", PLACES)
def test_a_session_goes_on_from_where_it_says_that_it_is(place):
    wanted, steps, none = trained(Strikes())
    assert not none
    strikes = Strikes(place, at=3)  # in the third step
    found, told, interrupted = trained(strikes)
    assert strikes.passed > 3
    assert interrupted == [PLACES[place]]
    assert told == steps == [1, 2, 3, 4, 5, 6]
    assert same(found, wanted)


def stepped(strikes):
    """State of the model after three calls of a `Step`, one more if there was an interrupt that left
    no trace; and whether that was so. Strikes are armed after the first call, in which it plans."""
    model = model_of()
    optimizer = SGD(model.parameters(), strikes)
    undone = None
    with ab.Step(model, optimizer, partial(loss, strikes), ghost_batch=4) as step:
        done = 0
        while done < 3:
            before = {name: value.clone() for name, value in model.state_dict().items()}
            part = slice(16 * done, 16 * done + 16)
            try:
                step((X[part], Y[part]))
                done += 1
            except KeyboardInterrupt:
                undone = same(before, model.state_dict())
                done += not undone
            strikes.armed = True
    return {name: value.clone() for name, value in model.state_dict().items()}, undone


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_step_is_done_whole(place):
    wanted, _ = stepped(Strikes())
    found, undone = stepped(Strikes(place, at=1, armed=False))
    assert undone is False
    assert same(found, wanted)


@pytest.mark.parametrize("place", ["loss", "before", "after"])
def test_a_signal_to_stop_is_answered_after_the_step(place, tmp_path):
    task = task_of(Strikes(place, at=3))
    with (
        ab.Session(task, plan_for(task, 16), checkpoints=tmp_path) as session,
        pytest.raises(Stopped, match=f"after step {4 if place != 'loss' else 3};"),
        kept(session, Every()) as steps,
    ):
        list(steps)
    assert [signal.getsignal(n) for n in NUMBERS] == [signal.default_int_handler, signal.SIG_DFL]


@pytest.mark.parametrize("first", NUMBERS)
def test_a_second_signal_during_the_update_waits_for_the_step_alone(first, tmp_path):
    wanted, _, _ = trained(Strikes())
    signals = Strikes("before", 6, first), Strikes("after", 6)

    def strikes(place):
        for one in signals:
            one(place)

    task = task_of(strikes)
    with ab.Session(task, plan_for(task, 16), checkpoints=tmp_path) as session:
        with pytest.raises(KeyboardInterrupt), kept(session, Every()) as steps:
            list(steps)
        assert session.num_steps == 6
        assert same(wanted, session.model.state_dict())
    assert [signal.getsignal(n) for n in NUMBERS] == [signal.default_int_handler, signal.SIG_DFL]
