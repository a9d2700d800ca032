"""Checkpoints broken on purpose: torn, flipped, missing, a full disk, killed at any moment.

What is found afterwards is exactly what was saved, or the error says what is wrong.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from tests.alone import alone
from tests.heap import fill_heap

import anybatch.parallel as parallel
from anybatch.errors import InputError, PeerLost
from anybatch.parallel import SingleDevice
from anybatch.process.process_memory import status
from anybatch.state import Checkpoints, Content, Failed, Saved, storage
from anybatch.state.manifest import Manifest, read_manifest

pytestmark = pytest.mark.faults

MIB = 1 << 20
SECONDS = 120.0
SIZES = {"a": (40, 7), "b": (1000,), "c": ()}


def value(name, step):
    generator = torch.Generator().manual_seed(1000 * step + ord(name))
    return torch.randn(SIZES[name], generator=generator)


def content(step):
    return Content({name: value(name, step) for name in SIZES}, {"step": step})


def newest_step(folder):
    """The step of the newest checkpoint; its values are those of the step, bit by bit."""
    checkpoints = Checkpoints(folder, SingleDevice())
    found = checkpoints.newest()
    if found is None:
        return None
    tensors = {name: torch.zeros(size) for name, size in SIZES.items()}
    checkpoints.load(found, tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, value(name, found.step)), name
    assert found.facts == {"step": found.step}
    return found.step


def hidden(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith(".step"))


def save_as_rank(rank, size, folder):
    checkpoints = Checkpoints(Path(folder), parallel.Replicate((1.0,) * size, torch.device("cpu")))
    for step in (1, 2):
        checkpoints.save(content(step), step)
    checkpoints.wait()


@pytest.fixture(scope="module")
def of_two_ranks(crew, tmp_path_factory):
    """Steps 1 and 2, written by two ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    crew(2, save_as_rank, str(folder))
    assert newest_step(folder) == 2
    return folder


FILES = ["manifest.json", "rank-0.data", "rank-1.data"]


@pytest.fixture
def broken(of_two_ranks, tmp_path):
    """A copy, and the folder of the newer one in it."""
    shutil.copytree(of_two_ranks, tmp_path / "c", dirs_exist_ok=True)
    return tmp_path / "c", tmp_path / "c" / "step-00000002"


def is_passed_over(folder, words):
    checkpoints = Checkpoints(folder, SingleDevice())
    found = checkpoints.newest()
    assert found.step == 1
    (sentence,) = found.passed_over
    assert sentence.startswith(f"the checkpoint {folder / 'step-00000002'} is not intact: ")
    assert words in sentence
    assert newest_step(folder) == 1


@pytest.mark.parametrize("name", FILES)
@given(where=st.floats(0, 1, exclude_max=True))
def test_torn_at_any_byte(broken, name, where):
    folder, newer = broken
    path = newer / name
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[: int(where * len(whole))])
        is_passed_over(folder, name)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("name", FILES)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit(broken, name, where, bit):
    folder, newer = broken
    path = newer / name
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[int(where * len(whole))] ^= 1 << bit
    try:
        path.write_bytes(flipped)
        is_passed_over(folder, name)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["missing", "empty", "longer", "a folder", "a link", "swapped"])
def test_a_file_that_is_not_what_it_was(broken, tmp_path, name, how):
    folder, newer = broken
    path = newer / name
    whole = path.read_bytes()
    path.unlink()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "longer":
        path.write_bytes(whole + b"\n")
    elif how == "a folder":
        path.mkdir()
    elif how == "a link":
        (tmp_path / "elsewhere").write_bytes(whole)
        path.symlink_to(tmp_path / "elsewhere")
    elif how == "swapped":
        shutil.copy(folder / "step-00000001" / name, path)
    words = "its manifest is of step 1" if (name, how) == (FILES[0], "swapped") else name
    is_passed_over(folder, words)


def test_a_manifest_that_was_edited_and_sealed_anew_cannot_lead_elsewhere(broken):
    folder, newer = broken
    manifest = read_manifest(newer)
    first, second = manifest.tensors["a"], manifest.tensors["b"]
    for tensors in (
        {**manifest.tensors, "a": first.model_copy(update={"shape": [80, 7]})},
        {**manifest.tensors, "a": second, "b": first},
    ):
        text = manifest.model_copy(update={"tensors": tensors}).to_bytes()
        (newer / "manifest.json").write_bytes(text)
        if tensors["a"] is not second:
            is_passed_over(folder, "'a' is not a tensor that the files hold")
        else:  # it holds in itself: only what it says of the tensors is not what the model has
            checkpoints = Checkpoints(folder, SingleDevice())
            with pytest.raises(InputError, match="'a' has the shape"):
                checkpoints.load(checkpoints.newest(), {"a": torch.zeros(SIZES["a"])})
    assert Manifest.from_bytes(text).step == 2


def test_when_none_is_intact_all_are_named(broken):
    folder, newer = broken
    (newer / "rank-0.data").unlink()
    older = folder / "step-00000001" / "manifest.json"
    older.write_bytes(b"{}")
    with pytest.raises(InputError) as told:
        Checkpoints(folder, SingleDevice()).newest()
    sentence = str(told.value)
    assert f"none of the 2 checkpoints in {folder} is intact" in sentence
    assert "step-00000002 is not intact: rank-0.data cannot be read" in sentence
    assert "step-00000001 is not intact: manifest.json is damaged" in sentence
    assert "name another folder to start anew" in sentence


def test_damage_after_it_was_found_is_an_error_of_load(broken):
    folder, newer = broken
    checkpoints = Checkpoints(folder, SingleDevice())
    found = checkpoints.newest()
    for number in (0, 1):
        path = newer / f"rank-{number}.data"
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(
        InputError, match=r"step-00000002 cannot be loaded: rank-\d.data is damaged"
    ):
        checkpoints.load(found, {name: torch.zeros(size) for name, size in SIZES.items()})


# ----------------------------------------------------------------------------------- where to write


def failure(checkpoints, words, stage):
    checkpoints.save(content(2), 2, stage=stage)
    checkpoints.wait()
    (failed,) = checkpoints.finished()
    assert isinstance(failed, Failed), failed
    assert words in failed.reason
    assert failed.reason.startswith("the checkpoint of step 2 could not be written to ")


STAGES = pytest.mark.parametrize("stage", [True, False], ids=["staged", "direct"])


@STAGES
def test_a_file_in_place_of_the_folder(tmp_path, stage):
    (tmp_path / "c").write_text("mine")
    checkpoints = Checkpoints(tmp_path / "c", SingleDevice())
    failure(checkpoints, "File exists", stage)
    failure(Checkpoints(tmp_path / "c" / "d", SingleDevice()), "Not a directory", stage)
    with pytest.raises(InputError, match="Not a directory"):
        checkpoints.newest()
    assert (tmp_path / "c").read_text() == "mine"
    (tmp_path / "c").unlink()
    checkpoints.save(content(3), 3, stage=stage)
    checkpoints.close()
    assert newest_step(tmp_path / "c") == 3


@STAGES
def test_the_folder_goes_away_meanwhile(tmp_path, monkeypatch, stage):
    checkpoints = Checkpoints(tmp_path / "c", SingleDevice())
    write = storage.write_part

    def gone(*args, **kwargs):
        shutil.rmtree(tmp_path / "c")
        write(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(storage, "write_part", gone)
        failure(checkpoints, "No such file or directory", stage)
    checkpoints.save(content(3), 3, stage=stage)
    checkpoints.close()
    assert newest_step(tmp_path / "c") == 3


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root may mount a small disk")
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@STAGES
def test_a_full_disk(small_disk, stage):
    checkpoints = Checkpoints(small_disk / "c", SingleDevice())
    checkpoints.save(content(1), 1, stage=stage)
    checkpoints.wait()
    (saved,) = checkpoints.finished()
    assert isinstance(saved, Saved)
    ballast = small_disk / "ballast"
    room = os.statvfs(small_disk)
    ballast.write_bytes(bytes(max(0, room.f_bavail - 1) * room.f_frsize))
    failure(checkpoints, "No space left on device", stage)
    assert hidden(small_disk / "c") == []
    assert newest_step(small_disk / "c") == 1
    ballast.unlink()
    checkpoints.save(content(3), 3, stage=stage)
    checkpoints.close()
    assert newest_step(small_disk / "c") == 3


def test_a_disk_that_may_not_be_written_to(small_disk):
    checkpoints = Checkpoints(small_disk / "c", SingleDevice())
    checkpoints.save(content(1), 1, stage=False)
    checkpoints.finished()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    failure(checkpoints, "Read-only file system", True)
    assert newest_step(small_disk / "c") == 1


def in_child(work):
    """Exit status of a fork of this process that runs `work`; negative: the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            work()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@STAGES
def test_a_limit_on_the_size_of_files(tmp_path, stage):
    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        checkpoints = Checkpoints(tmp_path, SingleDevice())
        checkpoints.save(content(1), 1, stage=False)
        assert isinstance(checkpoints.finished()[0], Saved)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        failure(checkpoints, "File too large; the limit on the size of files", stage)
        assert hidden(tmp_path) == []
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        checkpoints.save(content(3), 3, stage=stage)
        checkpoints.close()

    assert in_child(work) == 0
    assert newest_step(tmp_path) == 3


def leave_only(spare):
    """This process gets `spare` bytes more, and what its heap holds free from earlier times is taken:
    by what is returned."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + (MIB >> 1), hard))
    hoard = fill_heap(64 * MIB, MIB)
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + spare, hard))
    return hoard


@pytest.mark.nightly
@alone
def test_24_mib_are_enough_to_save_and_to_load():
    """A state of 64 MiB; half of it cannot be written as it lies, not being contiguous."""
    state = {"x": torch.randn(8 << 20), "y": torch.randn(2048, 4096).t()}
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    for tensor in target.values():
        tensor.zero_()  # its pages are there
    with TemporaryDirectory() as folder:
        Checkpoints(Path(folder, "warm"), SingleDevice()).save(content(1), 1, stage=False)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        hoard = leave_only(24 * MIB)
        with pytest.raises(RuntimeError):
            state["x"].clone()
        checkpoints = Checkpoints(Path(folder, "c"), SingleDevice())
        for step, stage in ((1, True), (2, False)):
            checkpoints.save(Content(state), step, stage=stage)
            checkpoints.wait()
            (saved,) = checkpoints.finished()
            assert isinstance(saved, Saved), saved
        found = checkpoints.newest()
        checkpoints.load(found, target)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        assert all(torch.equal(target[name], state[name]) for name in state)
        assert isinstance(hoard, list)  # until here


# ------------------------------------------------------------------------------------------- killed

CALLS = ("open", "write", "fsync", "fdatasync", "mkdir", "rename", "replace", "unlink", "rmdir")


def dies_at(number, work):
    """`work`, in a process that ends without a word before its call `number` to the file system."""

    def run():
        left = [number]

        def counted(call):
            def counting(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
                return call(*args, **kwargs)

            return counting

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        work()

    return in_child(run) == 9


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step"])
def test_killed_at_any_call_to_the_file_system(tmp_path, again):
    """With one checkpoint there and one kept: the old one until the new one is there, never neither."""
    template, folder = tmp_path / "template", tmp_path / "c"
    Checkpoints(template, SingleDevice(), keep=1).save(content(4), 4, stage=False)
    step = 4 if again else 5

    def work():
        checkpoints = Checkpoints(folder, SingleDevice(), keep=1)
        checkpoints.save(content(step), step)
        checkpoints.close()

    number, steps = 0, []
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)
        died = dies_at(number, work)
        steps.append(newest_step(folder))
        assert hidden(folder) == []
        if not died:
            break
        number += 1
    assert number > 15
    assert set(steps) == {4, step}
    assert steps == sorted(steps)


def save_forever(folder, keep):
    checkpoints = Checkpoints(folder, SingleDevice(), keep=keep)
    found = checkpoints.newest()
    step = found.step if found else 0
    while True:
        step += 1
        checkpoints.save(content(step), step, stage=step % 2 == 0)
        assert all(isinstance(one, Saved) for one in checkpoints.finished())


def await_step(folder, step):
    """Until a checkpoint of `step` or a later one is there."""
    end = time.monotonic() + SECONDS
    while not any(int(path.name[5:]) >= step for path in folder.glob("step-*")):
        assert time.monotonic() < end, "nothing is saved"
        time.sleep(0.005)


@pytest.mark.parametrize(
    "rounds",
    [pytest.param(10, id="short"), pytest.param(60, id="long", marks=pytest.mark.nightly)],
)
def test_killed_at_random_moments_again_and_again(tmp_path, rounds):
    """A run that is killed and resumed, over and over: it never goes back, and nothing piles up. Every
    other time it has saved something before, however slow the disk."""
    chance = random.Random(rounds)
    before = 0
    for number in range(rounds):
        child = os.fork()
        if child == 0:
            try:
                save_forever(tmp_path, 2)
            finally:
                os._exit(70)
        if number % 2 == 0:
            await_step(tmp_path, before + 1)
        time.sleep(chance.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        step = newest_step(tmp_path) or 0
        assert step >= before + (number % 2 == 0)
        before = step
        assert hidden(tmp_path) == []
    checkpoints = Checkpoints(tmp_path, SingleDevice(), keep=2)
    checkpoints.save(content(before + 1), before + 1, stage=False)
    names = [".lock", f"step-{before:08d}", f"step-{before + 1:08d}"]
    assert sorted(os.listdir(tmp_path)) == names


def test_what_another_process_is_writing_is_left_alone(tmp_path, monkeypatch):
    """A child holds a save open; neither looking nor saving here touches what it writes."""
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write = storage.write_part

            def waits(*args, **kwargs):
                os.write(ready[1], b"1")
                os.read(done[0], 1)
                write(*args, **kwargs)

            storage.write_part = waits
            checkpoints = Checkpoints(tmp_path, SingleDevice())
            checkpoints.save(content(1), 1)
            checkpoints.wait()
            os._exit(0 if isinstance(checkpoints.finished()[0], Saved) else 71)
        finally:
            os._exit(70)
    try:
        os.read(ready[0], 1)
        (partial,) = hidden(tmp_path)
        assert newest_step(tmp_path) is None
        assert hidden(tmp_path) == [partial]
        monkeypatch.setattr("anybatch.process.locks.LOCK_SECONDS", 0.0)
        other = Checkpoints(tmp_path, SingleDevice())
        other.save(content(2), 2)
        (failed,) = other.finished()
        assert "another process is writing a checkpoint" in failed.reason
    finally:
        os.write(done[1], b"1")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for end in (*ready, *done):
            os.close(end)
    assert newest_step(tmp_path) == 1


def save_until_killed(rank, size, folder, seconds):
    """Saves one checkpoint after the other; rank 1 is killed in between, so long after a few."""
    group = parallel.Replicate((1.0,) * size, torch.device("cpu"))
    checkpoints = Checkpoints(Path(folder), group, keep=2)
    found = checkpoints.newest()
    step = found.step if found else 0
    begun = step
    try:
        while True:
            step += 1
            checkpoints.save(content(step), step)
            if rank and step == begun + 3:
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    except PeerLost as error:
        checkpoints.close(str(error))
        assert not any(one.name.startswith("checkpoint") for one in threading.enumerate())
        ended = checkpoints.finished()
        return step, sum(isinstance(one, Saved) for one in ended)


@pytest.mark.nightly
def test_one_of_two_ranks_is_killed_at_a_random_moment(crew, tmp_path):
    chance = random.Random(0)
    before = 0
    for _ in range(4):
        (error, result), (lost, _) = crew.outcomes(
            2, save_until_killed, str(tmp_path), chance.uniform(0.0, 0.5)
        )
        assert error is None, result
        assert isinstance(lost, EOFError)
        last, num_saved = result
        # The one under way when rank 1 died may or may not be complete; all before it are.
        assert newest_step(tmp_path) in (last - 1, last - 2)
        assert newest_step(tmp_path) == before + num_saved
        before = newest_step(tmp_path)
        assert hidden(tmp_path) == []
