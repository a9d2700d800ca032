"""Atomic writing of files and folders, and the location of the user's cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from anybatch.errors import InputError


def write_whole(path: str | os.PathLike[str], text: str, what: str, remedy: str = "") -> Path:
    """Write `text` to `path` atomically, and return the path.

    Raises `InputError` if it cannot be written. The message refers to it as `what` and ends with
    `remedy`.
    """
    target = Path(path)
    if target.is_dir():
        raise InputError(f"{what} cannot be written to {target}: it is a folder; name a file.")
    partial = target.with_name(f".{target.name}.partial")
    try:
        # File names that are not UTF-8 appear as surrogates in the text.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        why = f"{error.strerror}; {remedy}" if remedy else error.strerror
        raise InputError(f"{what} cannot be written to {target}: {why}.") from None
    return target


def cache_folder() -> Path:
    """The folder of this package in the user's cache folder: `$XDG_CACHE_HOME/anybatch`, or the
    system's default location."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "anybatch"
    if sys.platform == "win32":
        home = os.environ.get("LOCALAPPDATA")
        return (Path(home) if home else Path.home() / "AppData" / "Local") / "anybatch" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "anybatch"
    return Path.home() / ".cache" / "anybatch"


@contextlib.contextmanager
def whole_folder(
    path: str | os.PathLike[str], what: str, *, replaces: bool = False, remedy: str = ""
) -> Iterator[Path]:
    """Yield a new folder to write into, which becomes `path` when the block ends without an error.
    An existing folder remains until then, and is replaced if it is empty or if `replaces` is set.

    Raises `InputError` if it cannot be written. The message refers to it as `what` and ends with
    `remedy`.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    old = target.with_name(f".{target.name}.replaced")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        if replaces and target.is_dir():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        try:
            partial.rename(target)
        except OSError:
            if old.exists() and not target.exists():
                old.rename(target)
            raise
    except OSError as error:
        why = f"{error.strerror or error}; {remedy}" if remedy else error.strerror or error
        raise InputError(f"{what} cannot be written to {target}: {why}.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
