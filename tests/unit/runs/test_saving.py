"""When a run saves, and how it is asked to stop."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal

import pytest
import torch
from tests.equivalence.reference import plan_for
from tests.equivalence.worlds import World, task_of
from tests.faults import bad_data

import anybatch as ab
from anybatch.errors import InputError, LossError, Stopped
from anybatch.events import CheckpointSaved
from anybatch.launch.membership import Membership
from anybatch.process import early_stop_signal
from anybatch.runs.saving import Every, kept
from anybatch.state import storage


@pytest.fixture(autouse=True)
def python_s_own_handlers():
    """As in a fresh process, though a shell that starts the tests in the background has them ignore
    SIGINT."""
    own = dict.fromkeys((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP), signal.SIG_DFL)
    own[signal.SIGINT] = signal.default_int_handler
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler or signal.SIG_DFL)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (500, Every(steps=500)),
        ("500", Every(steps=500)),
        ("10min", Every(seconds=600.0)),
        ("1.5 h", Every(seconds=5400.0)),
        ("30s", Every(seconds=30.0)),
        (None, Every()),
        ("never", Every()),
    ],
)
def test_how_often_is_written(written, meant):
    assert Every.parse(written) == meant


@pytest.mark.parametrize("written", [0, -1, True, 2.5, "0", "often", "0s", "5 weeks", ""])
def test_how_often_cannot_be_anything(written):
    with pytest.raises(InputError, match="checkpoint_every is"):
        Every.parse(written)


def session(tmp_path, saved, **changes):
    task = task_of(World(**{"steps": 7, "num_samples": 64, **changes}))
    return ab.Session(task, plan_for(task, 4), [note(saved)], checkpoints=tmp_path / "checkpoints")


def note(saved):
    """A sink that notes the steps of checkpoints."""

    def sink(event):
        if isinstance(event, CheckpointSaved):
            saved.append(event.step)

    return sink


def test_every_so_many_steps_and_at_the_end(tmp_path):
    saved = []
    with session(tmp_path, saved) as running, kept(running, Every(steps=3)) as steps:
        assert [event.step for event in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert saved == [3, 6, 7]


def test_a_step_that_was_left_out_whole_is_made_up_for(tmp_path):
    data = bad_data.Faulty(40, dict.fromkeys(range(24, 36), bad_data.RAISES))
    task = bad_data.task_of(
        data, shuffle=False
    )  # 4 steps in each of 2 epochs; the third is left out
    saved = []
    with (
        ab.Session(task, plan_for(task, 12), [note(saved)], checkpoints=tmp_path) as running,
        kept(running, Every(steps=3)) as steps,
    ):
        assert [event.step for event in steps] == [1, 2, 4, 5, 6, 8]
    assert saved == [4, 6, 8]


def test_after_a_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("anybatch.runs.saving.time.monotonic", lambda: now[0])
    saved = []
    with session(tmp_path, saved) as running, kept(running, Every(seconds=10)) as steps:
        for _ in steps:
            now[0] += 4.0
    # After the fourth step 12 s have passed: it is wished, and known to all with the next one.
    assert saved == [5, 7]


def test_never_is_at_the_end_alone(tmp_path):
    saved = []
    with session(tmp_path, saved) as running, kept(running, Every()) as steps:
        list(steps)
    assert saved == [7]


def drive(running, send, at=3):
    """Train, and be sent the signals `send` after step `at`; the steps that were done."""
    done = []
    with kept(running, Every()) as steps:
        for event in steps:
            done.append(event.step)
            if event.step == at:
                for number in send:
                    signal.raise_signal(number)  # in this thread, handled when it returns
    return done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_after_the_step(tmp_path, number):
    saved = []
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    with (
        session(tmp_path, saved) as running,
        pytest.raises(Stopped, match="after step 4; everything is saved") as stopped,
    ):
        drive(running, [number])
    assert stopped.value.exit_status == 75
    assert saved == [4]
    assert {n: signal.getsignal(n) for n in handlers} == handlers
    with session(tmp_path, saved) as running:
        assert running.resume()
        assert [event.step for event in running.steps()] == [5, 6, 7]


def test_a_stop_does_not_promise_what_could_not_be_saved(tmp_path, monkeypatch):
    """As on a file system that has become read-only."""

    def refused(self):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(storage.Writer, "complete", refused)
    saved = []
    with (
        session(tmp_path, saved) as running,
        pytest.raises(
            Stopped, match="step 4, which could not be saved: resume it to go on, from the"
        ),
    ):
        drive(running, [signal.SIGTERM])
    assert saved == []
    monkeypatch.undo()
    with session(tmp_path, saved) as running:
        assert not running.resume()


def test_a_run_with_a_folder_says_how_to_go_on(tmp_path):
    def drive(running):
        with kept(running, Every(), tmp_path) as steps:
            for event in steps:
                if event.step == 2:
                    signal.raise_signal(signal.SIGTERM)

    with (
        session(tmp_path, []) as running,
        pytest.raises(Stopped, match=f"saved: out='{tmp_path}' and resume=True goes on"),
    ):
        drive(running)


def test_a_second_signal_ends_at_once(tmp_path):
    saved = []
    with session(tmp_path, saved) as running, pytest.raises(KeyboardInterrupt):
        drive(running, [signal.SIGINT, signal.SIGINT])
    assert not saved


def test_a_second_signal_ends_a_command_at_once_too(tmp_path):
    early_stop_signal.end_with_status_75()
    with session(tmp_path, []) as running, pytest.raises(Stopped, match="after step 4"):
        drive(running, [signal.SIGTERM])
    # Not the handler that says that no step was done: neither now nor for a second signal.
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_command_that_has_not_begun_says_start_me_again(number):
    early_stop_signal.end_with_status_75()
    with pytest.raises(early_stop_signal.StoppedEarly):
        signal.raise_signal(number)
    assert signal.getsignal(number) is signal.SIG_DFL


def test_what_the_program_answers_itself_is_left_to_it():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    early_stop_signal.end_with_status_75()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert not early_stop_signal.is_unanswered(signal.SIGUSR1)
    assert early_stop_signal.is_unanswered(signal.SIGHUP)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_that_comes_after_the_stop_that_another_rank_was_asked_for(
    tmp_path, number, monkeypatch
):
    monkeypatch.setattr("anybatch.runs.saving.find", lambda: Membership(1, 2, 1, 2, "anybatch"))

    def drive(running):
        with kept(running, Every()) as steps:
            for event in steps:
                if event.step == 3:
                    running.wish |= ab.Wish.STOP  # the vote tells all ranks

    with session(tmp_path, []) as running, pytest.raises(Stopped, match="after step 4"):
        drive(running)
    signal.raise_signal(number)  # it lives on
    assert signal.getsignal(number) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_an_error_leaves_is_saved(tmp_path):
    saved = []
    task = task_of(World(steps=7, num_samples=64))
    calls = []

    def loss(model, batch):
        calls.append(1)
        found = task.loss(model, batch)
        return found * float("nan") if len(calls) > 12 else found

    broken = dataclasses.replace(task, loss=loss)
    sinks = [note(saved)]
    with ab.Session(broken, plan_for(broken, 4), sinks, checkpoints=tmp_path) as running:
        with pytest.raises(LossError), kept(running, Every()) as steps:
            list(steps)
        weights = {name: value.clone() for name, value in running.model.state_dict().items()}
    assert saved == [3]
    with ab.Session(task, plan_for(task, 4), checkpoints=tmp_path) as running:
        assert running.resume()
        for name, value in running.model.state_dict().items():
            assert torch.equal(value, weights[name])


def test_a_full_disk_does_not_end_training(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder belongs")
    saved = []
    with session(tmp_path, saved) as running, kept(running, Every(steps=3)) as steps:
        assert len(list(steps)) == 7
    assert not saved
