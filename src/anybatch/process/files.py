"""Files and folders that are there whole or not at all, files whose records are, and where the user's
cache is."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import final

from anybatch.errors import InputError


def write_whole(path: str | os.PathLike[str], text: str, what: str, remedy: str = "") -> Path:
    """Write `text` to `path`, whole or not at all, and return the path.

    Raises `InputError`, which calls it `what` and ends with the `remedy`, if it cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        raise InputError(f"{what} cannot be written to {target}: it is a folder; name a file.")
    partial = target.with_name(f".{target.name}.partial")
    try:
        # Names of files that are not UTF-8 are in texts as surrogates.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        why = f"{error.strerror}; {remedy}" if remedy else error.strerror
        raise InputError(f"{what} cannot be written to {target}: {why}.") from None
    return target


@final
class Records:
    """A file to which records are appended, each whole or not at all. A record is handed to the
    operating system at once: what was appended survives a kill of the process.

    Raises `OSError` if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        # Unbuffered: a record that failed is not tried again, in part, when the file is closed.
        self._file = path.open("ab", buffering=0)

    def append(self, record: bytes) -> None:
        """Append `record`. Raises `OSError` if it cannot be; those before stay as they are."""
        rest = memoryview(record)
        begin = self._file.seek(0, os.SEEK_END)  # not where one that failed left the position
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            # What is no regular file cannot be cut; the failure that is told is the one to write.
            with contextlib.suppress(OSError):
                self._file.truncate(begin)
            raise

    def close(self) -> None:
        """Close the file. Closing twice does no harm."""
        self._file.close()


def cache_folder() -> Path:
    """The folder of this package in the user's cache folder: `$XDG_CACHE_HOME/anybatch`, or where the
    system keeps caches."""
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
    """A new folder to write into, which becomes `path` when the block has ended well. A folder that is
    there stays until then, and is replaced if it is empty or `replaces`.

    Raises `InputError`, which calls it `what` and ends with the `remedy`, if it cannot be written.
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
