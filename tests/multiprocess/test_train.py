"""The main job on several ranks, started in each of the ways that a user has."""

from __future__ import annotations

import json
import os
import runpy
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from tests.bad_input.conftest import clean_imports as clean_imports
from tests.bad_input.conftest import command as command
from tests.bad_input.conftest import folder as folder
from tests.unit.report.reading_tensorboard import found_in

import anybatch as ab
from anybatch.events import Evaluated, RunEnded, StepDone
from anybatch.report import read
from anybatch.report.tensorboard import event_files

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


@pytest.fixture(scope="module")
def task_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "own.py"
    path.write_text(TASK)
    return path


@pytest.fixture(scope="module")
def run(warm):
    """Runs a module in a process of its own."""

    def run(*command, cwd):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        return warm(["python", "-m", *command], cwd, environment)

    return run


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


@pytest.fixture(scope="module")
def alone(run, task_file):
    """The folder of a run of one rank."""
    return trained_by_a_command(run, task_file, "alone", "--ranks", 1)


@pytest.fixture(scope="module")
def of_three(run, task_file):
    """The folder of a run of three ranks, with a log for TensorBoard if that is there."""
    logged = ["--tensorboard"] if find_spec("tensorboard") else []
    return trained_by_a_command(run, task_file, "three", "--ranks", 3, *logged)


def trained_by_a_command(run, task_file, name, *options):
    folder = task_file.with_name(name)
    done = run("anybatch", "train", task_file, *options, "--out", name, cwd=folder.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Predicted and measured") == 1  # only rank 0 speaks
    return folder


@pytest.mark.nightly
def test_a_command_trains_the_same_on_one_rank_and_on_three(alone, of_three):
    one, three = story(alone), story(of_three)
    assert_same_run(three, one)
    assert len(one[0]) == 18
    assert isinstance(three[2], RunEnded)
    assert len(three[2].rank_peak_bytes) == 3
    parts = three[2].step_parts
    assert list(parts) == ["computing", "slower ranks", "exchange", "update", "samples"]
    assert min(parts.values()) >= 0
    assert parts["computing"] > 0
    assert not one[2].step_parts
    plan = json.loads((of_three / "plan.json").read_text())
    assert (plan["parallel"], plan["shares"]) == ("replicate", [1.0, 1.0, 1.0])


@pytest.mark.slow
def test_only_the_first_rank_writes_the_log_for_tensorboard(of_three):
    pytest.importorskip("tensorboard")
    losses, evaluations, end, _ = story(of_three)
    assert len(event_files(of_three / "tensorboard")) == 1
    scalars = found_in(of_three / "tensorboard").scalars
    assert [step for step, _ in scalars["train/loss"]] == list(range(1, end.steps + 1))
    assert [loss for _, loss in scalars["train/loss"]] == pytest.approx(losses, rel=1e-6)
    right = [value for _, value in evaluations]
    assert [value for _, value in scalars["held_out/right"]] == pytest.approx(right, rel=1e-6)
    assert len(scalars["ranks/slowest_seconds"]) == end.steps


@pytest.mark.nightly
def test_torchruns_ranks_are_recognised(run, task_file, alone, tmp_path):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = run(*torchrun, "-m", "anybatch", "train", task_file, "--out", "both", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(story(tmp_path / "both"), story(alone))


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
def test_ranks_that_torchrun_started_plan_together_before_a_loop_of_their_own(
    run, task_file, alone
):
    loop = task_file.with_name("loop.py")
    loop.write_text(LOOP)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    num_ranks, loss = run(*torchrun, loop, cwd=loop.parent).stdout.split()  # of the leader alone
    assert num_ranks == "2"
    assert float(loss) == pytest.approx(story(alone)[0][-1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        pytest.param(
            ("-s", "broken=60"),
            2,
            ["sample 60", "broken disk"],
            id="a broken sample",
            marks=pytest.mark.nightly,
        ),
        pytest.param(("--memory", "100KiB"), 3, ["no plan fits"], id="too little memory"),
    ],
)
def test_the_command_ends_with_the_status_of_what_went_wrong(
    run, task_file, tmp_path, options, status, words
):
    done = run("anybatch", "train", task_file, "--ranks", 2, *options, "--out", "r", cwd=tmp_path)
    assert done.returncode == status, done.stdout + done.stderr
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_what_can_be_seen_before_ranks_are_started_is_told_without_them(
    folder, clean_imports, command, monkeypatch
):
    (folder / "own.py").write_text(TASK)
    monkeypatch.setattr("anybatch.launch.agent._prepared", None)
    outcome = command("train", "own.py", "--ranks", "2", "-s", "sample=3")
    assert outcome.status == 2
    assert "sample" in outcome.sentence


def train_two_samples(_rank, _size, path, folder):
    task = runpy.run_path(str(path))["task"](samples=2)
    ab.train(task, out=folder, progress=False)


@pytest.mark.slow
def test_more_ranks_than_samples_work(task_file, tmp_path, crew):
    crew(3, train_two_samples, task_file, tmp_path / "r")
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
def test_a_model_that_no_rank_can_hold_is_divided(run, folder, clean_imports, command):
    (folder / "large.py").write_text(LARGE)
    line = ("train", "large.py", "--memory", "100MiB", "--out")
    alone = command(*line, "alone", "--ranks", "1")
    assert alone.status == 3
    assert "2 devices, state divided" in alone.err

    done = run("anybatch", *line, "both", "--ranks", 2, cwd=folder)

    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads((folder / "both" / "plan.json").read_text())
    assert plan["parallel"] == "shard"
    end = read(folder / "both" / "events.jsonl")[-1]
    assert end.finished
    assert max(end.rank_peak_bytes) < 100 << 20
    assert abs(end.predicted_peak_bytes - end.measured_peak_bytes) < 15 << 20
    weights = load_file(folder / "both" / "model.safetensors")
    assert weights["blocks.5.2.weight"].shape == (768, 768)  # whole, by the plain model's names


def test_ranks_must_be_a_number_that_can_be(task_file):
    task = runpy.run_path(str(task_file))["task"]()
    with pytest.raises(ab.InputError, match="ranks is 0"):
        ab.train(task, ranks=0)
    with pytest.raises(ab.InputError, match="'single', which is one rank"):
        ab.train(task, ranks=2, parallel="single")


ENDING = """
import sys
import anybatch as ab
from own import task
from anybatch.events import StepDone

def enough(event):
    if isinstance(event, StepDone) and event.step == 5:
        raise ab.StopTraining

if __name__ == "__main__":
    from dataclasses import replace
    long = replace(task(), epochs=2000)
    result = ab.train(long, ranks=2, sinks=[enough], progress=False)
    print(result.ended.steps, result.ended.finished, result.evaluation.step)
"""


@pytest.mark.nightly
def test_a_sink_ends_training_on_ranks_that_the_call_started(run, task_file):
    (task_file.parent / "ending.py").write_text(ENDING)
    done = run("ending", cwd=task_file.parent)
    assert done.returncode == 0, done.stderr
    steps, finished, evaluated = done.stdout.split()
    assert 5 < int(steps) < 2000  # of 12,000
    assert finished == "True"
    assert steps == evaluated
