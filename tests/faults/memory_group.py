"""A real control group with little memory, for commands that run in it.

It needs root, and a kernel that lets groups be made (version 1 or 2 of the interface).
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_SECONDS = 30.0
_count = itertools.count()


@dataclass(frozen=True)
class MemoryGroup:
    """A group: the folder by which the kernel is asked about it."""

    folder: Path

    def command(self, *arguments: str, is_victim: bool = False) -> list[str]:
        """A command line that runs `arguments` in this group. `is_victim`: of its processes they are
        killed before others."""
        join = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        if is_victim:
            join = f"echo 1000 > /proc/self/oom_score_adj && {join}"
        return ["/bin/sh", "-c", join, str(self.folder), *arguments]

    @property
    def num_killed(self) -> int:
        """Processes that the kernel has killed for the memory of this group."""
        for name in ("memory.oom_control", "memory.events"):
            with suppress(FileNotFoundError):
                for line in (self.folder / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        raise RuntimeError(f"{self.folder} does not count what is killed")

    @property
    def most_bytes(self) -> int:
        """Most that was in use, files that are cached among it."""
        names = ("memory.max_usage_in_bytes", "memory.peak")
        found = next(path for name in names if (path := self.folder / name).exists())
        return int(found.read_text())


def why_not() -> str | None:
    """Why no such group can be made here, or None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root on Linux makes control groups"
    try:
        with memory_group(1 << 30) as group:
            group.num_killed  # noqa: B018
    except (OSError, RuntimeError) as error:
        return f"no control group can be made: {error}"
    return None


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group whose processes have `limit_bytes` together, and no swap. What still runs in it at the
    end is killed."""
    first = (_ROOT / "memory/memory.limit_in_bytes").exists()
    name = f"anybatch-{os.getpid()}-{next(_count)}"
    if not first:
        (_ROOT / "cgroup.subtree_control").write_text("+memory")
    folder = (_ROOT / "memory" if first else _ROOT) / name
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit_bytes))
        swap = folder / ("memory.swappiness" if first else "memory.swap.max")
        if swap.exists():
            swap.write_text("0")
        yield MemoryGroup(folder)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _SECONDS
    while True:
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            folder.rmdir()
            return
        except OSError:  # the kernel has not buried them yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
