"""The memory of a control group, and other processes that take it while a run goes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.faults.memory_group import MemoryGroup, memory_group, why_not

MIB = 1 << 20
LIMIT = 600 * MIB
SECONDS = 240.0

pytestmark = [pytest.mark.faults, pytest.mark.slow]

TASK = """
import time
from pathlib import Path
import torch
from torch import nn
import anybatch as ab

# A pass over all of a global batch takes 8,192 * 41 * 256 * 8 bytes, 656 MiB.
SIZE, STEPS = 8192, 12

def task(waits: bool = False):
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(2 * SIZE, 16, generator=draw, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())

    def model():
        layers = [layer for _ in range(20) for layer in (nn.Tanh(), nn.Sigmoid())]
        return nn.Sequential(nn.Linear(16, 256), *layers, nn.Linear(256, 1)).double()

    def loss(model, batch):
        log = Path("run/events.jsonl")
        while waits and log.exists() and '"step": 3' in log.read_text() and not Path("go").exists():
            time.sleep(0.02)
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[1])

    return ab.Task(
        model=model, loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        train=data, global_batch=SIZE, steps=STEPS, seed=3,
    )
"""

HOG = """
import sys
from pathlib import Path

counts, limit = Path(sys.argv[1]), int(sys.argv[2])
before = counts.read_text().split("oom_kill ")[1]
held = []
while before == counts.read_text().split("oom_kill ")[1] and len(held) << 22 < limit:
    held.append(b"x" * (1 << 22))
"""


@pytest.fixture(scope="module", autouse=True)
def _needs_groups():
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the task without any limit."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = start(folder).communicate(timeout=SECONDS)
    return (
        weights(folder) if (folder / "run/model.safetensors").exists() else pytest.fail(str(done))
    )


def start(folder: Path, *options: str, group: MemoryGroup | None = None) -> subprocess.Popen[str]:
    (folder / "task.py").write_text(TASK)
    words = [sys.executable, "-m", "anybatch", "train", "task.py", "--out", "run", *options]
    return subprocess.Popen(
        words if group is None else group.command(*words, is_victim=True),
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run/model.safetensors")


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("memory", [None, "150MiB"])
def test_a_run_keeps_to_the_memory_of_its_group(
    memory: str | None, undisturbed: dict[str, torch.Tensor], tmp_path: Path
):
    with memory_group(LIMIT) as group:
        run = start(tmp_path, *(() if memory is None else ("--memory", memory)), group=group)
        _, errors = run.communicate(timeout=SECONDS)
        assert (run.returncode, group.num_killed) == (0, 0), errors
        assert group.most_bytes <= LIMIT
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    if memory is None:
        # 90% of what the group had left when the process had loaded torch.
        assert 0.3 * LIMIT < plan["budget_bytes"] < 0.9 * LIMIT
    else:
        assert plan["budget_bytes"] == 150 * MIB
    assert_same(weights(tmp_path), undisturbed)


LOOK = "from anybatch.machine import Machine; d = Machine.here(device='cpu').device; "
LOOK += "print(d.total_bytes, d.free_bytes, d.budget_bytes, d.limit)"
# What the first optimizer of a process loads is not free.
LOADED = LOOK + "; import torch; torch.optim.SGD(torch.nn.Linear(1, 1).parameters()); "
LOADED += "print(Machine.here(device='cpu').device.free_bytes)"
NEIGHBOR = "held = b'x' * (200 << 20); print(flush=True); input()"


@pytest.mark.nightly
def test_what_others_hold_in_the_group_is_no_part_of_the_budget():
    with memory_group(LIMIT) as group:

        def look() -> tuple[int, int]:
            words = group.command(sys.executable, "-c", LOOK)
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=SECONDS, check=True
            )
            total, free, budget, limit = done.stdout.split(maxsplit=3)
            assert int(total) == LIMIT
            assert str(group.folder) in limit
            return int(free), int(budget)

        alone = look()
        words = group.command(sys.executable, "-c", NEIGHBOR)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(words, **pipes) as neighbor:
            assert neighbor.stdout is not None
            neighbor.stdout.readline()
            beside = look()
            neighbor.communicate(b"\n", timeout=SECONDS)
    # The neighbor's interpreter takes some MiB, too.
    assert 200 * MIB <= alone[0] - beside[0] < 240 * MIB
    assert beside[1] == int(0.9 * beside[0])


def test_what_the_first_optimizer_loads_is_no_part_of_the_budget():
    with memory_group(LIMIT) as group:
        words = group.command(sys.executable, "-c", LOADED)
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=True)
    first, second = done.stdout.splitlines()
    assert abs(int(first.split()[1]) - int(second)) < 8 * MIB


KEEPING = """
held = []
def keeping():
    made = task()
    def model():
        held.append(held or b"x" * (100 << 20))  # as what it imports
        return made.model()
    return replace(made, model=model)
"""


@pytest.mark.nightly
def test_what_the_code_of_the_model_keeps_is_no_part_of_the_budget(tmp_path: Path):
    (tmp_path / "task.py").write_text(f"from dataclasses import replace{TASK}{KEEPING}")
    budgets: list[int] = []
    for name in ("task", "keeping"):
        words = ["anybatch", "plan", f"task.py:{name}", "--no-rehearsal", "--json"]
        with memory_group(LIMIT) as group:
            done = subprocess.run(
                group.command(sys.executable, "-m", *words),
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=True,
            )
        plan = json.loads(done.stdout)
        assert plan["enforced"]
        budgets.append(plan["budget_bytes"])
    assert 80 * MIB <= budgets[0] - budgets[1] <= 100 * MIB


STEP = """
import torch
import anybatch as ab
from task import task

made = task()
model = made.model()
step = ab.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), made.loss)
inputs = torch.randn(4 * 8192, 16, dtype=torch.float64)
# In one piece this takes 2.6 GiB, and a quarter of it more than the group has.
print(step((inputs, inputs.sum(1, keepdim=True).sin())).num_micro_batches)
"""


@pytest.mark.nightly
def test_a_step_of_any_size_keeps_to_the_memory_of_its_group(tmp_path: Path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "script.py").write_text(STEP)
    with memory_group(LIMIT) as group:
        words = group.command(sys.executable, "script.py", is_victim=True)
        done = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert (done.returncode, group.num_killed) == (0, 0), done.stderr
    assert int(done.stdout) >= 2.6 * 1024 * MIB / LIMIT


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_memory_another_process_takes_ends_with_the_right_weights(
    ranks: int, undisturbed: dict[str, torch.Tensor], tmp_path: Path
):
    """The kernel kills one of its processes. Ranks are started again; a single process has left its
    checkpoint, from which the same command goes on. The run waits in a step until then."""
    words = ["--ranks", str(ranks), "--checkpoint-every", "1", "-s", "waits=true"]
    with memory_group(ranks * LIMIT) as group:
        run = start(tmp_path, *words, group=group)
        wait_for_step(tmp_path / "run/events.jsonl", 3, run)
        counts = group.folder / "memory.oom_control"
        counts = counts if counts.exists() else group.folder / "memory.events"
        hog = [sys.executable, "-c", HOG, str(counts), str(ranks * LIMIT)]
        num_hogs = 0  # killed with the run or in its place
        while group.num_killed == num_hogs:
            done = subprocess.run(group.command(*hog), timeout=SECONDS)
            num_hogs += done.returncode == -signal.SIGKILL
        (tmp_path / "go").touch()
        _, errors = run.communicate(timeout=SECONDS)
        if run.returncode:
            assert run.returncode == -signal.SIGKILL, errors
            assert list((tmp_path / "run/checkpoints").iterdir())
            run = start(tmp_path, *words, "--resume", group=group)
            _, errors = run.communicate(timeout=SECONDS)
        else:
            assert "killed" in errors
        assert run.returncode == 0, errors
    assert_same(weights(tmp_path), undisturbed)


def wait_for_step(log: Path, step: int, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not (log.exists() and f'"step": {step}' in log.read_text()):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
