"""Calibration and history: measured once, kept whole, remade when broken or stale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.estimate.test_seconds import even

from anybatch.estimate import calibration, calibration_history, calibration_store
from anybatch.estimate.calibration_history import Correction, Excess, correction, remember
from anybatch.estimate.calibration_store import forget_speeds, speeds_of, where
from anybatch.files import cache_folder
from anybatch.machine import Machine
from anybatch.plans import Choice, Plan, Prediction, TaskIdentity
from anybatch.threads import Stopwatch

CPU = Machine.here(device="cpu").device
TASK = TaskIdentity(name="one", global_batch=8, parameters=10, trainable_parameters=10)
OTHER = TaskIdentity(name="other", global_batch=8, parameters=99, trainable_parameters=99)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration_store, "_memo", {})
    return tmp_path / "anybatch"


@pytest.fixture
def measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts measurements, which then take no time."""
    done: list[str] = []

    def measure(device: Any, threads: int) -> Any:
        done.append(device.name)
        return even(call_seconds=1e-6 * len(done))

    monkeypatch.setattr(calibration_store, "measure_apart", measure)
    return done


def again(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Speeds as a new process finds them."""
    monkeypatch.setattr(calibration_store, "_memo", {})
    return speeds_of(CPU)


def plan(
    task: TaskIdentity = TASK,
    seconds: float = 1.0,
    enforced: bool = True,
    peak_bytes: int = 1000,
    **told: Any,
) -> Plan:
    return Plan(
        task=task,
        device="cpu",
        enforced=enforced,
        choice=Choice(micro_batch=8, evaluation_batch=8),
        prediction=Prediction(
            peak_bytes=peak_bytes, evaluation_peak_bytes=0, step_seconds=seconds, **told
        ),
    )


# ------------------------------------------------------------------------------------ the speeds


@pytest.mark.slow
def test_this_machine_is_measured_in_seconds_and_figures_are_sound():
    found = calibration.measure(CPU)
    assert calibration_store._sound(found)
    assert found.measured
    assert not found.overlap
    big = 2.0 * 512**3
    assert 1e8 < calibration.product_rate(found.matmul["float32"], big, 512) < 1e13


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
    monkeypatch.setattr(calibration_store.torch, "get_num_threads", lambda: 77)
    speeds_of(CPU)
    assert len(measured) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff",
        b"{}",
        b"[1, 2]",
        b'{"matmul": {}, "convolution": {}, "memory": {}, "call_seconds": 1, "overlap": false}',
    ],
    ids=["empty", "binary", "object", "list", "no-curves"],
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
    content["memory"]["plain"][0][1] = -5.0
    file.write_text(json.dumps(content))
    again(monkeypatch)
    assert len(measured) == 2


def test_no_folder_to_write_to_stops_nothing(measured: list[str], tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert speeds_of(CPU)
    remember(plan(), 1000, 1.0)
    assert correction(CPU, TASK).num_runs == 0


def test_a_device_that_cannot_be_measured_has_nominal_speeds(folder: Path, monkeypatch):
    def fails(device: Any, threads: int) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(calibration_store, "measure_apart", fails)
    assert not speeds_of(CPU).measured
    assert not folder.exists()


def test_a_device_that_is_not_here_is_not_measured(measured: list[str], folder: Path):
    assert not speeds_of(Machine.describe("rtx-4090").device).measured
    assert not measured
    assert not folder.exists()


def test_the_cache_is_where_the_system_keeps_caches(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "anybatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().name == "anybatch" or cache_folder().parent.name == "anybatch"
    assert "CPU" in where(CPU).device


# ------------------------------------------------------------------------ a machine that is busy


def measured_as(monkeypatch: pytest.MonkeyPatch, *disturbed: bool) -> list[bool]:
    """Measurements, of which others disturbed these, one after the other; what is left of them is
    returned."""
    left = list(disturbed)

    def measure(device: Any, threads: int) -> Any:
        return even(call_seconds=1e-6, disturbed=left.pop(0))

    monkeypatch.setattr(calibration_store, "measure_apart", measure)
    return left


class Shared:
    """A machine on which others have the cores for most of the time: an operation that several threads
    share takes a time slice, and one thread's own time is what it computes."""

    def __init__(self) -> None:
        self.now = self.own = 0.0

    def run(self) -> None:
        self.now += 0.008
        self.own += 0.001

    def clock(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.own


def test_a_measurement_that_others_disturb_is_given_up():
    shared = Shared()
    bench = calibration._Bench(torch.device("cpu"), shared.clock)
    bench.watch = Stopwatch(shared.clock, shared.thread_time)
    with pytest.raises(calibration._Disturbed):
        bench._curve([(1.0, shared.run)] * 100)
    assert shared.now < 0.5


def test_one_thread_is_timed_by_what_it_computes():
    shared = Shared()
    bench = calibration._Bench(torch.device("cpu"), shared.thread_time)
    assert bench._seconds(shared.run) == pytest.approx(0.001)


def test_a_device_that_others_use_is_measured_by_one_thread(monkeypatch):
    monkeypatch.setattr(calibration, "MOST_IDLE", -1.0)  # whatever happens, others disturb it
    threads = torch.get_num_threads()
    found = calibration.measure(CPU)
    assert found.disturbed
    assert calibration_store._sound(found)
    assert torch.get_num_threads() == threads


def test_threads_share_what_is_large_enough_for_them():
    one = even()
    eight = calibration._by_all(one, 8)
    assert eight.disturbed
    thin, narrow, cubes = one.matmul["float32"]
    assert eight.matmul["float32"] == (thin, *(calibration._times(c, 8) for c in (narrow, cubes)))
    gained = [
        rate / before
        for (_, rate), (_, before) in zip(eight.memory["plain"], one.memory["plain"], strict=True)
    ]
    assert gained == sorted(gained)
    assert all(1.0 <= factor <= 4.0 for factor in gained)
    assert eight.call_seconds == one.call_seconds


def test_a_quiet_measurement_is_made_once(folder: Path, monkeypatch):
    left = measured_as(monkeypatch, False, False)
    assert not speeds_of(CPU).disturbed
    assert left == [False]


@pytest.mark.parametrize("disturbed", [True, False])
def test_only_what_was_quiet_is_believed_for_long(disturbed: bool, folder: Path, monkeypatch):
    left = measured_as(monkeypatch, disturbed, disturbed)
    first = speeds_of(CPU)
    count = len(left)
    assert again(monkeypatch) == first
    assert len(left) == count  # a moment later it still is
    now = calibration_store.time.time()
    monkeypatch.setattr(calibration_store.time, "time", lambda: now + 3600)
    again(monkeypatch)
    assert (len(left) < count) == disturbed


def test_runs_predicted_from_a_disturbed_measurement_teach_no_time(folder: Path, monkeypatch):
    measured_as(monkeypatch, True)
    speeds_of(CPU)
    remember(plan(), 1200, 0.3)
    found = correction(CPU, TASK)
    assert found.seconds == 1.0
    assert found.bytes_of(1000) == 1200


def test_runs_that_other_processes_disturbed_teach_no_time(folder: Path):
    remember(plan(), 1200, 0.3, idle_seconds=0.1)
    found = correction(CPU, TASK)
    assert found.seconds == 1.0
    assert found.bytes_of(1000) == 1200
    remember(plan(), 1200, 0.3, idle_seconds=0.001)
    assert correction(CPU, TASK).seconds != 1.0


def test_one_run_out_of_all_proportion_has_the_machine_measured_again(
    measured: list[str], monkeypatch
):
    speeds_of(CPU)
    remember(plan(), 1000, 50.0)
    again(monkeypatch)
    assert len(measured) == 2
    remember(plan(), 1000, 50.0)  # it was not the measurement, then
    again(monkeypatch)
    assert len(measured) == 2


# ----------------------------------------------------------------------------------- the history


def test_nothing_is_corrected_before_the_first_run(folder: Path):
    assert correction(CPU, TASK) == Correction()


def test_time_is_corrected_by_the_median_and_bytes_by_the_most(folder: Path):
    for bytes_now, seconds in ((900, 1.1), (1200, 1.3), (1100, 1.2)):
        remember(plan(), bytes_now, seconds)
    found = correction(CPU, TASK)
    assert found.seconds == pytest.approx(1.2)
    assert found.bytes_of(1000) == 1200
    assert found.num_runs == 3


def test_bytes_are_never_corrected_downwards(folder: Path):
    remember(plan(), 500, 0.5)
    found = correction(CPU, TASK)
    assert found.bytes_of(1000) == 1000
    assert found.seconds == pytest.approx(0.5)


def test_what_is_learned_is_not_learned_twice(folder: Path):
    remember(plan(), 1000, 1.2)
    learned = correction(CPU, TASK).seconds
    # The next prediction has the factor in it, and comes true.
    remember(plan(seconds=learned, seconds_corrected_by=learned), 1000, 1.2)
    assert correction(CPU, TASK).seconds == pytest.approx(1.2)


def test_bytes_that_are_learned_are_not_learned_twice(folder: Path):
    remember(plan(), 1200, None)
    remember(plan(peak_bytes=1200, learned_bytes=200), 1200, None)
    assert correction(CPU, TASK).bytes_of(1000) == 1200


def test_the_same_task_teaches_more_than_others(folder: Path):
    remember(plan(OTHER), 3000, 2.0)
    assert correction(CPU, TASK).seconds == pytest.approx(2.0)
    assert not correction(CPU, TASK).excesses  # bytes of another task say nothing
    remember(plan(), 1000, 1.1)
    assert correction(CPU, TASK).seconds == pytest.approx(1.1)
    assert correction(CPU, TASK).num_runs == 1


def test_without_a_budget_bytes_teach_nothing(folder: Path):
    remember(plan(enforced=False), 1600, 1.0)
    assert not correction(CPU, TASK).excesses


@pytest.mark.parametrize(
    ("predicted", "corrected"),
    [
        (1_000, 1_200),  # as it was
        (100_000, 100_200),  # a large plan gets the bytes, not the share
        (100, 120),  # a small one the share
        (0, 0),
    ],
)
def test_a_plan_of_another_size_gets_the_bytes_or_the_share_whichever_is_less(
    folder: Path, predicted: int, corrected: int
):
    remember(plan(), 1200, None)
    assert correction(CPU, TASK).bytes_of(predicted) == corrected


def test_the_run_that_teaches_most_decides_at_every_size(folder: Path):
    remember(plan(), 1200, None)
    remember(plan(peak_bytes=100_000), 101_000, None)
    found = correction(CPU, TASK)
    assert found.bytes_of(1_000) == 1_200
    assert found.bytes_of(100_000) == 101_000


def test_no_correction_is_larger_than_the_prediction(folder: Path):
    remember(plan(), 50_000, None)
    assert correction(CPU, TASK).bytes_of(1000) == 2000


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-6, 1)), max_size=4),
    st.integers(0, 10**10),
)
def test_a_prediction_that_is_in_the_room_fits_once_it_is_corrected(
    excesses: list[tuple[int, float]], budget: int
):
    found = Correction(excesses=tuple(Excess(*one) for one in excesses))
    room = found.room_in(budget)
    assert room < 0 or found.bytes_of(room) <= budget
    assert found.bytes_of(room + 2) > budget - 1


def test_what_is_far_off_everywhere_is_not_believed(folder: Path):
    remember(plan(), None, 100.0)
    assert correction(CPU, TASK) == Correction()


@pytest.mark.parametrize("ratio", [2.5, 0.4])
def test_a_stale_calibration_is_measured_again(
    ratio: float, measured: list[str], folder: Path, monkeypatch
):
    speeds_of(CPU)
    for _ in range(calibration_history.STALE_RUNS):
        remember(plan(), 1000, ratio)
    assert correction(CPU, TASK).num_runs <= 1  # what was learned belonged to the old figures
    again(monkeypatch)
    assert len(measured) == 2

    # Measuring did not help: then the correction does, and nothing is measured any more.
    for _ in range(calibration_history.STALE_RUNS + 1):
        remember(plan(), 1000, ratio)
    again(monkeypatch)
    assert len(measured) == 2
    assert correction(CPU, TASK).seconds == pytest.approx(ratio)


def test_runs_that_are_off_in_both_directions_are_noise(measured: list[str], monkeypatch):
    speeds_of(CPU)
    for ratio in (2.5, 0.4, 2.5, 0.4):
        remember(plan(), 1000, ratio)
    again(monkeypatch)
    assert len(measured) == 1


def test_a_broken_history_is_begun_anew(folder: Path):
    remember(plan(), 1000, 1.5)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    assert correction(CPU, TASK).num_runs == 0
    remember(plan(), 1000, 1.5)
    assert correction(CPU, TASK).num_runs == 1


def test_a_plan_of_a_device_that_is_gone_teaches_nothing(folder: Path):
    remember(plan().model_copy(update={"device": "cuda:7"}), 1000, 1.5)
    assert not folder.exists()


def test_plans_without_prediction_or_of_several_ranks_teach_nothing(folder: Path):
    remember(plan().model_copy(update={"prediction": None}), 1000, 1.5)
    ranks = {"parallel": "replicate", "shares": (1.0,) * 4}
    remember(plan().model_copy(update=ranks), 1000, 1.5)
    assert not folder.exists()


def test_old_runs_are_forgotten(folder: Path):
    for _ in range(70):
        remember(plan(), 1000, 1.5)
    (file,) = folder.iterdir()
    assert len(json.loads(file.read_text())["runs"]) == 60
    assert correction(CPU, replace_name(TASK)).num_runs == 9


def replace_name(task: TaskIdentity) -> TaskIdentity:
    return task.model_copy(update={"global_batch": 16})
