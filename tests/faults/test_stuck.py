"""A rank that makes no progress is named, with its stack, and nobody waits for ever."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.crew import Crew
from tests.equivalence.reference import plan_for
from tests.faults.stuck import STEP, train
from torch import Tensor, nn
from torch.utils.data import Dataset

import anybatch as ab
from anybatch.errors import LaunchError, PeerLost, Stuck
from anybatch.events import Event, Stalled, Straggler
from anybatch.launch import call

pytestmark = pytest.mark.faults

SECONDS = 120.0


@pytest.fixture(autouse=True)
def folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    assert not list(folder.glob("anybatch-ranks-*"))


@pytest.mark.slow
def test_a_rank_that_hangs_in_the_users_code_is_named_with_its_stack():
    with pytest.raises(Stuck) as raised:
        call(train, "forward", 0, ranks=2, grace_seconds=5)
    told = str(raised.value)
    assert f"rank 0 of 2 has made no progress for 3 s in step {STEP}, forward" in told
    assert "time.sleep(3600)" in told
    assert "in loss\n" in told
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("thread MainThread, most recent call last") == 1


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_rank_whose_process_stands_still_is_named_by_the_other(bad_rank: int):
    with pytest.raises(PeerLost) as raised:
        call(train, "stopped", bad_rank, ranks=2, grace_seconds=2)
    told = str(raised.value)
    assert told.startswith(f"rank {bad_rank} was last heard of ")
    assert f"rank {1 - bad_rank} of 2 has waited" in told


@pytest.mark.nightly
def test_a_rank_whose_interpreter_is_held_shows_its_stack():
    """Then not even its watchdog runs."""
    with pytest.raises(LaunchError) as raised:
        call(train, "held", 1, ranks=2, grace_seconds=5)
    told = str(raised.value)
    assert "rank 1 of 2 (process " in told
    assert "exited with status 1" in told
    assert "in hang" in told


COMMAND = """
import sys
from anybatch.launch import run_command
sys.exit(run_command(sys.argv[1:], 2, grace_seconds=5, module="tests.faults.stuck"))
"""


@pytest.mark.nightly
def test_ranks_are_started_again_after_one_was_stuck():
    expected = [(1, STEP), (1, STEP)]
    assert call(train, "forward", 1, STEP, ranks=2, grace_seconds=5, restarts=1) == expected


@pytest.mark.nightly
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_who_gives_a_command_reads_it_too(bad_rank: int, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "loading", str(bad_rank)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    )
    assert done.returncode == 1
    # Rank 0 has read a few samples for the plan.
    where = (
        rf"rank {bad_rank} of 2 has made no progress for 3 s in step [{STEP - 1}{STEP}], loading"
    )
    assert re.search(where, done.stderr)
    assert "threading.Event().wait()" in done.stderr
    assert done.stderr.count("thread MainThread, most recent call last") == 1


class Slow(Dataset[Tensor]):
    """One sample is only there once somebody has said that nothing moves."""

    def __init__(self, said: threading.Event | None) -> None:
        self._said = said

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if index == 5 and self._said is not None:
            self._said.clear()
            assert self._said.wait(SECONDS)
        return torch.full((4,), float(index))


class Listens:
    """Standard error that hears of a standstill."""

    def __init__(self) -> None:
        self.said = threading.Event()
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text
        if "no progress" in text and "in __getitem__" in text:
            self.said.set()

    def flush(self) -> None:
        """Nothing is held back."""


def task_of(train: Dataset[Tensor]) -> ab.Task:
    return ab.Task(
        model=lambda: nn.Linear(4, 1),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-4),
        train=train,
        global_batch=4,
        epochs=1,
        shuffle=False,  # so that it is in the second step
    )


def test_the_users_own_process_is_told_and_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("anybatch.engine.watchdog.LEAST_SECONDS", 0.5)
    monkeypatch.setattr("anybatch.engine.watchdog.TIMES_LONGEST", 1.0)
    heard = Listens()
    monkeypatch.setattr("sys.stderr", heard)
    task = task_of(Slow(heard.said))
    plan = ab.plan(task)
    events: list[Event] = []
    with ab.Session(task, plan, [events.append]) as session:
        assert len(list(session.steps())) == 2
    # A machine that stands still itself may be told of before.
    told = [(event.step, event.phase) for event in events if isinstance(event, Stalled)]
    assert (2, "loading") in told
    assert "in __getitem__" in heard.text


class AlwaysOne:
    """Stands for `Stragglers`."""

    def __init__(self, size: int) -> None:
        assert size == 2

    def observe(self, seconds: tuple[float, ...]) -> list[tuple[int, float, float]]:
        assert len(seconds) == 2
        return [(1, 2.0, 1.0)]


def with_a_straggler(rank: int, size: int) -> list[tuple[int, int, float, float]]:
    task = task_of(Slow(None))
    plan = plan_for(task, 2, parallel="replicate", shares=(1.0,) * size)
    events: list[Event] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anybatch.rank.pace.Stragglers", AlwaysOne)
        with ab.Session(task, plan, [events.append]) as session:
            list(session.steps())
    told = [event for event in events if isinstance(event, Straggler)]
    return [(event.step, event.rank, event.seconds, event.others) for event in told]


def test_a_straggler_is_told_by_an_event(crew: Crew):
    assert crew(2, with_a_straggler) == [[(1, 1, 2.0, 1.0), (2, 1, 2.0, 1.0)], []]
