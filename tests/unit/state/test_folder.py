"""Names in a folder of checkpoints: what is visible is complete, and what is left over goes."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from anybatch.errors import InputError
from anybatch.state.folder import Folder


def names(path):
    return sorted(one.name for one in path.iterdir())


def saved(folder, step, text):
    with folder.locked():
        partial = folder.begin(step)
        (partial / "x").write_text(text)
        return folder.publish(partial, step)


def test_only_what_was_published_is_seen_the_newest_first(tmp_path):
    folder = Folder(tmp_path / "a" / "b")
    assert folder.complete() == []
    for step in (5, 123_456_789_012, 7):
        saved(folder, step, "")
    with folder.locked():
        folder.begin(999)
    for name in ("step-5", "step-000000005", "step-00000009x", "xstep-00000009", "step-00000077"):
        (folder.path / name).write_text("")
    (folder.path / "step-00000078 ").mkdir()
    assert [step for step, _ in folder.complete()] == [123_456_789_012, 7, 5]
    assert folder.complete()[1] == (7, folder.path / "step-00000007")


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    folder = Folder(tmp_path)
    saved(folder, 5, "old")
    path = saved(folder, 5, "new")
    assert (path / "x").read_text() == "new"
    assert names(tmp_path) == [".lock", "step-00000005"]


def test_leftovers_are_cleared_and_a_replaced_one_comes_back_if_nothing_took_its_place(tmp_path):
    folder = Folder(tmp_path)
    saved(folder, 1, "one")
    for name in (
        ".step-00000002-0a1b2c3d.partial",
        ".step-00000001-0a1b2c3d.removed",
        ".step-00000001-0a1b2c3d.replaced",
        ".step-00000003-0a1b2c3d.replaced",
        ".mine",
        ".step-00000002.partial",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("left")
    with folder.locked():
        folder.clear()
    assert names(tmp_path) == [
        ".lock",
        ".mine",
        ".step-00000002.partial",
        "step-00000001",
        "step-00000003",
    ]
    assert (tmp_path / "step-00000001" / "x").read_text() == "one"
    assert (tmp_path / "step-00000003" / "x").read_text() == "left"


def test_one_writer_at_a_time_in_a_process(tmp_path):
    one, other = Folder(tmp_path), Folder(tmp_path / ".." / tmp_path.name)
    release = one.lock()
    with pytest.raises(InputError, match="another process is writing"):
        other.lock(seconds=0.0)
    release()
    release()
    with other.locked(seconds=0.0), pytest.raises(InputError):
        one.lock(seconds=0.0)


def hold(path, pipe):
    Folder(path).lock()
    pipe.send("locked")
    pipe.recv()


@pytest.mark.slow
def test_one_writer_at_a_time_among_processes_until_it_dies(tmp_path):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path, theirs))
    process.start()
    try:
        assert ours.recv() == "locked"
        with pytest.raises(InputError, match="give each run a folder of its own"):
            Folder(tmp_path).lock(seconds=0.0)
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()
    with Folder(tmp_path).locked(seconds=0.0):
        pass


def test_a_lock_is_not_inherited_by_a_fork(tmp_path):
    """Workers of a data loader may outlive their trainer for a moment."""
    folder = Folder(tmp_path)
    release = folder.lock()
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"1")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        release()
        with folder.locked(seconds=0.0):
            pass
    finally:
        os.write(done[1], b"1")
        os.waitpid(child, 0)
        for end in (*ready, *done):
            os.close(end)


def test_removal_hides_first(tmp_path, monkeypatch):
    folder = Folder(tmp_path)
    path = saved(folder, 4, "")
    seen = []
    monkeypatch.setattr("shutil.rmtree", lambda target, **_: seen.append(target.name))
    with folder.locked():
        folder.remove(path, 4)
    assert folder.complete() == []
    assert [name[:15] + name[23:] for name in seen] == [".step-00000004-.removed"]
