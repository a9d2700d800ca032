"""Jobs of a real Slurm, which runs for these tests alone."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.multiprocess import slurm as slurm_here
from tests.multiprocess.slurm import Slurm

from anybatch.errors import LaunchError
from anybatch.launch.slurm import script, submit

pytestmark = pytest.mark.nightly

PROBE = Path(__file__).with_name("probe.py")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    reason = slurm_here.why_not()
    if reason is not None:
        pytest.skip(reason)
    # Sockets have short names.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        slurm_here.running(Path(folder)) as running,
    ):
        yield running


@pytest.fixture(autouse=True)
def a_login_node(slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.environment[name])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PROBE_FOLDER", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def seen_by(folder: Path, restart: int) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{restart}-*.json"))]


def test_the_ranks_of_a_job_find_each_other_and_it_goes_on_when_it_was_stopped(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PROBE_STATUS", "75")
    logs = tmp_path / "logs"
    options = {"job-name": "probe", "ntasks-per-node": 2, "time": "10", "signal": "TERM@60"}
    arguments = ("train", f"{PROBE}:task")
    number = submit(script(arguments, logs, options, ("--global-batch", "8")), logs)
    slurm.wait_for(number, ["PENDING"], restarts=1)
    # Slurm lets a job that was requeued wait for two minutes; the administrator does not.
    slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    slurm.wait_for(number, ["COMPLETED"])

    first, again = seen_by(tmp_path, 0), seen_by(tmp_path, 1)
    for ranks in (first, again):
        assert [rank["rank"] for rank in ranks] == [0, 1], (
            logs / f"{number}_0_log.out"
        ).read_text()
        assert [rank["local_rank"] for rank in ranks] == [0, 1]
        assert [rank["local_world_size"] for rank in ranks] == [2, 2]
        assert [rank["sum"] for rank in ranks] == [1, 1]
    assert "--global-batch" not in first[0]["argv"]
    assert again[0]["argv"][-2:] == ["--global-batch", "8"]
    assert (logs / f"{number}_submission.sh").read_text().startswith("#!/bin/bash")


def test_the_shell_of_a_job_is_no_rank(slurm: Slurm, tmp_path: Path):
    code = "from anybatch.launch import find; print(find())"
    for tasks, words in (("2", [sys.executable]), ("1", ["srun", sys.executable])):
        script = tmp_path / f"{tasks}.sh"
        script.write_text(f"#!/bin/bash\n{' '.join(words)} -c '{code}'\n")
        output = tmp_path / f"{tasks}.out"
        slurm.run("sbatch", "--wait", f"--ntasks={tasks}", f"--output={output}", str(script))
        assert output.read_text() == "None\n"


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("partition", "nosuch", "[Pp]artition"),
        ("time", "soon", "time"),
        ("signal", "soon", "signal"),
    ],
)
def test_what_slurm_does_not_take_is_told(
    slurm: Slurm, tmp_path: Path, option: str, value: object, words: str
):
    with pytest.raises(LaunchError, match=f"did not take the job: .*{words}"):
        submit(script(("train", "x"), tmp_path, {option: value}), tmp_path)


@pytest.mark.parametrize("text", ["node[08-11,2],gpu", "r[1-2]n[01-02],x"])
def test_host_lists_are_read_as_slurm_reads_them(slurm: Slurm, text: str):
    from anybatch.launch.membership import first_host

    assert first_host(text) == slurm.run("scontrol", "show", "hostnames", text).split()[0]
