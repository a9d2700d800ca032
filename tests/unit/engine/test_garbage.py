"""What was there before a run is set aside for as long as runs go on, and taken back."""

from __future__ import annotations

import gc
import weakref

import pytest
from tests.equivalence.reference import plan_for
from tests.equivalence.worlds import World, task_of

import anybatch as ab
from anybatch.engine import SetAside


@pytest.fixture(autouse=True)
def nothing_aside():
    assert not gc.get_freeze_count()
    yield
    gc.unfreeze()


def test_runs_overlap_and_the_last_one_takes_back():
    first, second = SetAside(), SetAside()
    assert gc.get_freeze_count()
    first.end()
    first.end()
    assert gc.get_freeze_count()
    second.end()
    assert not gc.get_freeze_count()


def test_what_the_program_has_set_aside_stays():
    gc.freeze()
    SetAside().end()
    assert gc.get_freeze_count()


class Circle:
    def __init__(self):
        self.itself = self


def test_a_run_sets_aside_and_circles_made_in_it_are_collected():
    task = task_of(World(steps=2))
    with ab.Session(task, plan_for(task, 4)) as session:
        assert gc.get_freeze_count()
        seen = weakref.ref(Circle())
        gc.collect()
        assert seen() is None
        list(session.steps())
    assert not gc.get_freeze_count()


def test_a_run_that_fails_takes_back():
    task = task_of(World(steps=2))
    with (
        pytest.raises(ZeroDivisionError),
        ab.Session(task, plan_for(task, 4)),
    ):
        raise ZeroDivisionError
    assert not gc.get_freeze_count()
