"""Ranks in processes of their own: a function called in each, a command run as each."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.multiprocess.probe import probe

from anybatch.errors import InputError, LaunchError
from anybatch.launch import call, find, join, run_command

PROBE = str(Path(__file__).with_name("probe.py"))
SECONDS = 240.0  # by then it hangs

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks need POSIX")


@pytest.fixture(autouse=True)
def nobody_started_this(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """And what this test puts into the folder for temporary files is seen, and gone afterwards."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert not list(folder.glob("anybatch-ranks-*"))


# ------------------------------------------------------------------------------------------ functions

CLOSED = """
import os
import sys
from pathlib import Path

from anybatch.launch import call


def rank(folder):
    print("out")
    print("err", file=sys.stderr)
    Path(folder, os.environ["RANK"]).touch()


if __name__ == "__main__":
    call(rank, sys.argv[1], ranks=2)
"""


@pytest.mark.parametrize(
    "closed",
    [*(pytest.param(one, marks=pytest.mark.nightly) for one in ((1,), (2,))), (1, 2)],
    ids=str,
)
def test_ranks_of_a_process_whose_output_is_closed(tmp_path: Path, closed: tuple[int, ...]):
    script = tmp_path / "script.py"
    script.write_text(CLOSED, encoding="utf-8")
    redirected = " ".join(f"{number}>&-" for number in closed)
    command = f"exec {sys.executable} {script} {tmp_path} {redirected}"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("[01]")) == ["0", "1"]
    read = done.stdout + done.stderr
    assert ("out" in read, "err" in read) == (1 not in closed, 2 not in closed)


def everything(tensor: Any, factor: int = 1) -> dict[str, Any]:
    """What a rank sees, what it computes, and what it is refused."""
    refused = ""
    try:
        call(find, ranks=2)
    except InputError as error:
        refused = str(error)
    joins = []
    for _ in range(2):
        joins.append(probe()["sum"])
    print(f"printed by {os.environ['RANK']}")
    print("wrong 你好", file=sys.stderr)
    return {
        "tensor": tensor * factor,
        "joins": joins,
        "refused": refused,
        "pid": os.getpid(),
        **probe(),
    }


@pytest.mark.slow
def test_a_function_runs_in_each_rank():
    import torch

    weight = torch.ones(3, requires_grad=True)  # this process has threads of autograd
    weight.sum().backward()
    before = dict(os.environ)
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        results = call(everything, torch.arange(3), 2, ranks=3)
    assert dict(os.environ) == before

    assert [result["rank"] for result in results] == [0, 1, 2]
    assert len({result["pid"] for result in results} | {os.getpid()}) == 4
    for result in results:
        assert result["tensor"].tolist() == [0, 2, 4]
        assert result["joins"] == [3, 3]
        assert result["sum"] == 3
        assert result["launcher"] == "anybatch"
        assert result["interface"] == "lo"
        assert (
            "rank {rank} of 3 already (started by anybatch)".format(**result) in result["refused"]
        )
    assert output.getvalue() == "printed by 0\n"
    assert errors.getvalue() == "wrong 你好\n"


def test_a_function_may_be_called_from_a_thread():
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(call(os.getpid, ranks=2)))
    thread.start()
    thread.join()
    assert len(set(results)) == 2


class Own(Exception):
    """An exception that travels."""


class Awkward(Exception):
    """An exception that cannot be put together again from its arguments."""

    def __init__(self, place: str, number: int) -> None:
        super().__init__(f"{place}: {number}")


def raise_on(rank: int, kind: str) -> str:
    if os.environ["RANK"] != str(rank):
        signal.pause()
    if kind == "own":
        raise Own("broken", 7)
    if kind == "awkward":
        raise Awkward("there", 7)
    if kind == "exit":
        sys.exit("enough")
    return (x for x in "ab")  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kind", "expected", "words"),
    [
        ("own", Own, ("on rank 1 of 2 (process ", "broken")),
        ("awkward", LaunchError, ("rank 1 of 2", "raised Awkward: there: 7", "in raise_on")),
        ("exit", LaunchError, ("rank 1 of 2", "raised SystemExit: enough")),
        ("generator", TypeError, ("return value, a generator, cannot be pickled", "on rank 1")),
    ],
)
def test_what_a_rank_raises_is_raised_here(
    kind: str, expected: type[Exception], words: tuple[str, ...]
):
    with pytest.raises(expected) as raised:
        call(raise_on, 1, kind, ranks=2, grace_seconds=10)
    told = "\n".join([str(raised.value), *raised.value.__notes__])
    for word in words:
        assert word in told
    assert "Traceback (most recent call last)" in str(raised.value.__cause__)
    assert "worker.py" in str(raised.value.__cause__)


def fail_in_a_group() -> None:
    import torch
    from torch import distributed

    membership = find()
    assert membership is not None
    with join(membership, "cpu", timeout_seconds=60):
        if membership.rank == 1:
            print("printed by 1")
            print("wrong 你好", file=sys.stderr)
            raise Own("the cause")
        distributed.all_reduce(torch.ones(1))


@pytest.mark.nightly
def test_of_several_failures_the_first_is_raised():
    with pytest.raises(Own, match="the cause") as raised:
        call(fail_in_a_group, ranks=2)
    assert any(note.startswith("later, rank 0") for note in raised.value.__notes__)
    folder = Path(raised.value.__notes__[-1].removeprefix("what ranks wrote: "))
    assert (folder / "rank-1.log").read_text("utf-8") == "printed by 1\nwrong 你好\n"


SCRIPT = """
import sys
from anybatch.launch import call

class Mine(Exception):
    def __init__(self, rank): super().__init__(rank); self.rank = rank

class Box:
    def __init__(self, value): self.value = value
    def twice(self): return Box(2 * self.value)

import os
offset = 10
boxes = call(lambda box: Box(box.twice().value + offset + int(os.environ["RANK"])), Box(1), ranks=2)
assert all(type(box) is Box for box in boxes)
print([box.value for box in boxes])

def fail():
    raise Mine(int(os.environ["RANK"]))

try:
    call(fail, ranks=1)
except Mine as error:
    print("caught", error.rank)
"""


@pytest.mark.slow
def test_functions_and_classes_of_a_script_travel():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[12, 13]\ncaught 0\n"


def test_what_cannot_be_handed_over_is_named():
    with pytest.raises(InputError, match="cannot be handed to the ranks"):
        call(lambda lock: lock, threading.Lock(), ranks=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, ("ranks is 0",)),
        ({"ranks": 1, "nodes": 2}, ("nodes is 2", "no rendezvous")),
        ({"ranks": 1, "nodes": 2, "rendezvous": "here"}, ("rendezvous is 'here'",)),
        ({"ranks": 1, "timeout_seconds": 0}, ("timeout_seconds is 0",)),
    ],
)
def test_orders_that_cannot_be_are_named(options: dict[str, Any], words: tuple[str, ...]):
    with pytest.raises(InputError) as raised:
        call(os.getpid, **options)
    for word in words:
        assert word in str(raised.value)


# ------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("what", "status", "words", "unwanted"),
    [
        ("3", 3, ("rank 1 of 2", "failed first: it exited with status 3", "last words"), ()),
        pytest.param("75", 75, ("rank 1 of 2", "status 75"), (), marks=pytest.mark.nightly),
        ("killed", 137, ("rank 1 of 2", "killed by SIGKILL", "last words"), ()),
        ("all 2", 2, ("said by rank 0",), ("said by rank 1", "failed first")),
    ],
)
def test_the_status_of_the_rank_that_failed_first(
    what: str,
    status: int,
    words: tuple[str, ...],
    unwanted: tuple[str, ...],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
):
    ended = run_command(
        [what, str(tmp_path)], 2, grace_seconds=10, module="tests.multiprocess.failing"
    )
    captured = capfd.readouterr()
    assert ended == status, captured.err
    for word in words:
        assert word in captured.err
    for word in unwanted:
        assert word not in captured.err


@pytest.mark.nightly
def test_all_ranks_are_started_again_after_one_failed(capfd: pytest.CaptureFixture[str]):
    options: dict[str, Any] = {"module": "tests.multiprocess.failing", "grace_seconds": 10}
    assert run_command(["at first"], 2, restarts=1, **options) == 0
    (told,) = capfd.readouterr().err.splitlines()
    assert told.startswith("anybatch: rank 1 of 2 (process ")
    assert told.endswith("it exited with status 9. All ranks are started again (restart 1 of 1).")


def test_torch_is_not_loaded_to_find_out_who_started_a_process():
    code = "import sys; from anybatch.launch import find; find(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_rank_0_keeps_the_terminal_and_a_success_leaves_no_logs(tmp_path: Path):
    ours, theirs = pty.openpty()
    code = (
        "import sys, anybatch.launch, tempfile; tempfile.tempdir = sys.argv[1];"
        "sys.exit(anybatch.launch.run_command(['terminal'], 2, module='tests.multiprocess.failing'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "FORCE_COLOR": "", "TERM": "xterm"},
        timeout=SECONDS,
        check=False,
    )
    os.close(theirs)
    seen = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0, done.stderr
    assert seen == "a terminal: True\r\n"
    assert not list(tmp_path.glob("anybatch-*"))


# ------------------------------------------------------------------------------- somebody else's ranks


def run_probe(command: list[str], folder: Path, **environment: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [*command, PROBE, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


@pytest.mark.slow
def test_ranks_that_torchrun_started(tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    seen = run_probe(command, tmp_path)
    assert [rank["sum"] for rank in seen] == [1, 1]
    assert {rank["launcher"] for rank in seen} == {"torchrun"}


@pytest.mark.nightly
def test_ranks_that_mpirun_started(tmp_path: Path):
    import shutil

    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    command = ["mpirun", "--oversubscribe", "-n", "2", sys.executable]
    may = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    seen = run_probe(command, tmp_path, **may)
    assert [rank["sum"] for rank in seen] == [1, 1]
    assert [rank["local_rank"] for rank in seen] == [0, 1]
    assert {rank["launcher"] for rank in seen} == {"mpi"}
