"""anybatch doctor in environments that are broken for real. Many things are broken at a time, since
each of these runs computes and lets two processes meet."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import anybatch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="breaks Linux"),
]

SECONDS = 300
DOCTOR = f"{sys.executable} -m anybatch doctor --json"


def told(folder: Path, command: str, status: int, **variables: str) -> dict[str, str]:
    """The levels of findings, by name, of a doctor that is run by this line of the shell."""
    source = str(Path(anybatch.__file__).parents[1])
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**clean, "PYTHONPATH": source, **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == status, done.stdout + done.stderr
    content = json.loads(done.stdout)
    return {one["name"]: one["level"] for one in content["findings"]}


@pytest.mark.nightly
def test_where_nothing_is_broken_it_computes_and_two_processes_meet(tmp_path: Path):
    found = told(tmp_path, DOCTOR, 0)
    assert found["steps on cpu"] == found["gloo"] == found["budget on the CPU"] == "ok"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_variables_that_break_training_are_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        found = told(
            tmp_path,
            DOCTOR,
            1,
            OMP_NUM_THREADS="900",
            CUBLAS_WORKSPACE_CONFIG="big",
            GLOO_SOCKET_IFNAME="nowhere9",
            MASTER_PORT=str(listener.getsockname()[1]),
            RANK="0",
            WORLD_SIZE="2",
            XDG_CACHE_HOME=str(tmp_path / "file"),
        )
    assert found["OMP_NUM_THREADS"] == found["CUBLAS_WORKSPACE_CONFIG"] == "warning"
    assert found["cache"] == "warning"
    assert found["gloo"] == found["MASTER_PORT"] == "problem"


def test_a_limit_that_torch_does_not_fit_under_is_the_cause(tmp_path: Path):
    found = told(tmp_path, f"ulimit -v 500000; ulimit -n 200; {DOCTOR}", 1)
    assert found["torch"] == "problem"
    assert found["RLIMIT_AS"] == found["open files"] == "warning"
    assert "steps on cpu" not in found


def can_unshare() -> bool:
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    return subprocess.run([unshare, "-mnu", "true"], capture_output=True).returncode == 0


@pytest.mark.nightly
@pytest.mark.skipif(not can_unshare(), reason="needs to be root")
def test_a_machine_that_reaches_nobody_is_told(tmp_path: Path):
    """No network but a loopback that is down, a name that leads nowhere, little shared memory."""
    breaking = "hostname nowhere9; mount -t tmpfs -o size=64m none /dev/shm"
    found = told(tmp_path, f"unshare -mnu bash -c '{breaking}; {DOCTOR}'", 1)
    assert found["loopback"] == found["gloo"] == "problem"
    assert found["host name"] == found["/dev/shm"] == "warning"
