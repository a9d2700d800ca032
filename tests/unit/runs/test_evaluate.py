"""`evaluate`: a run's held-out samples with a run's weights, after the run, in one process."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.small_runs import (
    FILE_TASK,
    X,
    Y,
    evaluated,
    flip,
    interrupted,
    small_task,
    tree,
)
from torch import nn

import anybatch as ab
from anybatch.events import Event, OutOfMemory, Replanned
from anybatch.planner.ranks import budget_for
from anybatch.recipes import resolve
from anybatch.report import read
from anybatch.runs.evaluate import held_still

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def from_file(tmp_path: Path) -> Path:
    path = tmp_path / "own_task.py"
    path.write_text(FILE_TASK)
    return path


@pytest.mark.parametrize("step", [None, 2, 4, 6])
def test_what_is_found_is_what_training_told_to_the_bit(finished: Path, step: int | None):
    found = ab.evaluate(finished, small_task(), step=step)
    told = evaluated(finished)[step or 6]
    assert (found.loss, found.metrics) == (told.loss, told.metrics)
    assert (found.step, found.samples) == (told.step, told.samples)


@pytest.mark.parametrize("precision", ["bf16", "bf16-weights", "fp16-pure"])
def test_in_other_precisions_too(tmp_path: Path, precision: str):
    folder = tmp_path / "run"
    ab.train(small_task(), out=folder, precision=precision, checkpoint_every=2, progress=False)
    for step in (None, 2):
        found = ab.evaluate(folder, small_task(), step=step)
        assert found.loss == evaluated(folder)[step or 6].loss
        assert found.plan.choice.precision == precision


def test_what_the_user_has_compiled_is_not_compiled_while_it_is_planned(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    compiled: list[object] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    task = small_task(
        model=lambda: torch.compile(nn.Linear(3, 1), backend=backend),
        ghost_batch=None,
        metrics=None,
    )
    ab.train(task, out=tmp_path / "run", progress=False)
    compiled.clear()
    torch.compiler.reset()
    recwarn.clear()
    found = ab.evaluate(tmp_path / "run", task)
    assert not [one for one in recwarn if "torch.compile" in str(one.message)]
    assert found.loss == pytest.approx(evaluated(tmp_path / "run")[6].loss, rel=1e-6)
    assert len(compiled) <= 2  # of the passes themselves: whole ones and a smaller one


def found_at_the_end(folder: Path) -> float:
    return evaluated(folder)[6].loss


def test_of_a_reproducible_run(tmp_path: Path):
    folder = tmp_path / "run"
    ab.train(small_task(reproducible=True), out=folder, progress=False)
    found = ab.evaluate(folder, small_task(reproducible=True))
    assert found.loss == found_at_the_end(folder)


def test_nothing_in_the_folder_is_touched(finished: Path):
    before = tree(finished)
    ab.evaluate(finished, small_task())
    ab.evaluate(finished, small_task(), step=2)
    assert tree(finished) == before


def test_a_module_that_the_task_was_given_stays_as_it_is(tmp_path: Path):
    model = small_task().build_model()
    task = small_task(model=model)
    ab.train(task, out=tmp_path / "run", progress=False)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    ab.evaluate(tmp_path / "run", task)
    assert all(not param.any() and param.requires_grad for param in model.parameters())


def test_neither_gradients_nor_an_optimizer_s_state_are_held(finished: Path):
    still = held_still(small_task())
    model = still.build_model()
    trained = [param for param in model.parameters() if param.requires_grad]
    assert [param.numel() for param in trained] == [min(p.numel() for p in model.parameters())]
    optimizer = still.optimizer(still.parameters_of(model))
    assert [group["params"] for group in optimizer.param_groups] == [trained]


# --------------------------------------------------------------------------------- whose task it is


def test_a_run_that_was_started_by_name_knows_its_task(from_file: Path, tmp_path: Path):
    task = resolve(str(from_file), {"width": "5"})
    ab.train(task, out=tmp_path / "run", progress=False)
    assert ab.evaluate(tmp_path / "run").loss == found_at_the_end(tmp_path / "run")


def test_a_setting_in_place_of_one_of_the_run_s(from_file: Path, tmp_path: Path):
    task = resolve(str(from_file), {"width": "5"})
    ab.train(task, out=tmp_path / "run", progress=False)
    found = ab.evaluate(tmp_path / "run", settings={"held-out": "7"})
    assert found.samples == 7
    assert found.plan.task.parameters == task_size(5)


def task_size(width: int) -> int:
    return 3 * width + width + width + 1


def test_a_file_that_has_moved_keeps_the_settings_of_the_run(from_file: Path, tmp_path: Path):
    ab.train(resolve(str(from_file), {"width": "5"}), out=tmp_path / "run", progress=False)
    moved = tmp_path / "elsewhere" / from_file.name
    moved.parent.mkdir()
    from_file.rename(moved)
    with pytest.raises(ab.InputError, match=r"own_task.py' .*does not exist"):
        ab.evaluate(tmp_path / "run")
    found = ab.evaluate(tmp_path / "run", str(moved))
    assert found.loss == found_at_the_end(tmp_path / "run")


def test_a_global_batch_that_was_set_beside_the_function(from_file: Path, tmp_path: Path):
    from dataclasses import replace

    task = replace(resolve(str(from_file)), global_batch=7, steps=6, epochs=None)
    ab.train(task, out=tmp_path / "run", progress=False)
    assert ab.evaluate(tmp_path / "run").plan.task.global_batch == 7


def test_a_task_that_was_made_in_python_has_to_be_given(finished: Path):
    with pytest.raises(ab.InputError, match=r"does not tell where its task 'small' comes from"):
        ab.evaluate(finished)


def test_another_task_is_told(finished: Path):
    other = small_task(model=lambda: nn.Linear(3, 1))
    with pytest.raises(ab.InputError, match=r"not the one of the run .* has 4 parameters"):
        ab.evaluate(finished, other)


def test_a_model_of_other_names_is_told(finished: Path):
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small_task().build_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    for step in (None, 2):
        with pytest.raises(ab.InputError, match=r"another model.* missing"):
            ab.evaluate(finished, small_task(model=Other), step=step)


def test_a_task_without_held_out_samples(finished: Path):
    with pytest.raises(ab.InputError, match=r"no held-out samples"):
        ab.evaluate(finished, small_task(valid=None))


def test_settings_for_a_task_that_is_made(finished: Path):
    with pytest.raises(ab.InputError, match=r"settings \(width\) are given for a task"):
        ab.evaluate(finished, small_task(), settings={"width": "3"})


# ------------------------------------------------------------------------------ which weights they are


def test_of_a_run_that_was_stopped_those_of_its_newest_checkpoint(tmp_path: Path):
    folder = interrupted(tmp_path / "run", at=4)
    found = ab.evaluate(folder, small_task())
    assert found.step == 4
    assert found.loss == evaluated(folder)[4].loss


def test_weights_of_an_earlier_end_are_not_those_of_a_run_that_was_taken_up(tmp_path: Path):
    folder = tmp_path / "run"
    ab.train(small_task(), out=folder, checkpoint_every=2, progress=False)
    interrupted(folder, at=8, epochs=6, resume=True)
    assert (folder / "model.safetensors").exists()
    found = ab.evaluate(folder, small_task(epochs=6))
    assert found.step == 8
    assert found.loss == evaluated(folder)[8].loss


def test_a_damaged_checkpoint_is_passed_over_and_told_if_it_was_named(tmp_path: Path):
    folder = interrupted(tmp_path / "run", at=4)
    flip(folder / "checkpoints" / "step-00000004", "weights/last.weight")
    assert ab.evaluate(folder, small_task()).step == 2
    with pytest.raises(ab.InputError, match=r"step-00000004 is not intact: .* Name another step"):
        ab.evaluate(folder, small_task(), step=4)


def test_damage_in_what_the_optimizer_remembers_is_no_matter(tmp_path: Path):
    folder = interrupted(tmp_path / "run", at=4)
    flip(folder / "checkpoints" / "step-00000004", "optimizer/0/exp_avg")
    assert ab.evaluate(folder, small_task()).loss == evaluated(folder)[4].loss


def test_a_step_that_is_not_there(finished: Path):
    with pytest.raises(ab.InputError, match=r"no checkpoint of step 3 .* of step 2, 4, 6\."):
        ab.evaluate(finished, small_task(), step=3)


def test_a_run_without_any_weights(finished: Path, tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("plan.json", "events.jsonl"):
        shutil.copy(finished / name, folder / name)
    with pytest.raises(ab.InputError, match=r"its weights are gone.* no checkpoint"):
        ab.evaluate(folder, small_task())


def test_a_folder_that_is_none_of_a_run(tmp_path: Path):
    with pytest.raises(ab.InputError, match=r"is not a run folder, since it has no events\.jsonl"):
        ab.evaluate(tmp_path, small_task())
    with pytest.raises(ab.InputError, match=r"nothing does not exist"):
        ab.evaluate(tmp_path / "nothing", small_task())


def test_a_log_that_tells_of_no_start(finished: Path, tmp_path: Path):
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(ab.InputError, match=r"does not tell of a run that can be taken up"):
        ab.evaluate(tmp_path, small_task())


def test_a_file_of_weights_that_is_cut_off(finished: Path, tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ab.InputError, match=r"model\.safetensors cannot be read"):
        ab.evaluate(folder, small_task())


# --------------------------------------------------------------------------------------- under a plan


def wide_task(width: int = 256, **changes: Any) -> ab.Task:
    """One of which passes take more than the model: 3 MiB in 1024 samples."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 1))

    data = torch.utils.data.TensorDataset(torch.ones(1024, 64), torch.ones(1024, 1))
    fields: dict[str, Any] = {"model": model, "train": data, "valid": data, "global_batch": 512}
    return small_task(**{**fields, "metrics": None, "epochs": 1, **changes})


def test_memory_is_as_predicted(tmp_path: Path):
    """By the tensors alone: libraries and the heap come on top."""
    folder = tmp_path / "run"
    ab.train(wide_task(8192), out=folder, progress=False)  # tens of MiB: a stack does not count
    found = ab.evaluate(folder, wide_task(8192), memory="256MiB", micro_batch=1024)
    assert found.predicted_peak_bytes is not None
    assert 0.5 < found.predicted_peak_bytes / found.measured_peak_bytes < 1.3
    assert found.plan.enforced
    assert found.plan.choice.evaluation_batch == 1024


def test_fewer_samples_at_once_where_so_many_do_not_fit(tmp_path: Path):
    folder = tmp_path / "run"
    ab.train(wide_task(), out=folder, progress=False)
    roomy = ab.evaluate(folder, wide_task())
    assert roomy.predicted_peak_bytes is not None
    less = budget_for(roomy.predicted_peak_bytes * 4 // 5, "cpu")
    found = ab.evaluate(folder, wide_task(), memory=less)
    assert found.plan.choice.evaluation_batch < roomy.plan.choice.evaluation_batch
    assert found.measured_peak_bytes <= less
    assert math.isclose(found.loss, roomy.loss, rel_tol=1e-6)


def test_less_than_one_sample_takes_is_refused(finished: Path):
    with pytest.raises(ab.NoPlanFits, match=r"one sample at a time .*Give it at least") as told:
        ab.evaluate(finished, small_task(), memory="512KiB")
    assert told.value.least_bytes is not None
    found = ab.evaluate(finished, small_task(), memory=f"{told.value.least_bytes}B")
    assert found.samples == 40


def test_memory_that_runs_out_is_got_over(tmp_path: Path):
    folder = tmp_path / "run"
    ab.train(wide_task(), out=folder, progress=False)
    attempts: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if not model.training and len(batch[0]) > 128 and not batch[0].is_meta:
            attempts.append(len(batch[0]))
            if type(batch[0]) is torch.Tensor:
                raise MemoryError("as if there were none")
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    seen: list[Event] = []
    found = ab.evaluate(folder, wide_task(loss=loss), micro_batch=512, sinks=[seen.append])
    assert [type(event) for event in seen[:4]] == [OutOfMemory, Replanned] * 2
    assert found.plan.choice.evaluation_batch == 128
    assert found.samples == 1024
    assert found.predicted_peak_bytes is None  # of another plan
    assert attempts


def test_bad_samples_are_left_out_as_in_training(tmp_path: Path):
    class Broken(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, i: int) -> Any:
            if i == 5:
                raise OSError("a broken disk")
            return torch.ones(3), torch.ones(1)

    task = small_task(valid=Broken(), bad_data="skip")
    ab.train(task, out=tmp_path / "run", progress=False)
    found = ab.evaluate(tmp_path / "run", task)
    assert found.samples == 11
    assert found.loss == found_at_the_end(tmp_path / "run")


def test_streams_are_evaluated_too(tmp_path: Path):
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Iterator[Any]:
            return ((X[i], Y[i]) for i in range(self.count))

    task = small_task(train=Stream(40), valid=Stream(23))
    ab.train(task, out=tmp_path / "run", progress=False)
    found = ab.evaluate(tmp_path / "run", task)
    assert found.samples == 23
    assert found.loss == found_at_the_end(tmp_path / "run")


def test_samples_of_unequal_length_as_in_training(tmp_path: Path):
    lengths = [1 + i % 7 for i in range(24)]
    data = [(torch.ones(n, 3), torch.ones(1)) for n in lengths]

    def padded(samples: list[Any]) -> Any:
        rows = torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
        return rows.mean(dim=1), torch.stack([y for _, y in samples])

    def lengths_of(samples: Any) -> list[int]:
        return [len(x) for x, _ in samples]

    task = small_task(train=data, valid=data, collate=padded, lengths=lengths_of)
    ab.train(task, out=tmp_path / "run", progress=False)
    found = ab.evaluate(tmp_path / "run", task)
    told = max(evaluated(tmp_path / "run").items())[1]
    assert (found.samples, found.loss) == (24, told.loss)


def test_a_model_that_no_trace_can_follow(tmp_path: Path):
    """Nothing is predicted, and it is evaluated all the same."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        batch[0].detach().numpy()
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    task = small_task(loss=loss)
    ab.train(task, out=tmp_path / "run", progress=False)
    found = ab.evaluate(tmp_path / "run", task, memory="64MiB")
    assert found.loss == found_at_the_end(tmp_path / "run")
    assert found.predicted_peak_bytes is None
    assert any("nothing is predicted" in notice for notice in found.plan.notices)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"ranks": 0}, "ranks is 0"),
        ({"step": -1}, "step is -1"),
        ({"precision": "fp7"}, "fp7"),
        ({"precision": "auto"}, "name one, such as"),
        ({"device": "h100-80gb"}, "a device of this machine"),
        ({"device": "cpu", "ranks": 2}, "leave one of them out"),
        ({"memory": "many"}, "'many'"),
    ],
)
def test_what_cannot_be(finished: Path, options: dict[str, Any], words: str):
    before = tree(finished)
    with pytest.raises(ab.InputError, match=words):
        ab.evaluate(finished, small_task(), **options)
    assert tree(finished) == before


def test_an_evaluation_is_shown_in_one_line(finished: Path):
    shown = repr(ab.evaluate(finished, small_task(), device="cpu"))
    assert shown.startswith("<Evaluation of small, step 6: loss ")


def test_the_log_of_a_run_names_what_its_task_was_loaded_by(from_file: Path, tmp_path: Path):
    task = resolve(str(from_file), {"width": "5"})
    ab.train(task, out=tmp_path / "run", progress=False)
    started: Any = read(tmp_path / "run" / "events.jsonl")[0]
    assert started.source == f"{from_file.resolve()}:task"
    assert started.settings == {"width": "5"}
