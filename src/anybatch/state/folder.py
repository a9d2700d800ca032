"""The folder of a run's checkpoints: each checkpoint is either complete or not visible.

    FOLDER/step-00000120/                      complete: manifest.json, rank-0.data, rank-1.data, ...
    FOLDER/.step-00000140-9f31c0aa.partial/    being written, or left by a killed process
    FOLDER/.step-00000100-77ab01d2.removed/    being deleted
    FOLDER/.step-00000120-c5e0b812.replaced/   the older one of the same step, while it is replaced
    FOLDER/.lock                               held by the process that writes

The name of a checkpoint states its stage, and renaming is atomic, so a process that is killed at any
moment leaves nothing that could be mistaken for a checkpoint. Leftovers are deleted by the next process
that holds the lock; the kernel releases the lock when its holder dies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import final

from anybatch.errors import InputError
from anybatch.process import locks
from anybatch.process.locks import Release

_VISIBLE = re.compile(r"step-(\d{8,18})")
_HIDDEN = re.compile(r"\.step-(\d{8,18})-[0-9a-f]{8}\.(partial|removed|replaced)")

_NO_ROOM = "; make room there, or keep fewer checkpoints"
_NOT_ALLOWED = "; name a folder that you may write to"
_REMEDIES = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EFBIG: "; the limit on the size of files (ulimit -f) is too low for it",
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: _NOT_ALLOWED,
    errno.ENOTDIR: "; name a folder",
    errno.EEXIST: "; name a folder",
}


@final
class Folder:
    """The checkpoints in the folder at `path`, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path: Path = path

    def complete(self) -> list[tuple[int, Path]]:
        """Returns the steps and paths of the complete checkpoints, newest first. Raises `OSError`."""
        found = []
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        for name in names:
            match = _VISIBLE.fullmatch(name)
            if match and name == _name(int(match[1])) and (self.path / name).is_dir():
                found.append((int(match[1]), self.path / name))
        return sorted(found, reverse=True)

    @contextlib.contextmanager
    def locked(self, seconds: float | None = None) -> Iterator[None]:
        """Context manager in which only this process may write to the folder.

        Raises `InputError` if another process holds the lock for longer than `seconds` (None:
        `locks.LOCK_SECONDS`), `OSError` if the folder cannot be created.
        """
        release = self.lock(seconds)
        try:
            yield
        finally:
            release()

    def lock(self, seconds: float | None = None) -> Release:
        """Takes the lock, as `locked` does, until the returned function is called."""
        self.path.mkdir(parents=True, exist_ok=True)
        release = locks.take(self.path / ".lock", seconds)
        if release is None:
            raise InputError(
                f"another process is writing a checkpoint to {self.path}: give each run a folder"
                " of its own, or end the other one."
            )
        return release

    def begin(self, step: int) -> Path:
        """Creates a hidden folder to write the checkpoint of `step` in. The lock must be held."""
        path = self._hidden(step, "partial")
        path.mkdir()
        return path

    def publish(self, partial: Path, step: int) -> Path:
        """Turns the folder that `begin` returned into the checkpoint of `step`. The lock must be
        held."""
        target = self.path / _name(step)
        sync(partial)
        replaced = None
        if target.exists():
            replaced = self._hidden(step, "replaced")
            target.rename(replaced)
        partial.rename(target)
        sync(self.path)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        return target

    def remove(self, path: Path, step: int) -> None:
        """Deletes a checkpoint, after hiding it. The lock must be held."""
        hidden = self._hidden(step, "removed")
        with contextlib.suppress(OSError):
            path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def clear(self) -> None:
        """Deletes what killed writers left, and restores a replaced checkpoint if the new one is
        missing. The lock must be held."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):
                match = _HIDDEN.fullmatch(name)
                if match is None:
                    continue
                path, target = self.path / name, self.path / _name(int(match[1]))
                if match[2] == "replaced" and not target.exists():
                    path.rename(target)  # its writer was killed before the new one took its place
                else:
                    shutil.rmtree(path, ignore_errors=True)

    def leave(self) -> None:
        """Deletes the folder if it contains only the lock, and no process holds that."""
        with contextlib.suppress(OSError, InputError):
            if os.listdir(self.path) == [".lock"]:
                with self.locked(seconds=0.0):
                    (self.path / ".lock").unlink()
                    self.path.rmdir()

    def _hidden(self, step: int, state: str) -> Path:
        return self.path / f".{_name(step)}-{uuid.uuid4().hex[:8]}.{state}"


def describe_os_error(error: OSError) -> str:
    """Describes `error`, with the file and the remedy."""
    reason = error.strerror or str(error)
    place = f": {error.filename}" if error.filename else ""
    return f"{reason}{place}{_REMEDIES.get(error.errno or 0, '')}"


def sync(folder: Path) -> None:
    """Flushes the names in `folder` to the disk. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(step: int) -> str:
    return f"step-{step:08d}"
