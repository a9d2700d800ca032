"""Runs of two ranks that are evaluated, and whose weights are exported, after they have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.runs import FILE_TASK, Tied, X, evaluated, small_task, tree
from torch import nn

import anybatch as ab


def trained(folder: Path, parallel: Any, **changes: Any) -> Path:
    task = small_task(**changes)
    options: Any = {"parallel": parallel, "ranks": 2, "checkpoint_every": 2}
    ab.train(task, out=folder, progress=False, **options)
    return folder


def plain_model() -> nn.Module:
    """Of a model that can be divided: FSDP wants no buffers that ranks disagree on."""
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))


CASES: dict[str, dict[str, Any]] = {
    "replicate": {},
    "shard": {"model": plain_model, "ghost_batch": None},
    "ddp": {"model": plain_model, "ghost_batch": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", CASES)
def test_of_two_ranks(parallel: str, tmp_path: Path):
    changes = CASES[parallel]
    folder = trained(tmp_path / "run", parallel, **changes)
    told, before = evaluated(folder), tree(folder)
    for step in (None, 4):
        found = ab.evaluate(folder, small_task(**changes), step=step)
        assert found.plan.num_ranks == 2
        assert found.samples == 40
        assert (found.loss, found.metrics) == (told[step or 6].loss, told[step or 6].metrics)
    alone = ab.evaluate(folder, small_task(**changes), ranks=1)
    assert alone.plan.num_ranks == 1
    assert alone.samples == 40
    assert alone.loss == pytest.approx(told[6].loss, rel=1e-6)

    model = changes.get("model", Tied)
    for number, step in enumerate((None, 6)):
        path = tmp_path / f"{number}.pt"
        ab.export(folder, path, step=step)
        plain = model().eval()
        plain.load_state_dict(torch.load(path, weights_only=True), strict=True)
        loss = nn.functional.mse_loss(plain(X), X @ torch.tensor([[1.0], [2.0], [-1.0]]))
        assert loss.item() == pytest.approx(told[6].loss, rel=1e-5)
    assert tree(folder) == before


@pytest.mark.slow
def test_fewer_samples_than_ranks_have_passes(tmp_path: Path):
    """No sample counts twice: 37 of them on two ranks."""
    held_out = torch.utils.data.TensorDataset(X[:37], X[:37, :1])
    folder = trained(tmp_path / "run", "replicate")
    one = ab.evaluate(folder, small_task(valid=held_out), ranks=1, micro_batch=4)
    two = ab.evaluate(folder, small_task(valid=held_out), ranks=2, micro_batch=4)
    assert one.samples == two.samples == 37
    assert one.loss == pytest.approx(two.loss, rel=1e-6)
    assert one.metrics["off"] == pytest.approx(two.metrics["off"], rel=1e-6)


@pytest.mark.slow
def test_what_is_wrong_on_a_rank_is_told_once(tmp_path: Path):
    folder = trained(tmp_path / "run", "replicate")
    with pytest.raises(ab.InputError, match=r"no checkpoint of step 3 .* 2, 4, 6"):
        ab.evaluate(folder, small_task(), step=3)
    other = small_task(model=lambda: nn.Linear(3, 1), ghost_batch=None)
    with pytest.raises(ab.InputError, match=r"not the one of the run"):
        ab.evaluate(folder, other)


@pytest.mark.slow
def test_a_divided_model_of_transformers_with_adapters_and_without(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from tests.unit import test_exporting_transformers as words

    options: Any = {"parallel": "shard", "ranks": 2, "checkpoint_every": 1, "progress": False}
    ids = words.IDS
    for name, make, step in (("whole", words.llama, None), ("adapters", words.adapted, 2)):
        run, folder = tmp_path / name, tmp_path / f"{name}-exported"
        ab.train(words.task_of(make), out=run, **options)
        loss = evaluated(run)[2].loss
        assert ab.evaluate(run, words.task_of(make), step=step).loss == loss
        ab.export(run, folder, format="huggingface", step=step, task=words.task_of(make))
        if name == "whole":
            found = transformers.AutoModelForCausalLM.from_pretrained(folder)
        else:
            found = peft.PeftModel.from_pretrained(words.base_of_the_task(), folder)
        assert found.eval()(input_ids=ids, labels=ids).loss.item() == pytest.approx(loss, 1e-5)


@pytest.mark.slow
def test_by_commands(tmp_path: Path):
    (tmp_path / "own_task.py").write_text(FILE_TASK)

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "anybatch", *words],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "80"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("train", "own_task.py", "--ranks", "2", "--out", "run", "-s", "width=6")
    shown = run("evaluate", "run")
    assert "after step 6, from run/model.safetensors" in shown
    assert "2 ranks of" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "2 ranks" not in run("evaluate", "run", "--ranks", "1")
    assert "40" in run("evaluate", "run", "--json", "-s", "held_out=40")
    assert "run.safetensors: safetensors, 4 tensors" in run("export", "run")
