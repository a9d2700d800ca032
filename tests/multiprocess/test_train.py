"""The main job on several ranks, started in each of the ways that a user has."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.report.reading_tensorboard import found_in

import anybatch as ab
from anybatch.events import Evaluated, RunEnded, StepDone
from anybatch.report import read
from anybatch.report.event_file import event_files

TASK = """
import torch, torch.nn.functional as F
from torch import nn
import anybatch as ab

def task(samples=101, broken=-1):
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 6, generator=draw)
    targets = (inputs.sum(dim=1) > 0).long()
    data = [(x, y) for x, y in zip(inputs, targets)]

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return samples
        def __getitem__(self, i):
            if i == broken:
                raise OSError(f"sample {i} is on a broken disk")
            return data[i]

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    def right(model, batch):
        x, y = batch
        return {"right": ((model(x).argmax(dim=1) == y).sum(), len(y))}

    return ab.Task(
        model=lambda: nn.Sequential(
            # No bias: before a norm it has no gradient but rounding, which AdamW makes large.
            nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)
        ),
        loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=0.02),
        train=Samples(), valid=data[:37], metrics=right, ghost_batch=4,
        global_batch=17, epochs=3, shuffle=True,
    )
"""


@pytest.fixture
def task_file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(TASK)
    return path


def run(*command, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def story(folder):
    """What a run says of itself: losses by step, metrics by evaluation, the end; and its weights."""
    events = read(folder / "events.jsonl")
    losses = [e.loss for e in events if isinstance(e, StepDone)]
    evaluations = [(e.samples, e.metrics["right"]) for e in events if isinstance(e, Evaluated)]
    return losses, evaluations, events[-1], load_file(folder / "model.safetensors")


def assert_same_run(one, other):
    losses, evaluations, _, weights = one
    assert losses == pytest.approx(other[0], rel=1e-4)
    assert evaluations == other[1]
    for name, value in weights.items():
        torch.testing.assert_close(value, other[3][name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_command_trains_the_same_on_one_rank_and_on_three(task_file, tmp_path):
    for ranks in (1, 3):
        done = run(
            "anybatch", "train", task_file, "--ranks", ranks, "--out", f"r{ranks}", cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("Predicted and measured") == 1  # only rank 0 speaks
    alone, three = story(tmp_path / "r1"), story(tmp_path / "r3")
    assert_same_run(three, alone)
    assert len(alone[0]) == 18
    assert isinstance(three[2], RunEnded)
    assert len(three[2].rank_peak_bytes) == 3
    parts = three[2].step_parts
    assert list(parts) == ["computing", "slower ranks", "exchange", "update", "samples"]
    assert min(parts.values()) >= 0
    assert parts["computing"] > 0
    assert not alone[2].step_parts
    plan = json.loads((tmp_path / "r3" / "plan.json").read_text())
    assert (plan["parallel"], plan["shares"]) == ("replicate", [1.0, 1.0, 1.0])


@pytest.mark.slow
def test_torchruns_ranks_are_recognised(task_file, tmp_path):
    for name, command in {
        "alone": ("anybatch", "train", task_file, "--ranks", 1, "--out", "alone"),
        "both": ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "anybatch",
                 "train", task_file, "--out", "both"),
    }.items():  # fmt: skip
        done = run(*command, cwd=tmp_path)
        assert done.returncode == 0, f"{name}: {done.stdout} {done.stderr}"
    assert_same_run(story(tmp_path / "both"), story(tmp_path / "alone"))


LOOP = """
import sys

import anybatch as ab
from own import task

made = task()
with ab.Session(made, ab.plan(made)) as session:
    *_, last = session.steps()
    if session.is_leader:
        print(session.plan.num_ranks, last.loss)
"""


@pytest.mark.slow
def test_ranks_that_torchrun_started_plan_together_before_a_loop_of_their_own(task_file, tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    told = [
        run(*command, cwd=tmp_path).stdout.split()
        for command in (("loop",), (*torchrun, "loop.py"))
    ]
    (one, alone), (two, both) = told  # each loop has one leader
    assert (one, two) == ("1", "2")
    assert float(both) == pytest.approx(float(alone), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("-s", "broken=60"), 2, ["sample 60", "broken disk"]),
        (("--memory", "100KiB"), 3, ["no plan fits"]),
        (("-s", "sample=3"), 2, ["sample"]),
    ],
    ids=["a broken sample", "too little memory", "an unknown setting"],
)
def test_the_command_ends_with_the_status_of_what_went_wrong(
    task_file, tmp_path, options, status, words
):
    done = run("anybatch", "train", task_file, "--ranks", 2, *options, "--out", "r", cwd=tmp_path)
    assert done.returncode == status, done.stdout + done.stderr
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_more_ranks_than_samples_work(task_file, tmp_path):
    done = run(
        "anybatch", "train", task_file, "--ranks", 3, "-s", "samples=2", "--out", "r", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert story(tmp_path / "r")[1][-1][0] == 2


LARGE = """
import torch, torch.nn.functional as F
from torch import nn
import anybatch as ab

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 768)) for _ in range(6)
        )
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

def task():
    data = torch.utils.data.TensorDataset(torch.randn(24, 768), torch.randint(768, (24,)))
    return ab.Task(
        model=Model, loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4), train=data, global_batch=12, epochs=1,
    )
"""


@pytest.mark.slow
def test_a_model_that_no_rank_can_hold_is_divided(tmp_path):
    (tmp_path / "large.py").write_text(LARGE)
    command = ("anybatch", "train", "large.py", "--memory", "100MiB", "--out")
    alone = run(*command, "alone", "--ranks", 1, cwd=tmp_path)
    assert alone.returncode == 3
    assert "2 devices, state divided" in alone.stderr

    done = run(*command, "both", "--ranks", 2, cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads((tmp_path / "both" / "plan.json").read_text())
    assert plan["parallel"] == "shard"
    end = read(tmp_path / "both" / "events.jsonl")[-1]
    assert end.finished
    assert max(end.rank_peak_bytes) < 100 << 20
    assert abs(end.predicted_peak_bytes - end.measured_peak_bytes) < 15 << 20
    weights = load_file(tmp_path / "both" / "model.safetensors")
    assert weights["blocks.5.2.weight"].shape == (768, 768)  # whole, by the plain model's names


def test_ranks_must_be_a_number_that_can_be(task_file):
    task = __import__("runpy").run_path(str(task_file))["task"]()
    with pytest.raises(ab.InputError, match="ranks is 0"):
        ab.train(task, ranks=0)
    with pytest.raises(ab.InputError, match="'single', which is one rank"):
        ab.train(task, ranks=2, parallel="single")


@pytest.mark.slow
def test_only_the_first_rank_writes_the_log_for_tensorboard(task_file, tmp_path):
    pytest.importorskip("tensorboard")
    done = run(
        *("anybatch", "train", task_file, "--ranks", 2, "--tensorboard", "--out", "r"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses, evaluations, end, _ = story(tmp_path / "r")
    assert len(event_files(tmp_path / "r" / "tensorboard")) == 1
    scalars = found_in(tmp_path / "r" / "tensorboard").scalars
    assert [step for step, _ in scalars["train/loss"]] == list(range(1, end.steps + 1))
    assert [loss for _, loss in scalars["train/loss"]] == pytest.approx(losses, rel=1e-6)
    right = [value for _, value in evaluations]
    assert [value for _, value in scalars["held_out/right"]] == pytest.approx(right, rel=1e-6)
    assert len(scalars["ranks/slowest_seconds"]) == end.steps
