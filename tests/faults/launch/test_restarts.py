"""Ranks that are killed are started again; ranks that say what is wrong are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from tests.faults.launch import ranks
from tests.faults.launch.ranks import seen
from tests.faults.launch.test_exits import check_gone, wait_until

from anybatch.errors import LaunchError
from anybatch.launch import call, run_command

pytestmark = pytest.mark.faults

KILLED = "it was killed by SIGKILL"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No process of ours, and no folder."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    before = set(psutil.Process().children())
    yield folder
    assert not list(folder.glob("anybatch-ranks-*"))
    for rank in seen(tmp_path).values():
        check_gone(rank["pid"])
    assert set(psutil.Process().children()) <= before


def add_up(
    folder: Path, ends: Mapping[int, Mapping[int, str]], num_ranks: int, restarts: int
) -> list[tuple[int, int]]:
    return call(
        ranks.add_up, str(folder), ends, ranks=num_ranks, restarts=restarts, grace_seconds=10
    )


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_all_start_again_when_one_is_killed(
    victim: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    assert add_up(tmp_path, {0: {victim: "killed"}}, 2, restarts=2) == [(1, 2)] * 2
    (told,) = [line for line in capfd.readouterr().err.splitlines() if "anybatch: " in line]
    pid = seen(tmp_path)[0, victim]["pid"]
    assert told.startswith(f"anybatch: rank {victim} of 2 (process {pid}) failed first: {KILLED}")
    assert told.endswith("All ranks are started again (restart 1 of 2).")


@pytest.mark.nightly
def test_all_start_again_when_two_are_killed_and_one_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    ends = {0: {0: "killed", 1: "killed"}, 1: {1: "killed at once"}}
    assert add_up(tmp_path, ends, 2, restarts=2) == [(2, 2)] * 2
    told = capfd.readouterr().err
    assert "(restart 1 of 2)" in told
    pid = seen(tmp_path)[1, 1]["pid"]
    assert f"rank 1 of 2 (process {pid}) failed first: {KILLED}" in told.splitlines()[-1]
    assert "(restart 2 of 2)" in told.splitlines()[-1]


@pytest.mark.slow
def test_a_rank_is_killed_before_it_has_said_a_word(tmp_path: Path):
    assert add_up(tmp_path, {0: {0: "killed at once"}}, 1, restarts=1) == [(1, 1)]


@pytest.mark.slow
def test_the_last_cause_is_raised_when_no_restart_is_left(tmp_path: Path):
    ends = {attempt: {0: "killed at once"} for attempt in range(9)}
    with pytest.raises(LaunchError) as raised:
        add_up(tmp_path, ends, 1, restarts=1)
    assert sorted(seen(tmp_path)) == [(0, 0), (1, 0)]
    pid = seen(tmp_path)[1, 0]["pid"]
    assert f"rank 0 of 1 (process {pid}) ended" in str(raised.value)
    assert KILLED in str(raised.value)


@pytest.mark.slow
def test_an_exception_of_the_users_code_would_only_be_raised_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    with pytest.raises(ArithmeticError, match="of the user's own") as raised:
        add_up(tmp_path, {0: {1: "raised"}}, 2, restarts=3)
    assert {attempt for attempt, _ in seen(tmp_path)} == {0}
    # its peer says that it has lost one, which a restart would mend; but that was not the cause
    assert any("later, rank 0" in note for note in raised.value.__notes__)
    assert "started again" not in capfd.readouterr().err


@pytest.mark.parametrize("status", [2, 3, 75])
def test_a_status_that_says_what_is_wrong_ends_the_run(
    status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    words = [str(tmp_path), str(status)]
    assert run_command(words, 2, module=ranks.__name__, restarts=3, grace_seconds=10) == status
    assert {attempt for attempt, _ in seen(tmp_path)} == {0}
    assert "started again" not in capfd.readouterr().err


AGENT = """
import sys, tempfile
tempfile.tempdir = sys.argv[2]
from anybatch.launch import call
from tests.faults.launch.test_restarts import family
call(family, sys.argv[1], ranks=2, restarts=1)
"""


def family(folder: str) -> None:
    """The first time, a rank dies and leaves a child behind; the second time, all wait for ever."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    me = ranks.find()
    assert me is not None
    Path(folder, f"{me.attempt}-{me.rank}.child").write_text(json.dumps(child.pid))
    ranks.note(folder)
    if me.attempt == 0 and me.rank == 1:
        wait_until((Path(folder) / "0-0.seen").exists)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


@pytest.mark.slow
def test_an_agent_that_is_killed_in_the_second_attempt_leaves_nothing(
    tmp_path: Path, nothing_is_left: Path
):
    words = [sys.executable, "-c", AGENT, str(tmp_path), str(nothing_is_left)]
    agent = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: {(1, 0), (1, 1)} <= seen(tmp_path).keys())
        children = {p.stem: int(p.read_text()) for p in sorted(tmp_path.glob("*.child"))}
        assert len(children) == 4
        for rank in (0, 1):  # what the first attempt has started is gone before the second begins
            check_gone(children[f"0-{rank}"])
    finally:
        agent.kill()
        agent.wait()
    for pid in children.values():
        check_gone(pid)
    wait_until(lambda: not list(nothing_is_left.glob("anybatch-ranks-*")))
