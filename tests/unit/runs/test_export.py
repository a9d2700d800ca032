"""`export`: the weights of a run, as other programs read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.small_runs import FILE_TASK, Tied, X, flip, interrupted, small_task, tree
from torch import nn

import anybatch as ab
from anybatch.recipes import resolve
from anybatch.report import read

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def state_in(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=True)


def trained(folder: Path) -> Any:
    model = Tied().eval()
    ab.load_weights(model, folder / "model.safetensors")
    return model


@pytest.mark.parametrize("step", [None, 6])
def test_a_state_dict_loads_strictly_into_plain_torch(finished: Path, here: Path, step: int | None):
    done = ab.export(finished, "w.pt", step=step)
    model = Tied().eval()
    model.load_state_dict(torch.load("w.pt", weights_only=True), strict=True)
    assert torch.equal(model(X), trained(finished)(X))
    assert (done.step, done.format, done.path) == (6, "torch", Path("w.pt"))
    assert done.num_bytes == Path("w.pt").stat().st_size


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_tied_weights_stay_one_and_what_is_not_persistent_stays_out(
    finished: Path, here: Path, name: str
):
    for number, step in enumerate((None, 6)):
        path = here / f"{number}-{name}"
        ab.export(finished, path, step=step)
        state = state_in(path)
        assert "table" not in state
        if path.suffix == ".pt":
            same = state["first.weight"].data_ptr() == state["again.weight"].data_ptr()
            assert same
        else:
            assert not {"first.weight", "again.weight"} <= state.keys()
        model = Tied()
        ab.load_weights(model, path)
        assert torch.equal(model.again.weight, trained(finished).first.weight)


def test_a_checkpoint_in_the_middle(finished: Path, here: Path):
    done = ab.export(finished, step=2)
    assert done.path == Path("run-step-2.safetensors")
    model = Tied()
    ab.load_weights(model, done.path)
    other: Any = ab.train(small_task(steps=2, epochs=None), progress=False).model
    torch.testing.assert_close(model.last.weight, other.last.weight)


def test_the_file_of_the_end_and_the_checkpoint_of_the_end_are_the_same(finished: Path, here: Path):
    ab.export(finished, "end.pt")
    ab.export(finished, "saved.pt", step=6)
    end, saved = state_in(Path("end.pt")), state_in(Path("saved.pt"))
    assert end.keys() == saved.keys()
    assert all(torch.equal(end[name], saved[name]) for name in end)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_numbers_in_another_dtype(finished: Path, here: Path, dtype: Any):
    ab.export(finished, "w.safetensors", dtype=dtype)
    state = load_file("w.safetensors")
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert {v.dtype for v in state.values() if v.is_floating_point()} == {wanted}
    assert state["norm.num_batches_tracked"].dtype == torch.int64
    expected = trained(finished).last.weight.to(wanted)
    assert torch.equal(state["last.weight"], expected)


def test_half_weights_are_whole_in_their_checkpoint(tmp_path: Path):
    folder = tmp_path / "run"
    ab.train(small_task(), out=folder, precision="bf16-weights", progress=False)
    ab.export(folder, tmp_path / "end.pt")
    ab.export(folder, tmp_path / "saved.pt", step=6)
    end, saved = state_in(tmp_path / "end.pt"), state_in(tmp_path / "saved.pt")
    assert (end["last.weight"].dtype, saved["last.weight"].dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(end["last.weight"], saved["last.weight"].bfloat16())


def test_a_run_that_was_stopped_gives_its_newest_intact_checkpoint(tmp_path: Path):
    folder = interrupted(tmp_path / "run", at=4)
    assert ab.export(folder, tmp_path / "a.pt").step == 4
    flip(folder / "checkpoints" / "step-00000004", "weights/last.weight")
    assert ab.export(folder, tmp_path / "b.pt").step == 2
    with pytest.raises(ab.InputError, match=r"step-00000004 is not intact"):
        ab.export(folder, tmp_path / "c.pt", step=4)
    assert not (tmp_path / "c.pt").exists()


def test_weights_of_an_earlier_end_are_not_given_for_those_of_a_run_that_was_taken_up(
    tmp_path: Path,
):
    folder = tmp_path / "run"
    ab.train(small_task(), out=folder, checkpoint_every=2, progress=False)
    interrupted(folder, at=8, epochs=6, resume=True)
    assert ab.export(folder, tmp_path / "w.pt").step == 8


def test_neither_the_task_nor_its_data_are_needed(tmp_path: Path):
    file = tmp_path / "own_task.py"
    file.write_text(FILE_TASK)
    ab.train(resolve(str(file)), out=tmp_path / "run", progress=False)
    file.unlink()
    for step in (None, 6):
        ab.export(tmp_path / "run", tmp_path / f"{step}.pt", step=step)
        state = state_in(tmp_path / f"{step}.pt")
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        model.load_state_dict(state, strict=True)


def test_what_nothing_trained_comes_from_the_task(tmp_path: Path):
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        made[0].requires_grad_(False)
        return made

    task = small_task(model=model)
    ab.train(task, out=tmp_path / "run", checkpoint_every=2, progress=False)
    saved = tmp_path / "saved.pt"
    with pytest.raises(ab.InputError, match=r"does not tell where its task"):
        ab.export(tmp_path / "run", saved, step=2)
    ab.export(tmp_path / "run", saved, step=2, task=task)
    begun = task.build_model()
    state = state_in(saved)
    model().load_state_dict(state, strict=True)
    assert torch.equal(state["0.weight"], begun[0].weight)  # type: ignore[index]
    other = small_task(model=model, seed=1)
    with pytest.raises(ab.InputError, match=r"is of another base"):
        ab.export(tmp_path / "run", tmp_path / "other.pt", step=2, task=other)


def test_wrappers_leave_no_prefix(tmp_path: Path):
    class Compiled(nn.Module):
        """Names its module as torch.compile does."""

        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = Tied()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._orig_mod(x)

    ab.train(small_task(model=Compiled), out=tmp_path / "run", progress=False)
    for step in (None, 6):
        ab.export(tmp_path / "run", tmp_path / f"{step}.pt", step=step)
        Tied().load_state_dict(state_in(tmp_path / f"{step}.pt"), strict=True)


def test_nothing_in_the_run_is_touched(finished: Path, here: Path):
    before = tree(finished)
    ab.export(finished, "w.pt")
    ab.export(finished, "v.pt", step=2)
    assert tree(finished) == before


def test_what_is_there_is_replaced_only_if_that_is_asked_for(finished: Path, here: Path):
    Path("w.pt").write_text("mine")
    with pytest.raises(ab.InputError, match=r"w\.pt is there already: .*force=True"):
        ab.export(finished, "w.pt")
    assert Path("w.pt").read_text() == "mine"
    ab.export(finished, "w.pt", force=True)
    assert "last.weight" in state_in(Path("w.pt"))


def test_a_failure_leaves_nothing(finished: Path, here: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_args: Any, **_kwargs: Any) -> None:
        Path(".w.pt.partial").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ab.InputError, match=r"w\.pt .*No space left"):
        ab.export(finished, "w.pt")
    assert not tree(here)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"out": "w"}, r"w does not tell what is to be written: .*'torch'"),
        ({"out": "w.pt", "format": "safetensors"}, r"named as torch is"),
        ({"out": "w.safetensors", "format": "torch"}, r"named as safetensors is"),
        ({"format": "onnx"}, r"format is 'onnx'"),
        ({"dtype": "fp8"}, r"dtype is 'fp8': give 'bf16', 'fp16' or 'fp32'"),
        ({"step": 3}, r"no checkpoint of step 3 .* 2, 4, 6"),
        ({"step": -1}, r"step is -1"),
        ({"format": "huggingface"}, r"none of transformers"),
        ({"merge": True}, r"no adapters of peft"),
    ],
)
def test_what_cannot_be(finished: Path, here: Path, options: dict[str, Any], words: str):
    with pytest.raises(ab.InputError, match=words):
        ab.export(finished, **{"task": small_task(), **options})
    assert not tree(here)


def test_a_place_in_the_run_itself(finished: Path):
    before = tree(finished)
    with pytest.raises(ab.InputError, match=r"a part of the run itself"):
        ab.export(finished, finished / "model.safetensors", force=True)
    assert tree(finished) == before


def test_a_folder_that_holds_something_else_is_never_replaced(finished: Path, here: Path):
    (here / "mine").mkdir()
    (here / "mine" / "notes.txt").write_text("keep")
    for force in (False, True):
        with pytest.raises(ab.InputError, match=r"not empty, and holds no model"):
            ab.export(finished, "mine", format="huggingface", force=force)
    with pytest.raises(ab.InputError, match=r"is a folder, and torch is a file"):
        ab.export(finished, "mine", format="torch", force=True)
    assert (here / "mine" / "notes.txt").read_text() == "keep"


def test_a_folder_that_is_none_of_a_run(tmp_path: Path):
    with pytest.raises(ab.InputError, match=r"is not a run folder"):
        ab.export(tmp_path)


def test_a_run_without_any_weights(finished: Path, tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(finished / "events.jsonl", folder)
    with pytest.raises(ab.InputError, match=r"no checkpoint: there are no weights"):
        ab.export(folder, tmp_path / "w.pt")


def test_a_checkpoint_of_an_earlier_version_has_all_that_it_holds(finished: Path, tmp_path: Path):
    """It did not tell of names: tied weights come once, and what is not persistent comes too."""
    from anybatch.state.manifest import NAME, read_manifest

    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    place = folder / "checkpoints" / "step-00000002"
    manifest = read_manifest(place)
    facts = {k: v for k, v in manifest.facts.items() if k not in ("aliases", "transient")}
    older = manifest.model_copy(update={"facts": facts})
    (place / NAME).write_bytes(older.to_bytes())
    ab.export(folder, tmp_path / "w.pt", step=2)
    assert {"first.weight", "table"} <= state_in(tmp_path / "w.pt").keys()


def test_a_log_of_an_earlier_version_is_read(finished: Path, tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    lines = []
    for line in (folder / "events.jsonl").read_text().splitlines():
        record = json.loads(line)
        record.pop("source", None)
        record.pop("settings", None)
        lines.append(json.dumps(record))
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert read(folder / "events.jsonl")
    assert ab.export(folder, tmp_path / "w.pt").step == 6
