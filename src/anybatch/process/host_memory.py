"""Host memory that this process may use: the minimum of what the machine, its control group and the
limits of the process (`ulimit`) leave free.

Beyond the first two, the kernel kills processes; beyond the last, it refuses allocations.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import psutil

from anybatch.process.control_group import Group, group_here
from anybatch.units import format_bytes

if sys.platform == "linux":
    import resource


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of memory on the host.

    Attributes:
        total_bytes: maximum that this process can ever have.
        free_bytes: what it can allocate now.
        limit: description of the limit that determines `free_bytes`; empty: the machine itself.
    """

    total_bytes: int
    free_bytes: int
    limit: str = ""


def host_memory(group: Group | None = None, limits: bool = True) -> HostMemory:
    """The memory that this process may use now.

    Args:
        group: its control group; None: as reported by the kernel.
        limits: whether `RLIMIT_AS` and `RLIMIT_DATA` count.
    """
    memory = psutil.virtual_memory()
    found = [HostMemory(memory.total, memory.available)]
    group = group_here() if group is None else group
    if group.limit_bytes is not None and group.free_bytes is not None:
        described = f"the control group's limit of {format_bytes(group.limit_bytes)} ({group.file})"
        found.append(HostMemory(group.limit_bytes, group.free_bytes, described))
    if limits:
        found += _of_process()
    total = min(one.total_bytes for one in found)
    tightest = min(found, key=lambda one: one.free_bytes)
    return HostMemory(total, tightest.free_bytes, tightest.limit)


def _of_process() -> list[HostMemory]:
    if sys.platform != "linux":
        return []
    own = psutil.Process().memory_info()
    found: list[HostMemory] = []
    for limit, used, described in (
        (resource.RLIMIT_AS, own.vms, "RLIMIT_AS, ulimit -v"),
        (resource.RLIMIT_DATA, own.data, "RLIMIT_DATA, ulimit -d"),
    ):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            described = f"the limit of {format_bytes(soft)} on this process ({described})"
            found.append(HostMemory(soft, max(0, soft - used), described))
    return found
