"""`train`: from a task to a trained model, its result, its events and its folder."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import anybatch as ab
from anybatch.events import Event, RunEnded, RunStarted, StepDone
from anybatch.report import read

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([[1.0], [2.0], [-1.0]])


pytestmark = pytest.mark.usefixtures("one_thread")


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def task(**changes: Any) -> ab.Task:
    fields: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1),
        "loss": mse,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.2),
        "train": TensorDataset(X, Y),
        "valid": TensorDataset(X, Y),
        "global_batch": 20,
        "epochs": 40,
    }
    return ab.Task(**{**fields, **changes})


def test_a_task_is_trained_and_evaluated():
    result = ab.train(task())
    assert result.ended.steps == 80
    assert result.ended.finished
    assert result.loss < 1e-4
    assert result.evaluation is not None
    assert result.evaluation.samples == 40
    assert not result.model.training
    assert result.folder is None


def test_a_sink_ends_training_one_step_later():
    seen: list[Event] = []

    def enough(event: Event) -> None:
        if isinstance(event, StepDone) and event.step >= 7:
            raise ab.StopTraining

    result = ab.train(task(), sinks=[enough, seen.append], progress=False)
    assert result.ended.steps == 8
    assert result.ended.finished
    assert [event.step for event in seen if isinstance(event, StepDone)] == list(range(1, 9))
    assert result.evaluation is not None
    assert result.evaluation.step == 8


def test_a_run_that_a_sink_has_ended_can_go_on(tmp_path: Path):
    def enough(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 7:
            raise ab.StopTraining

    ab.train(task(), out=tmp_path / "run", sinks=[enough], progress=False)
    result = ab.train(task(), out=tmp_path / "run", resume=True, progress=False)
    assert result.ended.steps == 80
    assert torch.equal(result.model.weight, ab.train(task(), progress=False).model.weight)


def test_a_script_is_shown_the_plan_and_how_far_it_is(capsys: pytest.CaptureFixture[str]):
    ab.train(task(epochs=2))
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line.rstrip() for line in err.splitlines() if line.strip()]
    assert lines[0] == "Plan"
    assert "Training task on CPU" in err
    assert any(line.startswith("step 4/4") for line in lines)
    assert lines[-1].startswith("Training finished after 4 steps")


def test_a_script_that_wants_to_see_nothing(capsys: pytest.CaptureFixture[str]):
    ab.train(task(epochs=1), progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_result_is_shown_in_one_line():
    shown = repr(ab.train(task(epochs=1), progress=False))
    assert shown.startswith("<Result of task: finished after 2 steps, held-out loss ")
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "original", "command"),
    [
        (["my run.py", "3"], ["/bin/python3", "-O", "my run.py", "3"], "python3 -O 'my run.py' 3"),
        (["/a/b.py"], ["python", "-m", "a.b"], "python -m a.b"),
        (["-c", "x"], ["python", "-c", "1", "x"], ""),
        (["-"], ["python", "-"], ""),
        ([""], ["python"], ""),
    ],
)
def test_a_run_knows_by_which_command_it_was_started(
    monkeypatch: pytest.MonkeyPatch, words: list[str], original: list[str], command: str
):
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert ab.train(task(epochs=1), progress=False).started.command == command


def test_without_held_out_data_there_is_no_evaluation():
    result = ab.train(task(valid=None, epochs=1))
    assert result.evaluation is None
    assert math.isnan(result.loss)
    assert result.metrics == {}


def test_the_model_is_evaluated_at_the_end_once():
    events: list[Event] = []
    ab.train(task(epochs=None, steps=3, evaluate_every=2), sinks=[events.append])
    kinds = [type(event).__name__ for event in events]
    assert kinds == [
        "RunStarted",
        "StepDone",
        "StepDone",
        "Evaluated",
        "StepDone",
        "Evaluated",
        "RunEnded",
    ]


def test_a_given_plan_is_followed():
    one = task(epochs=1)
    events: list[Event] = []
    plan = ab.plan(one, micro_batch=7)
    result = ab.train(one, plan=plan, sinks=[events.append])
    assert result.plan == plan
    assert {e.micro_batch for e in events if isinstance(e, StepDone)} == {7}


def test_two_runs_are_equal_bit_by_bit():
    one, other = (ab.train(task(epochs=2)).model.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_module_that_is_given_is_trained_in_place():
    model = nn.Linear(3, 1)
    result = ab.train(task(model=model, epochs=1))
    assert result.model is model


def test_a_stream_is_trained_on_to_its_end():
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            yield from zip(X, Y, strict=True)

    result = ab.train(task(train=Stream(), epochs=2, global_batch=16))
    assert result.ended.samples_seen == 80
    assert result.ended.steps == 6


def test_a_stream_whose_length_raises_is_a_stream():
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            yield from zip(X, Y, strict=True)

        def __len__(self) -> int:
            raise TypeError("nobody knows")

    assert ab.train(task(train=Stream(), valid=Stream(), epochs=1)).ended.samples_seen == 40


def test_a_stream_that_knows_its_length_is_not_asked_by_index():
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            yield from zip(X, Y, strict=True)

        def __len__(self) -> int:
            return 40

    one = task(train=Stream(), epochs=1)
    assert ab.train(one).ended.samples_seen == 40
    assert ab.verify(one, ab.plan(one)).exact


def test_the_folder_holds_what_the_result_tells(tmp_path: Path):
    result = ab.train(task(epochs=1), out=tmp_path / "a" / "run")
    assert result.folder == tmp_path / "a" / "run"
    started, *_, ended = read(result.folder / "events.jsonl")
    assert isinstance(started, RunStarted)
    assert ended == result.ended
    loaded = nn.Linear(3, 1)
    ab.load_weights(loaded, result.folder / "model.safetensors")
    assert torch.equal(loaded.weight, result.model.weight)
    assert ab.Plan.load(result.folder / "plan.json") == result.plan


def test_a_failed_run_tells_why_in_its_last_event(tmp_path: Path):
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return mse(model, batch) * (float("nan") if model.weight.norm() > 0.9 else 1.0)

    with pytest.raises(ab.LossError) as caught:
        ab.train(task(loss=loss, valid=None), out=tmp_path)
    *_, ended = read(tmp_path / "events.jsonl")
    assert isinstance(ended, RunEnded)
    assert not ended.finished
    assert ended.reason == str(caught.value)
    assert (tmp_path / "report.html").is_file()
    assert not (tmp_path / "model.safetensors").exists()


def test_a_folder_made_for_a_run_that_cannot_begin_is_taken_away(tmp_path: Path):
    with pytest.raises(ab.InputError, match=r"return a torch.optim.Optimizer"):
        ab.train(task(optimizer=lambda params: None), out=tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_parameter_groups_may_be_generators():
    def groups(model: nn.Module) -> Any:
        yield {"params": (p for p in [model.weight]), "lr": 0.1}
        yield {"params": [model.bias], "lr": 0.0}

    result = ab.train(task(parameters=groups, epochs=1))
    assert result.ended.finished
    fresh = task().build_model()
    assert torch.equal(result.model.bias, fresh.bias)
    assert not torch.equal(result.model.weight, fresh.weight)


def test_a_memory_budget_is_kept():
    result = ab.train(task(epochs=1), memory="64MiB")
    assert result.plan.enforced
    assert result.ended.budget_bytes == 64 << 20
