"""However ranks and their agent end: it is told how, nobody waits for ever, nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from anybatch.errors import LaunchError
from anybatch.launch import call

pytestmark = pytest.mark.faults

SECONDS = 120.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert not list(folder.glob("anybatch-ranks-*"))


def end(folder: str, how: str) -> None:
    """What the ranks do: rank 1 ends, rank 0 waits for ever, having noted how it is asked to go."""
    rank = int(os.environ["RANK"])
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    if rank == 1 and how == "silent":
        os._exit(0)
    if rank == 1 and how == "status":
        os._exit(5)
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "deaf":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if rank == 1:
            wait_until(Path(folder, "0.ready").exists)
            raise ValueError("the cause")
    if how == "family":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        Path(folder, f"{rank}-child.pid").write_text(str(child.pid))
    Path(folder, f"{rank}.ready").touch()
    while True:
        signal.pause()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("silent", "it exited with status 0"),
        ("status", "it exited with status 5"),
        ("killed", "it was killed by SIGKILL"),
    ],
)
def test_a_rank_that_ends_without_a_word_is_named(how: str, words: str, tmp_path: Path):
    with pytest.raises(LaunchError) as raised:
        call(end, str(tmp_path), how, ranks=2)
    pid = (tmp_path / "1.pid").read_text()
    message = str(raised.value)
    assert f"rank 1 of 2 (process {pid}) ended without returning from its function" in message
    assert words in message


def test_a_rank_that_does_not_hear_is_killed_after_the_grace(tmp_path: Path):
    with pytest.raises(ValueError, match="the cause"):
        call(end, str(tmp_path), "deaf", ranks=2, grace_seconds=1)
    check_gone(int((tmp_path / "0.pid").read_text()))


AGENT = """
import sys, tempfile
tempfile.tempdir = sys.argv[2]
from anybatch.launch import call
from tests.faults.launch.test_exits import end
call(end, sys.argv[1], sys.argv[3], ranks=2, grace_seconds=5)
"""

COMMAND = """
import sys, tempfile
tempfile.tempdir = sys.argv[2]
from anybatch.launch import run_command
sys.exit(run_command([sys.argv[1]], 2, module="tests.faults.launch.leaving"))
"""


@pytest.fixture
def agent(
    tmp_path: Path, folder_for_temporary_files: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts an agent of two ranks, and waits until they are at work."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str) -> subprocess.Popen[str]:
        words = [str(tmp_path), str(folder_for_temporary_files), *arguments]
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        wait_until(lambda: all((tmp_path / f"{rank}.ready").exists() for rank in (0, 1)))
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_an_agent_that_is_killed_leaves_nothing(
    agent: Callable[..., subprocess.Popen[str]], tmp_path: Path, folder_for_temporary_files: Path
):
    process = agent(AGENT, "family")
    pids = [int(path.read_text()) for path in sorted(tmp_path.glob("*.pid"))]
    assert len(pids) == 4
    process.kill()
    for pid in pids:
        check_gone(pid)
    wait_until(lambda: not list(folder_for_temporary_files.glob("anybatch-ranks-*")))


WAITING = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from anybatch.process import early_stop_signal
from anybatch.launch import run_command
early_stop_signal.end_with_status_75()
try:
    run_command(
        ["devices"], 1, nodes=2, rendezvous=sys.argv[2], secret="of these machines"
    )
except early_stop_signal.StoppedEarly:
    sys.exit(75)
"""


@pytest.mark.slow
def test_a_second_signal_on_the_way_out_leaves_nothing(folder_for_temporary_files: Path):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        place = f"127.0.0.1:{mute.getsockname()[1]}"
        words = [sys.executable, "-c", WAITING, str(folder_for_temporary_files), place]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        assert "waiting at" in process.stderr.readline()
        assert len(list(folder_for_temporary_files.iterdir())) == 2
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
    assert process.returncode in (75, -signal.SIGTERM)
    wait_until(lambda: not list(folder_for_temporary_files.iterdir()))


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_ranks_of_a_call_end_with_their_agent(
    agent: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
):
    process = agent(AGENT, "wait")
    process.send_signal(number)
    _, told = process.communicate(timeout=SECONDS)
    last = told if number is signal.SIGINT else told.splitlines()[-1]
    assert ("KeyboardInterrupt" if number is signal.SIGINT else f"was sent {number.name}") in last
    for rank in (0, 1):
        check_gone(int((tmp_path / f"{rank}.pid").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_ranks_of_a_command_may_save_and_say_so(
    agent: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
):
    process = agent(COMMAND)
    process.send_signal(number)
    _, told = process.communicate(timeout=SECONDS)
    assert process.returncode == 75
    assert told == "anybatch: the run has stopped after step 4.\n"
    saved = {path.name: path.read_text() for path in tmp_path.glob("*.saved")}
    assert saved == {"0.saved": number.name, "1.saved": number.name}


SILENCED = COMMAND.replace("tests.faults.launch.leaving", "tests.faults.launch.silenced")


@pytest.mark.slow
def test_the_agent_tells_the_cause_where_rank_0_was_ended_before_it_could(
    tmp_path: Path, folder_for_temporary_files: Path
):
    done = subprocess.run(
        [sys.executable, "-c", SILENCED, str(tmp_path), str(folder_for_temporary_files)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert "rank 1 of 2" in done.stderr
    assert "failed first: ValueError: the cause" in done.stderr


def check_gone(pid: int) -> None:
    """The process has ended, if only its parent has not asked how."""

    def gone() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(gone)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
