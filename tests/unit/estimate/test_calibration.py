"""Calibration and history: measured once, kept whole, remade when broken or stale."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.estimate.test_seconds import even

from anybatch.estimate import calibration
from anybatch.estimate.calibration import (
    Correction,
    correction,
    forget_speeds,
    remember,
    speeds_of,
    where,
)
from anybatch.machine import Machine
from anybatch.plans import Choice, Plan, Prediction, TaskIdentity
from anybatch.process.files import cache_folder

CPU = Machine.here(device="cpu").device
TASK = TaskIdentity(name="one", global_batch=8, parameters=10, trainable_parameters=10)
OTHER = TaskIdentity(name="other", global_batch=8, parameters=99, trainable_parameters=99)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_memo", {})
    return tmp_path / "anybatch"


@pytest.fixture
def measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts measurements, which then take no time."""
    done: list[str] = []

    def measure(device: Any) -> Any:
        done.append(device.name)
        return even(call_seconds=1e-6 * len(done))

    monkeypatch.setattr(calibration, "measure_aside", measure)
    return done


def again(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Speeds as a new process finds them."""
    monkeypatch.setattr(calibration, "_memo", {})
    return speeds_of(CPU)


def plan(
    task: TaskIdentity = TASK,
    seconds: float = 1.0,
    **told: Any,
) -> Plan:
    return Plan(
        task=task,
        device="cpu",
        choice=Choice(micro_batch=8, evaluation_batch=8),
        prediction=Prediction(
            peak_bytes=1000, evaluation_peak_bytes=0, step_seconds=seconds, **told
        ),
    )


# ------------------------------------------------------------------------------------ the speeds


@pytest.mark.slow
def test_this_machine_is_measured_in_seconds_and_figures_are_sound():
    found = calibration.measure(CPU)
    assert found.measured
    assert not found.overlap
    assert 1e8 < found.matmul["float32"] < 1e13
    assert 1e7 < found.memory < 1e13
    assert 1e-7 < found.call_seconds < 1e-2


def test_threads_stay_as_they_were():
    threads = torch.get_num_threads()
    random = torch.get_rng_state()
    calibration.measure(CPU)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random)


def test_modes_of_the_caller_do_not_apply(monkeypatch):
    def seen(device: Any) -> Any:
        made = torch.ones(1)
        return made.device.type, made.is_inference(), torch.is_autocast_enabled("cpu")

    monkeypatch.setattr(calibration, "measure", seen)
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert calibration.measure_aside(CPU) == ("cpu", False, False)


def test_waiting_for_other_processes_is_not_measured(monkeypatch):
    now = [0.0, 0.0]  # of the clock on the wall, and what the thread computes

    def shared() -> None:
        now[0] += 0.008
        now[1] += 0.001

    monkeypatch.setattr(calibration.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(calibration.time, "thread_time", lambda: now[1])
    assert calibration._best_seconds(shared, torch.device("cpu")) == pytest.approx(0.001)


def test_a_device_is_measured_once(measured: list[str], folder: Path, monkeypatch):
    first = speeds_of(CPU)
    assert speeds_of(CPU) is first
    assert again(monkeypatch) == first
    assert len(measured) == 1
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_forgotten_speeds_are_measured_again(measured: list[str], monkeypatch):
    first = speeds_of(CPU)
    forget_speeds(CPU)
    assert speeds_of(CPU) != first
    assert len(measured) == 2


def test_another_number_of_threads_is_another_device(measured: list[str], monkeypatch):
    speeds_of(CPU)
    monkeypatch.setattr(calibration.torch, "get_num_threads", lambda: 77)
    speeds_of(CPU)
    assert len(measured) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff",
        b"{}",
        b"[1, 2]",
        b'{"matmul": {}, "memory": 1e9, "call_seconds": 1, "overlap": false}',
    ],
    ids=["empty", "binary", "object", "list", "no-rates"],
)
def test_a_broken_file_is_remade(content: bytes, measured: list[str], folder: Path, monkeypatch):
    speeds_of(CPU)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(content)
    again(monkeypatch)
    assert len(measured) == 2
    assert json.loads(file.read_text()).keys() == json.loads(whole).keys()


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_a_torn_file_is_remade(part: float, measured: list[str], folder: Path, monkeypatch):
    speeds_of(CPU)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[: int(part * file.stat().st_size)])
    again(monkeypatch)
    assert len(measured) == 2


def test_figures_that_cannot_be_are_remade(measured: list[str], folder: Path, monkeypatch):
    speeds_of(CPU)
    (file,) = folder.iterdir()
    content = json.loads(file.read_text())
    content["memory"] = -5.0
    file.write_text(json.dumps(content))
    again(monkeypatch)
    assert len(measured) == 2


def test_no_folder_to_write_to_stops_nothing(measured: list[str], tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert speeds_of(CPU)
    remember(plan(), 1.0)
    assert correction(CPU, TASK).num_runs == 0


def test_a_device_that_cannot_be_measured_has_nominal_speeds(folder: Path, monkeypatch):
    def fails(device: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(calibration, "measure_aside", fails)
    assert not speeds_of(CPU).measured
    assert not folder.exists()


def test_a_device_that_is_not_here_is_not_measured(measured: list[str], folder: Path):
    assert not speeds_of(Machine.describe("rtx-4090").device).measured
    assert not measured
    assert not folder.exists()


def test_where_little_memory_is_free_nothing_is_measured(measured: list[str]):
    little = replace(CPU, free_bytes=250 << 20)
    assert not speeds_of(little).measured
    assert not measured
    assert speeds_of(replace(CPU, free_bytes=300 << 20)).measured
    assert speeds_of(little).measured  # earlier


def test_the_cache_is_where_the_system_keeps_caches(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "anybatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().name == "anybatch" or cache_folder().parent.name == "anybatch"
    assert "CPU" in where(CPU).device


# ----------------------------------------------------------------------------------- the history


def test_nothing_is_corrected_before_the_first_run(folder: Path):
    assert correction(CPU, TASK) == Correction()


def test_time_is_corrected_by_the_median(folder: Path):
    for seconds in (1.1, 1.3, 1.2):
        remember(plan(), seconds)
    assert correction(CPU, TASK) == Correction(pytest.approx(1.2), 3)


def test_what_is_learned_is_not_learned_twice(folder: Path):
    remember(plan(), 1.2)
    learned = correction(CPU, TASK).seconds
    # The next prediction has the factor in it, and comes true.
    remember(plan(seconds=learned, seconds_corrected_by=learned), 1.2)
    assert correction(CPU, TASK).seconds == pytest.approx(1.2)


def test_the_same_task_teaches_more_than_others(folder: Path):
    remember(plan(OTHER), 2.0)
    assert correction(CPU, TASK).seconds == pytest.approx(2.0)
    remember(plan(), 1.1)
    assert correction(CPU, TASK) == Correction(pytest.approx(1.1), 1)


def test_runs_that_waited_for_other_processes_teach_nothing(folder: Path):
    remember(plan(), 0.3, idle_seconds=0.1)
    assert correction(CPU, TASK) == Correction()
    remember(plan(), 0.3, idle_seconds=0.001)
    assert correction(CPU, TASK).seconds == pytest.approx(0.3)


@pytest.mark.parametrize("ratio", [100.0, 0.01])
def test_a_run_out_of_all_proportion_has_the_machine_measured_again(
    ratio: float, measured: list[str], folder: Path, monkeypatch
):
    speeds_of(CPU)
    remember(plan(), 1.5)
    remember(plan(), ratio)
    assert correction(CPU, TASK) == Correction()  # what was learned belonged to the old figures
    again(monkeypatch)
    assert len(measured) == 2


@pytest.mark.parametrize("seconds", [None, 0.0, float("nan")])
def test_what_was_not_measured_teaches_nothing(seconds: float | None, folder: Path):
    remember(plan(), seconds)
    assert correction(CPU, TASK) == Correction()


def test_a_broken_history_is_begun_anew(folder: Path):
    remember(plan(), 1.5)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    assert correction(CPU, TASK).num_runs == 0
    remember(plan(), 1.5)
    assert correction(CPU, TASK).num_runs == 1


def test_a_plan_of_a_device_that_is_gone_teaches_nothing(folder: Path):
    remember(plan().model_copy(update={"device": "cuda:7"}), 1.5)
    assert not folder.exists()


def test_plans_without_prediction_or_of_several_ranks_teach_nothing(folder: Path):
    remember(plan().model_copy(update={"prediction": None}), 1.5)
    ranks = {"parallel": "replicate", "shares": (1.0,) * 4}
    remember(plan().model_copy(update=ranks), 1.5)
    assert not folder.exists()


def test_old_runs_are_forgotten(folder: Path):
    for _ in range(70):
        remember(plan(), 1.5)
    (file,) = folder.iterdir()
    assert len(json.loads(file.read_text())) == 60
    assert correction(CPU, TASK.model_copy(update={"global_batch": 16})).num_runs == 9
