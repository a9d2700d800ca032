"""The folder of a run's checkpoints: each is there whole or not to be seen.

    FOLDER/step-00000120/                      complete: manifest.json, rank-0.data, rank-1.data, ...
    FOLDER/.step-00000140-9f31c0aa.partial/    being written, or left by one who was killed
    FOLDER/.step-00000100-77ab01d2.removed/    being deleted
    FOLDER/.step-00000120-c5e0b812.replaced/   the older one of the same step, while they change places
    FOLDER/.lock                               held by who writes

A name tells how far something has come, and names change in one stroke, so whoever is killed at any
moment leaves nothing that could be taken for a checkpoint. What was left is cleared by the next one who
holds the lock; the kernel gives it back when its holder dies.
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
    """Names in the folder at `path`, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path: Path = path

    def complete(self) -> list[tuple[int, Path]]:
        """Steps and places of the complete checkpoints, the newest first. Raises `OSError`."""
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
        """While this process alone may write here.

        Raises `InputError` if another one does for longer than `seconds` (None: `locks.LOCK_SECONDS`),
        `OSError` if the folder cannot be made.
        """
        release = self.lock(seconds)
        try:
            yield
        finally:
            release()

    def lock(self, seconds: float | None = None) -> Release:
        """As `locked`, until what is returned is called."""
        self.path.mkdir(parents=True, exist_ok=True)
        release = locks.take(self.path / ".lock", seconds)
        if release is None:
            raise InputError(
                f"another process is writing a checkpoint to {self.path}: give each run a folder"
                " of its own, or end the other one."
            )
        return release

    def begin(self, step: int) -> Path:
        """A new hidden folder to write the checkpoint of `step` in. The lock must be held."""
        path = self._hidden(step, "partial")
        path.mkdir()
        return path

    def publish(self, partial: Path, step: int) -> Path:
        """Make what `begin` returned the checkpoint of `step`. The lock must be held."""
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
        """Delete a checkpoint, hidden first. The lock must be held."""
        hidden = self._hidden(step, "removed")
        with contextlib.suppress(OSError):
            path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def clear(self) -> None:
        """Delete what killed writers left. The lock must be held."""
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
        """Delete the folder if nothing is in it but the lock, which nobody holds."""
        with contextlib.suppress(OSError, InputError):
            if os.listdir(self.path) == [".lock"]:
                with self.locked(seconds=0.0):
                    (self.path / ".lock").unlink()
                    self.path.rmdir()

    def _hidden(self, step: int, state: str) -> Path:
        return self.path / f".{_name(step)}-{uuid.uuid4().hex[:8]}.{state}"


def told_by_system(error: OSError) -> str:
    """`error` in words, with the file and the remedy."""
    reason = error.strerror or str(error)
    place = f": {error.filename}" if error.filename else ""
    return f"{reason}{place}{_REMEDIES.get(error.errno or 0, '')}"


def sync(folder: Path) -> None:
    """Have the names in `folder` on the disk. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(step: int) -> str:
    return f"step-{step:08d}"
