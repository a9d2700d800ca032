"""Folders: whether they can be written to, and the space there is."""

from __future__ import annotations

from collections.abc import Iterator

from anybatch.doctor.facts import Facts, Folder
from anybatch.doctor.finding import Finding, Level
from anybatch.units import format_bytes

_LITTLE_BYTES = 2 << 30
_LITTLE_OF_CACHE_BYTES = 16 << 20


def judge(facts: Facts) -> Iterator[Finding]:
    """Findings on `Facts.folders`."""
    folders = facts.folders
    if folders is None:
        return
    yield _folder(
        "runs",
        folders.runs,
        _LITTLE_BYTES,
        meaning="runs are written there unless --out says otherwise",
        remedy="give --out, or train from another folder",
        unwritable="warning",
    )
    yield _folder(
        "cache",
        folders.cache,
        _LITTLE_OF_CACHE_BYTES,
        meaning="what was measured is not kept, so each plan measures anew, and no run corrects"
        " the next",
        remedy="set XDG_CACHE_HOME to a folder that can be written to",
        unwritable="warning",
    )
    yield _folder(
        "temporary files",
        folders.temporary,
        _LITTLE_OF_CACHE_BYTES,
        meaning="ranks are started with the help of files there",
        remedy="set TMPDIR to a folder that can be written to",
        unwritable="problem",
    )


def _folder(
    name: str, folder: Folder, least_bytes: int, *, meaning: str, remedy: str, unwritable: Level
) -> Finding:
    free = "" if folder.free_bytes is None else f", {format_bytes(folder.free_bytes)} free"
    value = f"{folder.path}{free}".removeprefix(", ") or "none"
    if folder.fault:
        meaning = f"it cannot be written to ({folder.fault}): {meaning}"
        return Finding(name, value, unwritable, "", meaning, remedy)
    if folder.free_bytes is not None and folder.free_bytes < least_bytes:
        return Finding(name, value, "warning", "", f"the disk is nearly full: {meaning}", remedy)
    return Finding(name, value)
