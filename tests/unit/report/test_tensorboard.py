"""TensorBoard's own reader finds in the log what the events say, once each, whatever came between."""

from __future__ import annotations

import math
import struct
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.unit.report.fake_run import (
    BEGIN,
    GIB,
    make_end,
    make_evaluation,
    make_events,
    make_out_of_memory,
    make_plan,
    make_start,
    make_step,
    write_run,
)
from tests.unit.report.reading_tensorboard import Points, found_in

from anybatch.errors import InputError
from anybatch.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    OutOfMemory,
    Replanned,
    Resumed,
    Said,
    StepDone,
)
from anybatch.report import TensorBoardLog, describe, tensorboard_folder, write_tensorboard
from anybatch.report.tensorboard import event_files

pytest.importorskip("tensorboard")


def single(value: float) -> float:
    """`value` as the log holds it, in float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def curve(events: Iterable[Event], name: str, kind: type[Event] = StepDone) -> Points:
    """What a curve of one field of the events has to be."""
    chosen = [event for event in events if isinstance(event, kind)]
    return [(event.step, single(getattr(event, name))) for event in chosen]


def resumed(step: int, **changes) -> Resumed:
    values = {"time": BEGIN, "step": step, "samples_seen": step * 4096, "folder": "checkpoints"}
    return Resumed(**{**values, **changes})


def log_of(folder: Path, events: Iterable[Event], **options) -> Path:
    with TensorBoardLog(folder, **options) as log:
        for event in events:
            log(event)
    return folder


def test_curves_are_what_the_events_say(tmp_path: Path):
    events = make_events()
    scalars = found_in(log_of(tmp_path, events)).scalars
    for tag, field in {
        "train/loss": "loss",
        "optimizer/learning_rate": "learning_rate",
        "optimizer/grad_norm": "grad_norm",
        "speed/step_seconds": "seconds",
        "speed/data_seconds": "data_seconds",
        "memory/peak_bytes": "memory_bytes",
        "batch/micro_batch": "micro_batch",
        "batch/samples": "samples",
        "batch/samples_seen": "samples_seen",
        "batch/epoch": "epoch",
    }.items():
        assert scalars[tag] == curve(events, field), tag
    assert scalars["held_out/loss"] == curve(events, "loss", Evaluated)
    assert scalars["speed/evaluation_seconds"] == curve(events, "seconds", Evaluated)
    steps = [event for event in events if isinstance(event, StepDone)]
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    for tag, chosen, name in (
        ("train/accuracy", steps, "accuracy"),
        ("held_out/accuracy", evaluations, "accuracy"),
        ("held_out/top-5 accuracy", evaluations, "top-5 accuracy"),
    ):
        assert scalars[tag] == [(e.step, single(e.metrics[name])) for e in chosen], tag
    speed = [(e.step, single(e.samples / e.seconds)) for e in steps]
    assert scalars["speed/samples_per_second"] == speed
    part = [(e.step, single(e.memory_bytes / (10 * GIB))) for e in steps]
    assert scalars["memory/part_of_budget"] == part


def test_curves_against_samples_stand_apart(tmp_path: Path):
    events = [make_start(), make_step(1), make_step(2), make_evaluation(2), make_end()]
    scalars = found_in(log_of(tmp_path, events) / "by_samples").scalars
    assert scalars["by_samples/train/loss"] == [
        (step * 4096, single(make_step(step).loss)) for step in (1, 2)
    ]
    assert scalars["by_samples/held_out/loss"] == [(8192, single(make_evaluation(2).loss))]
    assert set(scalars) == {
        "by_samples/train/loss",
        *(f"by_samples/held_out/{name}" for name in ("loss", "accuracy", "top-5 accuracy")),
    }


def test_what_there_is_no_figure_for_is_left_out(tmp_path: Path):
    step = make_step(1, grad_norm=None, seconds=0.0)
    free = make_plan(enforced=False).model_dump(mode="json")
    scalars = found_in(log_of(tmp_path, [make_start(plan=free), step])).scalars
    absent = {
        *("optimizer/grad_norm", "optimizer/loss_scale", "speed/samples_per_second"),
        *("memory/part_of_budget", "ranks/fastest_seconds", "ranks/slowest_seconds"),
    }
    assert not absent & set(scalars)


def test_what_only_some_runs_have_is_a_curve_too(tmp_path: Path):
    step = make_step(1, loss=math.nan, loss_scale=1024.0, rank_seconds=(0.5, 0.25, 1.0))
    saved = CheckpointSaved(
        time=BEGIN, step=1, folder="f", num_bytes=2048, seconds=0.5, held_seconds=0.25
    )
    scalars = found_in(log_of(tmp_path, [make_start(), step, saved])).scalars
    assert scalars["optimizer/loss_scale"] == [(1, 1024.0)]
    assert scalars["ranks/fastest_seconds"] == [(1, 0.25)]
    assert scalars["ranks/slowest_seconds"] == [(1, 1.0)]
    assert scalars["checkpoint/bytes"] == [(1, 2048.0)]
    assert scalars["checkpoint/held_seconds"] == [(1, 0.25)]
    ((_, loss),) = scalars["train/loss"]
    assert math.isnan(loss)


def test_what_happened_is_told_as_text(tmp_path: Path):
    _, *events = make_events()
    opening = make_start(notices=("Nothing is enforced.",))
    events = [opening, *events, Said(time=BEGIN, text="It learned.")]
    texts = found_in(log_of(tmp_path, events)).texts
    for kind in (OutOfMemory, Replanned):
        (event,) = [event for event in events if isinstance(event, kind)]
        assert texts[f"events/{kind.kind}"] == [(event.step, describe(event))]
    assert texts["events/said"] == [(200, "It learned.")]
    assert [step for step, _ in texts["plan"]] == [0, 57]
    assert "8 micro-batches of 512" in texts["plan"][0][1]
    assert "16 micro-batches of 256" in texts["plan"][1][1]
    ((step, run),) = texts["run"]
    assert step == 0
    assert "| host | node-7 |" in run
    assert "Nothing is enforced." in run


def test_a_pipe_in_a_command_does_not_break_the_table(tmp_path: Path):
    events = [make_start(command="anybatch train a.py -s 'x=1|2'"), make_step(1)]
    ((_, run),) = found_in(log_of(tmp_path, events)).texts["run"]
    assert "| command | anybatch train a.py -s 'x=1\\|2' |" in run


def test_runs_are_told_apart_by_their_settings(tmp_path: Path):
    settings = found_in(log_of(tmp_path, [make_start(), make_step(1)])).settings
    assert settings["global_batch"] == 4096
    assert settings["micro_batch"] == 512
    assert settings["precision"] == "bf16"
    assert settings["task"] == "cifar10-resnet"
    assert settings["budget_bytes"] == 10 * GIB


def test_a_budget_that_is_not_enforced_is_no_setting(tmp_path: Path):
    free = make_plan(enforced=False).model_dump(mode="json")
    settings = found_in(log_of(tmp_path, [make_start(plan=free), make_step(1)])).settings
    assert "budget_bytes" not in settings


def test_a_plan_of_another_version_is_told_as_it_is(tmp_path: Path):
    events = [make_start(plan={"version": 99}), make_step(1)]
    ((_, text),) = found_in(log_of(tmp_path, events)).texts["plan"]
    assert text == '{"version": 99}'


def test_a_record_is_on_disk_as_soon_as_the_event_is_told(tmp_path: Path):
    with TensorBoardLog(tmp_path) as log:
        log(make_start())
        for step in range(1, 4):
            log(make_step(step))
            assert len(found_in(tmp_path).scalars["train/loss"]) == step


# --------------------------------------------------------------------------------------- resuming


def before_the_kill() -> list[Event]:
    steps = [make_step(step, loss=100.0 + step) for step in range(1, 8)]
    return [make_start(), *steps[:4], make_evaluation(4), *steps[4:6], make_evaluation(6), steps[6]]


def after_it() -> list[Event]:
    steps = [make_step(step) for step in range(5, 9)]
    begun = make_start(time=BEGIN + 100)
    return [begun, resumed(4), *steps[:2], make_evaluation(6), *steps[2:], make_end(steps=8)]


def assert_nothing_is_doubled(folder: Path):
    found = found_in(folder)
    losses = [*((s, 100.0 + s) for s in range(1, 5)), *curve(after_it(), "loss")]
    assert found.scalars["train/loss"] == losses
    assert [step for step, _ in found.scalars["held_out/loss"]] == [4, 6]
    by_samples = found_in(folder / "by_samples").scalars
    assert by_samples["by_samples/train/loss"] == [(s * 4096, loss) for s, loss in losses]
    assert [s for s, _ in by_samples["by_samples/held_out/loss"]] == [4 * 4096, 6 * 4096]
    assert [step for step, _ in found.texts["plan"]] == [0, 4]
    assert found.settings["global_batch"] == 4096


def test_a_finished_log_is_the_same_from_the_recorded_events(tmp_path: Path):
    run = write_run(tmp_path / "run", [*before_the_kill(), *after_it()])
    write_tensorboard(run / "events.jsonl", tmp_path / "log")
    assert_nothing_is_doubled(tmp_path / "log")


@pytest.mark.parametrize("is_there", [True, False])
def test_the_log_of_a_resumed_run_has_what_came_before_and_nothing_twice(
    tmp_path: Path, is_there: bool
):
    run = write_run(tmp_path / "run", before_the_kill())
    if is_there:
        log_of(tmp_path / "log", before_the_kill())
        (file,) = event_files(tmp_path / "log")
        file.write_bytes(file.read_bytes()[:-7])  # as a kill leaves it
    log_of(tmp_path / "log", after_it(), resume=True, earlier=run / "events.jsonl")
    assert_nothing_is_doubled(tmp_path / "log")


def test_a_finished_run_that_is_evaluated_once_more_is_not_doubled(tmp_path: Path):
    run = write_run(tmp_path / "run", before_the_kill())
    again = [make_start(time=BEGIN + 9), resumed(6), make_evaluation(6), make_step(7), make_end()]
    log_of(tmp_path / "log", again, resume=True, earlier=run / "events.jsonl")
    steps = [step for step, _ in found_in(tmp_path / "log").scalars["held_out/loss"]]
    assert steps == [4, 6]


def test_a_new_run_replaces_the_log_and_nothing_else(tmp_path: Path):
    log_of(tmp_path, [make_start(), make_step(1), make_step(2)])
    (tmp_path / "notes.txt").write_text("mine")
    log_of(tmp_path, [make_start(), make_step(1)])
    assert found_in(tmp_path).scalars["train/loss"] == curve([make_step(1)], "loss")
    assert (tmp_path / "notes.txt").read_text() == "mine"


# ------------------------------------------------------------------------------------ what is wrong


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_told_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from tensorboard.compat.tensorflow_stub.io import gfile

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)  # of the thread that writes
    with TensorBoardLog(tmp_path) as log:
        log(make_start())
        log(make_step(1))
        monkeypatch.setattr(gfile.LocalFileSystem, "append", full)
        with pytest.warns(UserWarning, match=r"No space left.*Training goes on without it"):
            log(make_step(2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            log(make_step(3))
            log(make_out_of_memory(4))
    assert found_in(tmp_path).scalars["train/loss"] == curve([make_step(1)], "loss")
    assert shown == []


def test_a_recorded_run_whose_log_cannot_be_written_is_an_input_error(tmp_path: Path):
    run = write_run(tmp_path / "run", make_events(3))
    (tmp_path / "log").write_text("a file")
    with pytest.raises(InputError, match=r"cannot be written: File exists\. Make room there"):
        write_tensorboard(run / "events.jsonl", tmp_path / "log")


def test_the_folder_is_that_of_the_run_or_the_one_that_is_named(tmp_path: Path):
    assert tensorboard_folder(None, tmp_path) is None
    assert tensorboard_folder(False, tmp_path) is None
    assert tensorboard_folder(True, tmp_path) == tmp_path / "tensorboard"
    assert tensorboard_folder("", tmp_path) == tmp_path / "tensorboard"
    assert tensorboard_folder("there", None) == Path("there")


def test_a_folder_of_its_own_for_each_run(tmp_path: Path):
    log_of(tmp_path / "log", [make_start(), make_step(1)])
    with pytest.raises(InputError, match=r"log holds a log for TensorBoard already \(events\.out"):
        tensorboard_folder(tmp_path / "log", tmp_path / "run")
    assert tensorboard_folder(tmp_path / "log", tmp_path / "run", resume=True)
    log_of(tmp_path / "run" / "tensorboard", [make_start(), make_step(1)])
    assert tensorboard_folder(True, tmp_path / "run")  # replaced with the run


def test_without_a_folder_for_the_run_there_has_to_be_one_for_the_log():
    with pytest.raises(InputError, match="tensorboard is True and out is not given"):
        tensorboard_folder(True, None)


def test_what_is_no_folder_is_named():
    with pytest.raises(InputError, match="tensorboard is 3: give True, or a folder"):
        tensorboard_folder(3, None)
