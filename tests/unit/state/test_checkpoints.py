"""Checkpoints of one rank: what is saved is found again, and what fails is told and leaves nothing."""

from __future__ import annotations

import _thread
import math
import threading
from pathlib import Path

import pytest
import torch

from anybatch.errors import InputError
from anybatch.parallel import SingleDevice
from anybatch.state import Checkpoints, Content, Failed, Saved, storage


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path / "runs" / "a", SingleDevice())
    yield made
    made.close()


def content(number=0, **facts):
    generator = torch.Generator().manual_seed(number)
    shared = torch.randn(7, 5, generator=generator)
    return Content(
        {
            "weight": torch.nn.Parameter(shared),
            "tied": shared,
            "half": torch.randn(300, generator=generator).bfloat16(),
            "fp8": torch.randn(9, 3, generator=generator).to(torch.float8_e4m3fn).t(),
            "step": torch.tensor(number),
            "mask": torch.arange(11) % 3 == 0,
            "nothing": torch.empty(0, 4),
            "a name/with.../../odd \N{SNOWMAN} parts": torch.ones(2),
        },
        facts,
    )


def empty_like(tensors):
    return {name: torch.zeros_like(value).detach() for name, value in tensors.items()}


def same(tensors, others):
    return tensors.keys() == others.keys() and all(
        value.detach().contiguous().view(-1).view(torch.uint8).tolist()
        == others[name].detach().contiguous().view(-1).view(torch.uint8).tolist()
        for name, value in tensors.items()
    )


def names(path):
    return sorted(one.name for one in Path(path).iterdir())


@pytest.mark.parametrize("stage", [True, False], ids=["staged", "direct"])
def test_what_was_saved_is_found_and_loaded(checkpoints, tmp_path, stage):
    facts = {"seen": 2**100, "rates": [0.1, None, True], "nested": {"nan": math.nan, "text": "ä\n"}}
    saved = content(3, **facts)
    checkpoints.save(saved, 120, score=0.25, stage=stage)
    checkpoints.wait()
    (ended,) = checkpoints.finished()
    assert checkpoints.finished() == []
    assert isinstance(ended, Saved)
    folder = tmp_path / "runs" / "a" / "step-00000120"
    assert (ended.step, ended.folder) == (120, folder)
    assert ended.num_bytes == sum(v.numel() * v.element_size() for v in saved.tensors.values())
    assert 0 <= ended.held_seconds <= ended.seconds or not stage
    assert names(folder) == ["manifest.json", "rank-0.data"]
    assert names(folder.parent) == [".lock", "step-00000120"]

    other = Checkpoints(folder.parent, SingleDevice())
    found = other.newest()
    assert (found.step, found.folder, found.passed_over) == (120, folder, ())
    assert found.manifest.score == 0.25
    nan = found.facts["nested"].pop("nan")
    assert math.isnan(nan)
    del facts["nested"]["nan"]
    assert found.facts == facts
    assert found.tensors["half"] == ((300,), torch.bfloat16)
    assert found.tensors["step"] == ((), torch.int64)
    tensors = empty_like(saved.tensors)
    places = {name: value.data_ptr() for name, value in tensors.items()}
    other.load(found, tensors)
    assert same(tensors, saved.tensors)
    assert places == {name: value.data_ptr() for name, value in tensors.items()}


def test_some_of_it_may_be_loaded_and_into_parameters(checkpoints):
    saved = content(1)
    checkpoints.save(saved, 0, stage=False)
    weight = torch.nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))
    checkpoints.load(checkpoints.newest(), {"weight": weight})
    assert torch.equal(weight, saved.tensors["weight"].double())
    assert weight.is_leaf
    assert weight.requires_grad


def test_a_save_is_of_the_moment_when_it_was_called(checkpoints, monkeypatch):
    """The bytes are written later; training changes the tensors meanwhile."""
    may_write = threading.Event()
    write = storage.write_part

    def waits(*args, **kwargs):
        may_write.wait()
        write(*args, **kwargs)

    monkeypatch.setattr(storage, "write_part", waits)
    value = torch.arange(1000.0)
    checkpoints.save(Content({"x": value}), 1)
    value.fill_(-1)
    assert checkpoints.finished() == []
    may_write.set()
    found = checkpoints.newest()
    got = torch.empty(1000)
    checkpoints.load(found, {"x": got})
    assert torch.equal(got, torch.arange(1000.0))


def test_nothing_there_is_none(checkpoints, tmp_path):
    assert checkpoints.newest() is None
    (tmp_path / "runs" / "a").mkdir(parents=True)
    assert checkpoints.newest() is None
    assert names(tmp_path / "runs" / "a") == [".lock"]


def test_an_empty_content_is_one_too(checkpoints):
    checkpoints.save(Content({}, {"only": "facts"}), 0)
    found = checkpoints.newest()
    assert found.facts == {"only": "facts"}
    checkpoints.load(found, {})


def test_the_last_ones_and_the_best_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, SingleDevice(), keep=2)
    kept = []
    for step, score in enumerate([3.0, 1.0, None, math.nan, 2.0, 1.0, 5.0, 4.0]):
        checkpoints.save(Content({"x": torch.ones(1)}), step, score=score)
        checkpoints.wait()
        kept.append([int(name[-2:]) for name in names(tmp_path) if name.startswith("step")])
    checkpoints.close()
    assert kept == [
        [0],
        [0, 1],
        [1, 2],
        [1, 2, 3],
        [1, 3, 4],
        [4, 5],
        [5, 6],
        [5, 6, 7],
    ]
    assert all(isinstance(one, Saved) for one in checkpoints.finished())


def test_another_run_goes_on_keeping_what_the_first_one_kept(tmp_path):
    for step, score in enumerate([1.0, 2.0, 3.0, 4.0]):
        checkpoints = Checkpoints(tmp_path, SingleDevice(), keep=1)
        checkpoints.save(Content({"x": torch.ones(1)}), step, score=score)
        checkpoints.close()
    assert names(tmp_path) == [".lock", "step-00000000", "step-00000003"]


def test_nothing_goes_before_a_newer_one_is_complete(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, SingleDevice(), keep=1)
    checkpoints.save(Content({"x": torch.ones(1)}), 1, stage=False)
    with monkeypatch.context() as patched:
        patched.setattr(storage.Writer, "complete", lambda *_: 1 / 0)
        checkpoints.save(Content({"x": torch.ones(1)}), 2, stage=False)
    assert names(tmp_path) == [".lock", "step-00000001"]
    saved, failed = checkpoints.finished()
    assert isinstance(saved, Saved)
    assert "ZeroDivisionError" in failed.reason


def test_a_broken_one_is_passed_over_and_does_not_count(tmp_path):
    checkpoints = Checkpoints(tmp_path, SingleDevice(), keep=2)
    for step in (1, 2, 3):
        checkpoints.save(Content({"x": torch.ones(9) * step}), step)
    checkpoints.wait()
    path = tmp_path / "step-00000003" / "rank-0.data"
    path.write_bytes(path.read_bytes()[:-1])
    found = checkpoints.newest()
    assert found.step == 2
    assert len(found.passed_over) == 1
    assert "step-00000003 is not intact: rank-0.data has 35 bytes where 36" in found.passed_over[0]
    checkpoints.save(Content({"x": torch.ones(9)}), 4)
    checkpoints.wait()
    # Of 3 nothing is expected any more: 2 and 4 are the last two.
    assert names(tmp_path) == [".lock", "step-00000002", "step-00000004"]
    checkpoints.save(Content({"x": torch.ones(9)}), 3)
    assert checkpoints.newest().step == 4
    checkpoints.close()


BAD = {
    "sparse": (Content({"x": torch.eye(3).to_sparse()}), "'x' has the layout torch.sparse_coo"),
    "meta": (Content({"x": torch.empty(3, device="meta")}), "'x' has no values"),
}


@pytest.mark.parametrize("stage", [True, False], ids=["staged", "direct"])
@pytest.mark.parametrize("name", sorted(BAD))
def test_what_cannot_be_saved_is_told_and_nothing_is_left(checkpoints, tmp_path, name, stage):
    bad, words = BAD[name]
    checkpoints.save(bad, 7, stage=stage)
    (failed,) = checkpoints.finished()
    assert isinstance(failed, Failed)
    assert failed.step == 7
    assert words in failed.reason
    assert not (tmp_path / "runs").exists()
    checkpoints.save(content(), 8, stage=stage)
    assert checkpoints.newest().step == 8


def test_without_room_for_a_copy_it_is_written_at_once(checkpoints, monkeypatch):
    def refused(tensor):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: not enough memory"
        )

    monkeypatch.setattr(storage, "staged", refused)
    value = torch.arange(50.0)
    checkpoints.save(Content({"x": value}), 1)
    value.fill_(-1)
    got = torch.empty(50)
    checkpoints.load(checkpoints.newest(), {"x": got})
    assert torch.equal(got, torch.arange(50.0))


def test_without_room_for_a_thread_it_is_written_at_once(checkpoints, monkeypatch):
    def refused(function, args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refused)
    checkpoints.save(content(), 1)
    (saved,) = checkpoints.finished()
    assert isinstance(saved, Saved)


def test_stopped_by_hand_is_no_failed_save(checkpoints, tmp_path, monkeypatch):
    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(storage, "write_part", stopped)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(content(), 1, stage=False)
    assert names(tmp_path / "runs" / "a") == [".lock"]
    assert checkpoints.finished() == []
    checkpoints.save(content(), 1)
    assert checkpoints.newest().step == 1


def test_a_part_that_does_not_come_is_given_up_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "write_part", lambda *args: None)
    monkeypatch.setattr(storage, "STALL_SECONDS", 0.1)
    checkpoints = Checkpoints(tmp_path / "checkpoints", SingleDevice())
    checkpoints.save(content(), 1)
    checkpoints.close()
    (failed,) = checkpoints.finished()
    assert "nothing came from rank 0" in failed.reason
    assert not (tmp_path / "checkpoints").exists()
    assert not any(thread.name.startswith("checkpoint") for thread in threading.enumerate())


@pytest.mark.parametrize("is_written", [False, True])
def test_a_rank_that_is_lost_is_not_waited_for(is_written, tmp_path, monkeypatch):
    write_part, may_write = storage.write_part, threading.Event()

    def write(*part):
        may_write.wait()
        if is_written:
            write_part(*part)

    monkeypatch.setattr(storage, "write_part", write)
    checkpoints = Checkpoints(tmp_path / "checkpoints", SingleDevice())
    checkpoints.save(content(), 1)
    threading.Timer(0.1, may_write.set).start()
    checkpoints.close("rank 1 is gone.")
    (ended,) = checkpoints.finished()
    assert isinstance(ended, Saved) if is_written else ended.reason.endswith(": rank 1 is gone.")


MISFITS = {
    "another name": ({"weigth": torch.zeros(7, 5)}, "'weigth' is not in it"),
    "another shape": (
        {"weight": torch.zeros(5, 7)},
        "'weight' has the shape (7, 5) there and (5, 7) here",
    ),
    "another kind": (
        {"weight": torch.zeros(7, 5, dtype=torch.int64)},
        "'weight' is float32 there and int64 here",
    ),
    "a whole number into a fraction": ({"step": torch.zeros(())}, "'step' is int64 there"),
    "without values": ({"weight": torch.zeros(7, 5, device="meta")}, "'weight' has no values"),
}


@pytest.mark.parametrize("name", sorted(MISFITS))
def test_what_does_not_fit_is_named_before_anything_is_touched(checkpoints, name):
    checkpoints.save(content(), 1)
    found = checkpoints.newest()
    tensors, words = MISFITS[name]
    half = torch.zeros(300, dtype=torch.bfloat16)
    with pytest.raises(InputError) as told:
        checkpoints.load(found, {"half": half, **tensors})
    assert words in str(told.value)
    assert "step-00000001 cannot be loaded: it is of something else" in str(told.value)
    assert not half.any()
