"""Steps that wait for their samples: seen, told once, with what would help."""

from __future__ import annotations

import time

import pytest
import torch
from tests.equivalence.reference import plan_for
from torch.utils.data import Dataset

import anybatch as ab
from anybatch.events import Starved
from anybatch.rank import data_wait
from anybatch.rank.data_wait import DataWait


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(data_wait, "num_cores", lambda: 8)


def told(steps, num_workers=0, can_help=True):
    """What is told of steps that take (seconds, of which they wait)."""
    found = []
    observer = DataWait(num_workers, can_help, found.append)
    for number, (seconds, waited) in enumerate(steps, 1):
        observer.observe(number, seconds, waited)
    return found


def test_it_is_told_once_after_some_steps():
    (event,) = told([(9.0, 8.9), *[(1.0, 0.75)] * 20])
    assert event.step == 6
    assert (event.step_seconds, event.data_seconds) == pytest.approx((1.0, 0.75))


@pytest.mark.parametrize(
    ("waited", "num_workers", "wanted"),
    [
        (0.75, 0, 3),  # three seconds of loading for each of computing
        (0.99, 0, 8),
        (0.5, 0, 1),
        (0.5, 2, 4),
        (0.9, 8, None),
    ],
)
def test_workers_that_would_keep_up_as_far_as_there_are_cores(waited, num_workers, wanted):
    (event,) = told([(1.0, waited)] * 9, num_workers)
    assert event.wanted_workers == wanted


def test_workers_do_not_help_a_stream():
    (event,) = told([(1.0, 0.75)] * 9, can_help=False)
    assert event.wanted_workers is None


@pytest.mark.parametrize("step", [(1.0, 0.1), (0.01, 0.009)], ids=["little of it", "little in all"])
def test_what_hardly_matters_is_not_told(step):
    assert not told([step] * 20)


class Sleepy(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.full((2,), float(index))


def test_a_step_tells_how_long_it_waited():
    task = ab.Task(
        model=lambda: torch.nn.Linear(2, 1),
        loss=lambda model, batch: ab.Loss(model(batch).sum(), len(batch)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=Sleepy(),
        global_batch=4,
        epochs=1,
    )
    events = []
    with ab.Session(task, plan_for(task, 2), [events.append]) as session:
        steps = list(session.steps())
        ended = session.ended(1.0, finished=True)
    for step in steps:
        assert 4 * 0.005 <= step.data_seconds <= step.seconds
    assert 4 * 0.005 <= ended.data_seconds <= ended.step_seconds
    assert ended.samples_per_second <= 1 / 0.005
    # Waiting is not counted twice. The times are medians of two steps.
    assert ended.idle_seconds + ended.data_seconds <= 1.001 * ended.step_seconds
    assert not any(isinstance(event, Starved) for event in events)


def test_a_step_tells_how_long_it_did_not_compute():
    def loss(model, batch):
        time.sleep(0.01)
        return ab.Loss(model(batch).sum(), len(batch))

    task = ab.Task(
        model=lambda: torch.nn.Linear(2, 1),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=torch.zeros(8, 2),
        global_batch=4,
        epochs=1,
    )
    with ab.Session(task, plan_for(task, 2), []) as session:
        list(session.steps())
        ended = session.ended(1.0, finished=True)
    assert 2 * 0.01 <= ended.idle_seconds + ended.data_seconds <= ended.step_seconds
