"""Runs of two ranks that are evaluated, and whose weights are exported, after they have ended."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.crew import Crew, RankError
from tests.unit.small_runs import FILE_TASK, Tied, X, evaluated, off, small_task, tree
from tests.warm import Warm
from torch import nn

import anybatch as ab


def plain_model() -> nn.Module:
    """Of a model that can be divided: FSDP wants no buffers that ranks disagree on."""
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))


CASES: dict[str, dict[str, Any]] = {
    "replicate": {},
    "shard": {"model": plain_model, "ghost_batch": None},
}


def train(folder: Path, parallel: Any, **options: Any) -> ab.Result:
    task = small_task(**CASES[parallel])
    options |= {"parallel": parallel, "checkpoint_every": 2, "progress": False}
    return ab.train(task, out=folder, **options)


def train_as_rank(_rank: int, _size: int, folder: Path, parallel: str) -> None:
    train(folder, parallel)


def evaluate_as_rank(
    _rank: int, _size: int, folder: Path, changes: dict[str, Any], options: dict[str, Any]
) -> ab.Evaluation:
    return ab.evaluate(folder, small_task(**changes), **options)


@pytest.fixture(scope="module")
def trained(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of two ranks, which is not to be changed."""
    folders: dict[str, Path] = {}

    def once(parallel: str) -> Path:
        if parallel in folders:
            return folders[parallel]
        folder = folders[parallel] = tmp_path_factory.mktemp(parallel) / "run"
        if parallel == "shard":  # from here; the others by ranks that are there already
            result = train(folder, parallel, ranks=2)
            weights = load_file(folder / "model.safetensors")
            assert weights.keys() == result.model.state_dict().keys()
            for name, value in result.model.state_dict().items():
                assert torch.equal(weights[name], value)
        else:
            crew(2, train_as_rank, folder, parallel)
        return folder

    return once


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [pytest.param("replicate", marks=pytest.mark.nightly), "shard"]
)
def test_of_two_ranks(parallel: str, trained: Callable[[str], Path], crew: Crew, tmp_path: Path):
    changes = CASES[parallel]
    folder = trained(parallel)
    told, before = evaluated(folder), tree(folder)
    for step in (None, 4):
        for found in crew(2, evaluate_as_rank, folder, changes, {"step": step}):
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


def set_aside(model: nn.Module, batch: Any) -> Any:
    """Whether the rank has set aside the libraries that it has loaded."""
    return {**off(model, batch), "aside": (float(gc.get_freeze_count() > 0), 1)}


@pytest.mark.nightly
def test_as_many_ranks_are_started_as_the_run_had(trained: Callable[[str], Path]):
    folder = trained("replicate")
    before = tree(folder)
    found = ab.evaluate(folder, small_task(metrics=set_aside))
    assert found.plan.num_ranks == 2
    told = evaluated(folder)[6]
    assert (found.loss, found.metrics) == (told.loss, {**told.metrics, "aside": 1.0})
    assert tree(folder) == before


@pytest.mark.slow
def test_fewer_samples_than_ranks_have_passes(trained: Callable[[str], Path], crew: Crew):
    """No sample counts twice: 37 of them on two ranks."""
    folder = trained("replicate")
    held_out = {"valid": torch.utils.data.TensorDataset(X[:37], X[:37, :1])}
    one = ab.evaluate(folder, small_task(**held_out), ranks=1, micro_batch=4)
    options = {"ranks": 2, "micro_batch": 4}
    for two in crew(2, evaluate_as_rank, folder, held_out, options):
        assert one.samples == two.samples == 37
        assert one.loss == pytest.approx(two.loss, rel=1e-6)
        assert one.metrics["off"] == pytest.approx(two.metrics["off"], rel=1e-6)


@pytest.mark.nightly
def test_what_is_wrong_on_a_rank_is_told_once(trained: Callable[[str], Path], crew: Crew):
    folder = trained("replicate")
    with pytest.raises(RankError, match=r"no checkpoint of step 3 .* 2, 4, 6"):
        crew(2, evaluate_as_rank, folder, {}, {"step": 3})
    other = small_task(model=lambda: nn.Linear(3, 1), ghost_batch=None)
    with pytest.raises(ab.InputError, match=r"not the one of the run"):
        ab.evaluate(folder, other)


def train_and_evaluate_words(
    _rank: int, _size: int, folder: Path, adapted: bool, step: int | None
) -> float:
    from tests.unit.runs import test_export_transformers as words

    task = words.task_of(words.adapted if adapted else words.llama)
    ab.train(task, out=folder, parallel="shard", checkpoint_every=1, progress=False)
    return ab.evaluate(folder, task, step=step).loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapted", "step"), [pytest.param(False, None, marks=pytest.mark.nightly), (True, 2)]
)
def test_a_divided_model_of_transformers_with_adapters_and_without(
    adapted: bool, step: int | None, crew: Crew, tmp_path: Path
):
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from tests.unit.runs import test_export_transformers as words

    run, folder = tmp_path / "run", tmp_path / "exported"
    losses = crew(2, train_and_evaluate_words, run, adapted, step)
    loss = evaluated(run)[2].loss
    assert losses == [loss, loss]
    task = words.task_of(words.adapted if adapted else words.llama)
    ab.export(run, folder, format="huggingface", step=step, task=task)
    if adapted:
        found = peft.PeftModel.from_pretrained(words.base_of_the_task(), folder)
    else:
        found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert found.eval()(input_ids=words.IDS, labels=words.IDS).loss.item() == pytest.approx(
        loss, 1e-5
    )


@pytest.mark.nightly
def test_by_commands(warm: Warm, tmp_path: Path):
    (tmp_path / "own_task.py").write_text(FILE_TASK)

    def run(*words: str) -> str:
        done = warm(["anybatch", *words], tmp_path, {**os.environ, "COLUMNS": "80"})
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("train", "own_task.py", "--ranks", "2", "--out", "run", "-s", "width=6")
    shown = run("evaluate", "run")
    assert "after step 6, from run/model.safetensors" in shown
    assert "2 ranks of" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    alone = json.loads(run("evaluate", "run", "--ranks", "1", "--json", "-s", "held_out=30"))
    assert (alone["ranks"], alone["samples"]) == (1, 30)
    assert "run.safetensors: safetensors, 4 tensors" in run("export", "run")
