"""Limits of Linux control groups (containers, batch jobs) on this process: memory and cores, as
reported by versions 1 and 2 of the interface.

Groups are nested, and each has separate limits: the limit that leaves the least free applies. In a
container, `/proc/self/cgroup` may contain a path of the host, while the root of the mounted files
is the group itself; folders that do not exist are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60
"""Version 1 represents the absence of a limit by the largest number of pages."""

_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_USED = ("memory.current", "memory.usage_in_bytes")
# Page cache and kernel caches, which are reclaimed before an allocation is refused. Version 1
# counts child groups only under separate names.
_RECLAIMABLE = (
    ("total_inactive_file", "total_active_file"),
    ("inactive_file", "active_file", "slab_reclaimable"),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Limits of this process; None: no limit, or unknown.

    Attributes:
        limit_bytes: memory limit of the group that has the least left.
        used_bytes: memory in use in that group, without what the kernel can reclaim.
        file: file that contains the limit.
        cores: number of cores that may be used at a time.
        oom_kills: number of processes killed for lack of memory.
    """

    limit_bytes: int | None = None
    used_bytes: int = 0
    file: str = ""
    cores: float | None = None
    oom_kills: int | None = None

    @property
    def free_bytes(self) -> int | None:
        """Memory that is left below the limit."""
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self.used_bytes)


def group_here(root: str | Path = "/") -> Group:
    """The limits of this process's group. `root`: root of the file system."""
    folders = list(_folders(Path(root), "memory"))
    limit, used, file = min(
        (found for folder in folders for found in _limits(folder)),
        default=(None, 0, ""),
        key=lambda found: found[0] - found[1],
    )
    kills = next(_kills(folders), None)
    return Group(limit, used, file, cores_of_group(root), kills)


def cores_of_group(root: str | Path = "/") -> float | None:
    """Number of cores that may be used at a time; None: no limit."""
    return min(
        (quota for folder in _folders(Path(root), "cpu") for quota in _quotas(folder)), default=None
    )


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The existing folders of the group with that controller, and of its parents."""
    base = root / "sys/fs/cgroup"
    paths: dict[str, tuple[Path, str]] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        folder = base / names if names and (base / names).is_dir() else base
        for name in names.split(","):
            own = base / name
            paths[name] = (own if name and own.is_dir() else folder), path
    # Version 2 has one tree for all controllers, in its own folder if version 1 is mounted too.
    second = base / "unified" if (base / "unified").is_dir() else base
    base, path = paths.get(controller) or (second, paths.get("", (second, "/"))[1])
    yield from _upwards(base, path)


def _upwards(base: Path, path: str) -> Iterator[Path]:
    folder = base if ".." in path.split("/") else base / path.strip("/")
    while True:
        if folder.is_dir():
            yield folder
        if folder == base:
            return
        folder = folder.parent


def _limits(folder: Path) -> Iterator[tuple[int, int, str]]:
    """(limit, memory in use, file) of each memory limit."""
    for name in _LIMITS:
        limit = _number(folder / name)
        if limit is not None and limit < _NO_LIMIT:
            yield limit, _used(folder), str(folder / name)


def _used(folder: Path) -> int:
    used = next((used for name in _USED if (used := _number(folder / name)) is not None), 0)
    counts = dict(_pairs(folder / "memory.stat"))
    keys = next((keys for keys in _RECLAIMABLE if keys[0] in counts), ())
    return max(0, used - sum(counts.get(key, 0) for key in keys))


def _quotas(folder: Path) -> Iterator[float]:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not quota:
        quota = _text(folder / "cpu.cfs_quota_us")
        period = _text(folder / "cpu.cfs_period_us")
    if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
        yield int(quota) / int(period)


def _kills(folders: list[Path]) -> Iterator[int]:
    for folder in folders[:1]:
        for name in ("memory.events", "memory.oom_control"):
            counts = dict(_pairs(folder / name))
            if "oom_kill" in counts:
                yield counts["oom_kill"]


def _pairs(file: Path) -> Iterator[tuple[str, int]]:
    for line in _text(file).splitlines():
        key, _, number = line.partition(" ")
        if number.isdecimal():
            yield key, int(number)


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
