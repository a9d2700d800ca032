"""Folders that are written to, each by writing to it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from anybatch.doctor.facts import Folder, Folders
from anybatch.files import cache_folder


def look() -> Folders:
    """See `Folders`."""
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError as error:
        there = Folder("", error.strerror or str(error))
    else:
        there = _looked_at(temporary)
    return Folders(_looked_at(cache_folder()), _looked_at(Path.cwd() / "runs"), there)


def _looked_at(folder: Path) -> Folder:
    """Nothing is left behind: where the folder is not there yet, that in which it would be made is
    looked at."""
    place = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"a")
            file.flush()
    except OSError as error:
        return Folder(str(folder), error.strerror or str(error), _free_bytes(place))
    return Folder(str(folder), "", _free_bytes(place))


def _free_bytes(place: Path) -> int | None:
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None
