"""What Linux's control groups allow this process: memory and cores, in both versions of their files.

A process is in a group below others, each of which has limits of its own; the tightest holds. In a
container the path that is told may be that of the host, and the root of the files is the group itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60
"""The first version writes the largest number of pages for none."""


@dataclass(frozen=True, slots=True)
class Group:
    """What holds for this process; None: no limit, or not known.

    Attributes:
        limit_bytes, used_bytes, file: of memory; what the group with the limit has in use, and the
            file with the limit.
        cores: as many as may be used at a time.
        oom_kills: processes killed for memory.
    """

    limit_bytes: int | None = None
    used_bytes: int = 0
    file: str = ""
    cores: float | None = None
    oom_kills: int | None = None


def group_here(root: str | Path = "/") -> Group:
    """That of this process. `root`: of the file system."""
    files, told = Path(root) / "sys/fs/cgroup", _text(Path(root) / "proc/self/cgroup")
    paths: dict[str, str] = {}
    for line in told.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    if "memory" in paths:
        memory = files / "memory", paths["memory"], "memory.limit_in_bytes", "memory.usage_in_bytes"
    else:
        memory = files, paths.get("", "/"), "memory.max", "memory.current"
    if "cpu" in paths:
        quotas = _first_quotas(files / "cpu", paths["cpu"])
    else:
        quotas = _second_quotas(files, paths.get("", "/"))
    limit, used, file = _memory(*memory)
    folder = next(_upwards(memory[0], memory[1]), files)
    return Group(limit, used, file, min(quotas, default=None), _kills(folder))


def _memory(base: Path, path: str, limit_name: str, used_name: str) -> tuple[int | None, int, str]:
    limits = [
        (limit, _number(folder / used_name) or 0, str(folder / limit_name))
        for folder in _upwards(base, path)
        if (limit := _number(folder / limit_name)) is not None and limit < _NO_LIMIT
    ]
    return min(limits, default=(None, 0, ""), key=lambda one: one[0] or 0)


def _first_quotas(base: Path, path: str) -> Iterator[float]:
    for folder in _upwards(base, path):
        quota = _number(folder / "cpu.cfs_quota_us")
        period = _number(folder / "cpu.cfs_period_us")
        if quota and period and quota > 0:
            yield quota / period


def _second_quotas(base: Path, path: str) -> Iterator[float]:
    for folder in _upwards(base, path):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield int(quota) / int(period)


def _kills(folder: Path) -> int | None:
    for name in ("memory.events", "memory.oom_control"):
        for line in _text(folder / name).splitlines():
            key, _, number = line.partition(" ")
            if key == "oom_kill" and number.isdecimal():
                return int(number)
    return None


def _upwards(base: Path, path: str) -> Iterator[Path]:
    """The folders of a group and of those above it, those that are there."""
    folder = base / path.strip("/")
    while True:
        if folder.is_dir():
            yield folder
        if folder == base:
            return
        folder = folder.parent


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.removeprefix("-").isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
