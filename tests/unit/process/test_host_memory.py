"""Memory and cores under control groups and limits of the process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from anybatch.machine import Machine
from anybatch.planner.setting import budget_notices
from anybatch.process.control_group import Group, group_here
from anybatch.process.host_memory import host_memory
from anybatch.process.threads import num_cores

MIB, GIB = 1 << 20, 1 << 30

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_of_the_groups_above_each_other_the_one_with_least_left_holds(tmp_path: Path):
    job = "sys/fs/cgroup/job"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step",
            f"{job}/memory.max": str(8 * GIB),
            f"{job}/memory.current": str(7 * GIB),
            f"{job}/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}",
            f"{job}/memory.events": "oom_kill 2",
            f"{job}/step/memory.max": "max",
            f"{job}/step/memory.high": str(6 * GIB),
            f"{job}/step/memory.current": str(3 * GIB),
            f"{job}/step/memory.events": "low 0\noom_kill 1",
            f"{job}/cpu.max": "250000 100000",
            f"{job}/step/cpu.max": "max 100000",
        },
    )
    group = group_here(root)
    # 8 - (7 - 3 of page cache) are 4 left above, 6 - 3 are 3 below.
    assert group == Group(6 * GIB, 3 * GIB, str(root / job / "step/memory.high"), 2.5, 1)
    assert group.free_bytes == 3 * GIB


def test_groups_of_version_1_are_read(tmp_path: Path):
    memory, cpu = "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu,cpuacct"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job/step\n2:cpu,cpuacct:/job\n0::/",
            "sys/fs/cgroup/unified/cgroup.procs": "",
            f"{memory}/memory.limit_in_bytes": "9223372036854771712",
            f"{memory}/job/memory.limit_in_bytes": str(600 * MIB),
            f"{memory}/job/memory.usage_in_bytes": str(500 * MIB),
            f"{memory}/job/memory.stat": "\n".join(
                f"{name} {size * MIB}"
                for name, size in [
                    ("inactive_file", 1),  # of this folder alone, without those below
                    ("active_file", 1),
                    ("total_inactive_file", 100),
                    ("total_active_file", 50),
                ]
            ),
            f"{memory}/job/step/memory.limit_in_bytes": str(GIB),
            f"{memory}/job/step/memory.usage_in_bytes": str(500 * MIB),
            f"{cpu}/job/cpu.cfs_quota_us": "50000",
            f"{cpu}/job/cpu.cfs_period_us": "100000",
        },
    )
    group = group_here(root)
    file = str(root / memory / "job/memory.limit_in_bytes")
    assert group == Group(600 * MIB, 350 * MIB, file, 0.5)


@pytest.mark.parametrize("path", ["/system.slice/docker-4711.scope", "/../../job", "/"])
def test_in_a_container_the_root_of_the_files_is_the_group(tmp_path: Path, path: str):
    files = {
        "proc/self/cgroup": f"0::{path}",
        "sys/fs/cgroup/memory.max": str(GIB),
        "sys/fs/cgroup/memory.current": "4096",
    }
    group = group_here(tree(tmp_path, files))
    assert (group.limit_bytes, group.used_bytes) == (GIB, 4096)


@pytest.mark.parametrize("text", ["", "max", "many", "-1"])
def test_what_is_no_limit_limits_nothing(tmp_path: Path, text: str):
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": text}
    assert group_here(tree(tmp_path, files)) == Group()
    assert group_here(tmp_path / "nothing") == Group()


def test_a_group_with_less_left_than_the_machine_decides():
    free = psutil.virtual_memory().available
    group = Group(limit_bytes=600 * MIB, used_bytes=200 * MIB, file="memory.max")
    found = host_memory(group, limits=False)
    assert (found.total_bytes, found.free_bytes) == (600 * MIB, min(400 * MIB, free))
    assert "600 MiB (memory.max)" in found.limit
    wide = Group(limit_bytes=1 << 50)
    found = host_memory(wide, limits=False)
    assert found.total_bytes == psutil.virtual_memory().total
    assert found.limit == ""


# ------------------------------------------------------------------------------------- for real

_LOOK = """
from anybatch.machine import Machine
from anybatch.planner.setting import budget_notices
from anybatch.planner.ranks import Layout
device = Machine.here(device="cpu").device
print(device.total_bytes, device.free_bytes, device.name, device.limit, sep="|")
try:
    Machine.here("20GiB", "cpu")
except Exception as error:
    print(error)
"""


@pytest.fixture
def group() -> Iterator[list[Path]]:
    """Folders of a fresh control group, of memory and of cores."""
    base = Path("/sys/fs/cgroup")
    parents = [base / "memory", base / "cpu"] if (base / "memory").is_dir() else [base, base]
    made: list[Path] = []
    try:
        for parent in dict.fromkeys(parents):
            folder = parent / f"anybatch-test-{os.getpid()}"
            folder.mkdir()
            made.append(folder)
        names = "memory.limit_in_bytes", "memory.max"
        if not any((made[0] / name).exists() for name in names):
            pytest.skip("the group that this process is in does not hand its controllers on")
        yield made
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


@pytest.mark.slow
@on_linux
def test_in_a_group_the_budget_is_what_the_group_has_left(group: list[Path]):
    memory, cpu = group[0], group[-1]
    if (memory / "memory.limit_in_bytes").exists():
        (memory / "memory.limit_in_bytes").write_text(str(2 * GIB))
    else:
        (memory / "memory.max").write_text(str(2 * GIB))
    has_quota = (cpu / "cpu.cfs_quota_us").exists() or (cpu / "cpu.max").exists()
    if (cpu / "cpu.cfs_quota_us").exists():
        (cpu / "cpu.cfs_quota_us").write_text("100000")
    elif has_quota:
        (cpu / "cpu.max").write_text("100000 100000")
    script = [f"echo $$ > {folder}/cgroup.procs" for folder in group]
    told = _run("; ".join([*script, f"exec {sys.executable} -c '{_LOOK}'"]))
    total, free, name, limit = told[0].split("|")
    assert int(total) == 2 * GIB
    assert GIB < int(free) < 2 * GIB  # torch is in use
    assert "control group's limit of 2.00 GiB" in limit
    assert not has_quota or name == "CPU with 1 core"
    assert "memory is '20GiB', but CPU with" in told[1]
    assert str(memory) in told[1]


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("flag", ["v", "d"])
def test_a_limit_of_the_process_bounds_the_budget(flag: str):
    told = _run(f"ulimit -S{flag} {10 * GIB >> 10}; exec {sys.executable} -c '{_LOOK}'")
    total, free, _, limit = told[0].split("|")
    machine = psutil.virtual_memory().total
    assert int(total) == min(10 * GIB, machine)
    assert int(free) < 10 * GIB
    if psutil.virtual_memory().available > 11 * GIB:
        assert f"ulimit -{flag}" in limit
        assert f"ulimit -{flag}" in told[1]


def test_a_cpu_has_no_more_cores_than_the_group_allows(monkeypatch: pytest.MonkeyPatch):
    own = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    for quota, cores in ((None, own), (0.5, 1), (1.9, 1), (1000.0, own)):
        monkeypatch.setattr("anybatch.process.threads.cores_of_group", lambda quota=quota: quota)
        assert num_cores() == cores


def test_parts_of_a_cpu_share_what_is_free():
    one = Machine.here(device="cpu").device
    assert one.free_bytes is not None
    assert one.divided(4, GIB).free_bytes == one.free_bytes // 4


def test_a_budget_beyond_what_is_free_is_warned_of():
    here = Machine.here(device="cpu").device
    assert here.free_bytes is not None
    for budget, num_told in ((here.free_bytes // 2, 0), (here.free_bytes + 1, 1)):
        device = replace(here, budget_bytes=budget, limit="a limit of ours")
        told = [n for n in budget_notices(device, limited=True) if "free" in n]
        assert len(told) == num_told
        assert all(
            "(a limit of ours)" in notice and "less with memory=." in notice for notice in told
        )


def _run(script: str) -> list[str]:
    ended = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()
