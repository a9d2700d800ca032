"""Locks: a file that one writer at a time holds. The kernel releases the lock when its holder dies,
so files left by a killed process block no other; forked processes do not inherit the lock."""

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
"""How long to wait for another writer: one that is being stopped has exited by then."""

_PAUSE_SECONDS = 0.05

_held: set[str] = set()  # the system's lock is one per process; this makes it one per writer
_changes = threading.Lock()
_kept: dict[str, int] = {}  # locks of `kept_by_one`, with the thread that holds each


@final
class Release:
    """Releases a lock when it is called; a second call has no effect."""

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
    """Acquire the lock file at `path`, which is created if it does not exist, until the returned
    object is called. Returns None if another writer holds it for longer than `seconds` (None:
    `LOCK_SECONDS`). Raises `OSError` if it cannot be created."""
    real = os.path.join(os.path.realpath(path.parent), path.name)
    deadline = time.monotonic() + (LOCK_SECONDS if seconds is None else seconds)
    while (release := _try(real)) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(_PAUSE_SECONDS)
    return release


@contextlib.contextmanager
def kept_by_one(path: Path) -> Iterator[bool]:
    """Hold the lock file at `path` within the block, and delete it at the end. Yields whether the
    lock was acquired: False if another writer holds it for longer than `LOCK_SECONDS`. A nested
    block in the same thread yields True. Raises `OSError` if the file cannot be created."""
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
        if path in _held:  # opening and closing the file again would release the lock
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(descriptor)
                return None
            # A file system without locks: writers that share a folder are not excluded there.
        if not _is_at(descriptor, path):  # its holder has since deleted it
            os.close(descriptor)
            return None
        _held.add(path)
        return Release(path, descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
