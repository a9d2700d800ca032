"""On one machine nothing listens beyond the loopback, however the ranks are started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tests.multiprocess import listeners
from tests.ports import free_port

SECONDS = 240.0
MODULE = "tests.multiprocess.listeners"
FILE = listeners.__file__
REPOSITORY = Path(__file__).parents[2]

CALL = f"""
import sys
from anybatch.launch import call
from {MODULE} import survey
call(survey, sys.argv[1], ranks=2, rendezvous=sys.argv[2] if sys.argv[2:] else None)
"""

COMMAND = f"""
import sys
from anybatch.launch import run_command
sys.exit(run_command(sys.argv[1:], 2, module="{MODULE}"))
"""

TASK = f"""
import torch
from torch import distributed, nn
import anybatch as ab
from {MODULE} import write

def task(folder):
    def loss(model, batch):
        x, y = batch
        if distributed.is_initialized():
            write(folder, distributed.get_rank())
        return ((model(x) - y) ** 2).sum(), len(y)

    return ab.Task(
        model=lambda: nn.Linear(3, 1), loss=loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        train=[(torch.ones(3), torch.ones(1))] * 8, global_batch=4, epochs=1,
    )
"""

SCRIPT = f"""{TASK}
if __name__ == "__main__":
    import sys
    ab.train(task(sys.argv[1]), ranks=2, progress=False)
"""


def run(command: list[str], folder: Path, **environment: str) -> None:
    """Run to the end, as the process from which ranks look down."""
    done = start(command, folder, environment)
    output, errors = done.communicate(timeout=SECONDS)
    assert done.returncode == 0, output + errors


def start(
    command: list[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    # `exec`: the shell's number is known before the command begins, and stays its own.
    clean = {k: v for k, v in os.environ.items() if not k.endswith("SOCKET_IFNAME")}
    return subprocess.Popen(
        ["/bin/sh", "-c", f'export {listeners.ROOT}=$$; exec "$@"', "sh", *command],
        cwd=folder,
        env={
            **clean,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),  # `tests` is imported in each process
            **(environment or {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check(folder: Path) -> None:
    """What both ranks saw: their own sockets and a store, at the loopback alone."""
    paths = sorted(folder.glob("[01].json"))
    assert len(paths) == 2
    for path in paths:
        found = json.loads(path.read_text())
        assert set(found) == {"127.0.0.1"}, found
        assert len(found) >= 3, found


@pytest.mark.nightly
@pytest.mark.parametrize(
    "rendezvous",
    [[], pytest.param([f"{os.uname().nodename}:29400"], marks=pytest.mark.slow)],
    ids=["", "named"],
)
def test_ranks_of_a_call(rendezvous: list[str], tmp_path: Path):
    run([sys.executable, "-c", CALL, str(tmp_path), *rendezvous], tmp_path)
    check(tmp_path)


@pytest.mark.nightly
def test_ranks_of_a_command(tmp_path: Path):
    run([sys.executable, "-c", COMMAND, str(tmp_path)], tmp_path)
    check(tmp_path)


TRAIN = ["-m", "anybatch", "train"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        lambda folder: [*TRAIN, "own.py", "--ranks", "2", "-s", f"folder={folder}"],
        lambda folder: ["own.py", str(folder)],
    ],
    ids=["anybatch train", "ab.train"],
)
def test_ranks_that_train(words: Callable[[Path], list[str]], tmp_path: Path):
    (tmp_path / "own.py").write_text(SCRIPT)
    run([sys.executable, *words(tmp_path)], tmp_path)
    check(tmp_path)


@pytest.mark.nightly
def test_ranks_of_a_cell_of_a_notebook(tmp_path: Path):
    """The sockets of Jupyter's kernel, which the ranks look down from, are among those found."""
    begin = f"""
import os, sys
os.environ["{listeners.ROOT}"] = str(os.getpid())
sys.path.insert(0, {str(REPOSITORY)!r})
{TASK}"""
    train = f"ab.train(task({str(tmp_path)!r}), ranks=2, progress=False)"
    cells = [nbformat.v4.new_code_cell(source) for source in (begin, train)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=int(SECONDS), resources=where).execute()
    check(tmp_path)


def by_hand(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def by_name(rank: int) -> dict[str, str]:
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    return {**by_hand(rank), **local, "MASTER_ADDR": os.uname().nodename}


def by_slurm(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": os.uname().nodename,
    }


def by_mpi(rank: int) -> dict[str, str]:
    local = {"MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"}
    return {"PMI_RANK": str(rank), "PMI_SIZE": "2", **local}


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        by_hand,
        pytest.param(by_name, marks=pytest.mark.slow),
        by_slurm,
        pytest.param(by_mpi, marks=pytest.mark.nightly),
    ],
    ids=["env", "env with a name", "Slurm", "MPI"],
)
def test_ranks_that_others_started(variables: Callable[[int], dict[str, str]], tmp_path: Path):
    port = free_port()
    code = """
import os, subprocess, sys
ranks = [subprocess.Popen([*sys.argv[1:]], env={**os.environ, **one}) for one in ENVIRONMENTS]
sys.exit(max(rank.wait() for rank in ranks))
""".replace("ENVIRONMENTS", repr([{**variables(n), "MASTER_PORT": str(port)} for n in (0, 1)]))
    run([sys.executable, "-c", code, sys.executable, FILE, str(tmp_path)], tmp_path)
    check(tmp_path)


@pytest.mark.slow
def test_ranks_of_torchrun_listen_at_the_loopback_whatever_torchrun_does(tmp_path: Path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    code = f"""
import sys
from {MODULE} import survey
import os
os.environ["{listeners.ROOT}"] = str(os.getpid())
survey(sys.argv[1])
"""
    (tmp_path / "rank.py").write_text(code)
    run([sys.executable, *torchrun, str(tmp_path / "rank.py"), str(tmp_path)], tmp_path)
    assert set(json.loads((tmp_path / "0.json").read_text())) == {"127.0.0.1"}


@pytest.mark.nightly
def test_ranks_of_mpirun(tmp_path: Path):
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    # mpirun's own daemon listens where its administrator says: each rank looks at itself alone.
    code = f"import os; os.environ['{listeners.ROOT}'] = str(os.getpid()); "
    code += f"from {MODULE} import survey; survey({str(tmp_path)!r})"
    command = ["mpirun", "--oversubscribe", "-n", "2", sys.executable, "-c", code]
    may = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    run(command, tmp_path, **may)
    for path in tmp_path.glob("*.json"):
        assert set(json.loads(path.read_text())) == {"127.0.0.1"}


@pytest.mark.slow
def test_the_two_processes_of_doctor(tmp_path: Path):
    code = f"""
import os
os.environ.setdefault({listeners.ROOT!r}, str(os.getpid()))
from torch import distributed
from anybatch.doctor import checks
from {MODULE} import write
leave = distributed.destroy_process_group

def watched():
    write({str(tmp_path)!r}, distributed.get_rank())
    leave()

distributed.destroy_process_group = watched  # in the spawned processes too: they import this
if __name__ == "__main__":
    found = list(checks.gloo())[-1]
    assert found.level == "ok", found
"""
    script = tmp_path / "watched.py"
    script.write_text(code)
    run([sys.executable, str(script)], tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert set(found) == {"127.0.0.1"}
