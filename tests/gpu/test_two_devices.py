"""Two ranks over NCCL, each with a device of its own, train as one does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

TASK = '''
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import anybatch as ab

HERE = Path(__file__).parent


class RunsOut(nn.Module):
    """A layer for which memory runs out once, on one rank, in the middle of a pass."""

    def __init__(self, rank, where):
        super().__init__()
        self.rank, self.where, self.num_passes = rank, where, 0
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        self.num_passes += x.is_cuda and torch.is_grad_enabled()
        mine = dist.is_initialized() and dist.get_rank() == self.rank
        if mine and self.num_passes == 6:
            self.refuse() if self.where == "forward" else x.register_hook(lambda _: self.refuse())
        return self.layer(x)

    def refuse(self):
        if not (HERE / "refused").exists():
            (HERE / "refused").touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


def task(rank: int = -1, where: str = "") -> ab.Task:
    draw = torch.Generator().manual_seed(0)

    def build():
        return nn.Sequential(
            nn.Linear(16, 16), nn.Tanh(), RunsOut(rank, where), nn.Tanh(), nn.Linear(16, 4)
        )

    def loss(model, batch):
        return ab.Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))

    return ab.Task(
        model=build,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=torch.utils.data.TensorDataset(
            torch.randn(256, 16, generator=draw), torch.randint(0, 4, (256,), generator=draw)
        ),
        global_batch=64,
        epochs=2,
    )
'''


def command(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "anybatch", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]


def trained(folder: Path, *options: str) -> list[dict]:
    task = folder / "task.py"
    task.write_text(TASK)
    run = folder / f"run-{len(list(folder.iterdir()))}"
    if "--plan" not in options:
        options = ("--micro-batch", "16", *options)
    command("train", str(task), "--out", str(run), "--restarts", "0", *options)
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def kept_on_host(folder: Path) -> Path:
    """A plan for two ranks that divide the model, and keep their parts in host memory."""
    (folder / "task.py").write_text(TASK)
    file = folder / "plan.json"
    where = ("--device", "cuda", "--devices", "2", "--parallel", "shard")
    command("plan", str(folder / "task.py"), *where, "--micro-batch", "16", "--out", str(file))
    plan = json.loads(file.read_text())
    for choice in (plan["choice"], *plan["ladder"]):
        choice |= {"optimizer_states": "host", "update": "as given"}
    file.write_text(json.dumps(plan | {"rivals": []}))
    return file


def losses(events: list[dict]) -> list[float]:
    return [event["loss"] for event in events if event["kind"] == "step"]


@pytest.mark.parametrize(
    "options",
    [
        ("--parallel", "replicate"),
        ("--parallel", "shard"),
    ],
    ids=lambda options: options[1],
)
def test_two_ranks_have_the_losses_of_one(options, tmp_path):
    alone = trained(tmp_path)
    together = trained(tmp_path, "--ranks", "2", *options)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_memory_that_runs_out_on_one_rank_is_met_by_both(parallel, where, tmp_path):
    alone = trained(tmp_path)
    planted = ("-s", "rank=1", "-s", f"where={where}")
    together = trained(tmp_path, "--ranks", "2", "--parallel", parallel, *planted)
    assert (tmp_path / "refused").exists()
    assert "out_of_memory" in {event["kind"] for event in together}
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.parametrize("planted", [(), ("-s", "rank=1", "-s", "where=backward")])
def test_a_divided_model_that_is_kept_in_host_memory(planted, tmp_path):
    alone = trained(tmp_path)
    plan = kept_on_host(tmp_path)
    together = trained(tmp_path, "--plan", str(plan), *planted)
    assert (tmp_path / "refused").exists() == bool(planted)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4)


def test_local_steps_are_planned_and_stay_near_the_losses_of_one(tmp_path):
    together = losses(trained(tmp_path, "--ranks", "2", "--local-steps", "2"))
    assert together == pytest.approx(losses(trained(tmp_path)), rel=0.05)
