"""Locks: a file that one writer at a time holds. The kernel gives it back when its holder dies, so what
a killed process leaves is in nobody's way; and no process that was forked holds it on."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import final

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

LOCK_SECONDS = 5.0
"""How long another writer is waited for: one that is being stopped is gone by then."""

_PAUSE_SECONDS = 0.05

_held: set[str] = set()  # the system's lock is one per process; this makes it one per writer
_changes = threading.Lock()
_kept: dict[str, int] = {}  # by `kept_by_one`: in which thread


@final
class Release:
    """Gives a lock back when it is called; a second call does nothing."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path: str = path
        self._descriptor: int | None = descriptor

    def __call__(self) -> None:
        with _changes:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
                _held.discard(self._path)


def take(path: Path, seconds: float | None = None) -> Release | None:
    """Hold the file at `path`, which is made if it is not there, until what is returned is called. None
    if another holds it for longer than `seconds` (None: `LOCK_SECONDS`). Raises `OSError` if it cannot
    be made."""
    real = os.path.join(os.path.realpath(path.parent), path.name)
    deadline = time.monotonic() + (LOCK_SECONDS if seconds is None else seconds)
    while (release := _try(real)) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(_PAUSE_SECONDS)
    return release


@contextlib.contextmanager
def kept_by_one(path: Path) -> Iterator[bool]:
    """Within the block this process holds the file at `path`, which is deleted at its end. Yields
    whether it does: not if another one holds it for longer than `LOCK_SECONDS`. A block within such a
    block of the same thread has it, too. Raises `OSError` if the file cannot be made."""
    real = os.path.join(os.path.realpath(path.parent), path.name)
    if _kept.get(real) == threading.get_ident():
        yield True
        return
    release = take(path)
    if release is None:
        yield False
        return
    _kept[real] = threading.get_ident()
    try:
        yield True
    finally:
        del _kept[real]
        with contextlib.suppress(OSError):
            os.unlink(real)
        release()


def _try(path: str) -> Release | None:
    with _changes:
        if path in _held:  # to open and close the file again would give the lock back
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(descriptor)
                return None
            # A file system without locks: writers that share a folder are not told apart there.
        if not _is_at(descriptor, path):  # its holder has deleted it meanwhile
            os.close(descriptor)
            return None
        _held.add(path)
        return Release(path, descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
