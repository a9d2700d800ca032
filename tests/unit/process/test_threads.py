"""Threads that are begun, or are not: nobody waits for one that never comes to run."""

from __future__ import annotations

import _thread
import threading

import pytest

from anybatch.process import threads
from anybatch.process.threads import Stopwatch, begin


def test_work_is_done_in_another_thread():
    seen = []
    ended = begin(lambda: seen.append(threading.get_ident()))
    assert ended is not None
    assert ended.wait(10)
    assert seen != [threading.get_ident()]


def test_the_end_is_told_even_if_the_work_fails(capfd):
    def fail():
        raise SystemExit

    ended = begin(fail)
    assert ended is not None
    assert ended.wait(10)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_no_thread_is_told(monkeypatch, error):
    def refuse(function, args):
        raise error

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    assert begin(pytest.fail) is None


@pytest.mark.parametrize("late", [False, True])
def test_a_thread_that_dies_or_comes_late_does_nothing(monkeypatch, late):
    held = []
    monkeypatch.setattr(threads, "_SECONDS", 0.05)
    monkeypatch.setattr(_thread, "start_new_thread", lambda run, args: held.append(run))
    seen = []
    assert begin(lambda: seen.append(1)) is None
    if late:
        held[0]()
    assert not seen


@pytest.mark.parametrize(
    ("computed", "waited"), [(10.0, 0.0), (10.1, 0.0), (4.0, 6.0), (0.0, 10.0)]
)
def test_a_thread_that_waits_for_a_core_shows(computed: float, waited: float):
    seconds, work = iter([100.0, 110.0]), iter([5.0, 5.0 + computed])
    watch = Stopwatch(lambda: next(seconds), lambda: next(work))
    assert watch.idle_seconds() == pytest.approx(waited)


def test_a_block_that_takes_long_is_told_once():
    told, heard = [], threading.Event()

    def tell() -> None:
        told.append(threading.current_thread())
        heard.set()

    reminder = threads.Reminder(0.01, tell)
    with reminder.around():
        assert heard.wait(60)
    with reminder.around():
        pass
    reminder.close()
    assert len(told) == 1
    assert told[0] is not threading.current_thread()
