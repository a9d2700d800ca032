"""Cores and memory, and what limits them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import psutil

from anybatch.doctor.facts import Host, Limit
from anybatch.doctor.probes.control_group import group_here
from anybatch.threads import num_cores

_LIMITS = ("RLIMIT_DATA", "RLIMIT_AS", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE")

_MALLOCS = re.compile(r"lib(?:jemalloc|tcmalloc|mimalloc|snmalloc|hoard)[\w.+-]*")

_SHM = "/dev/shm"


def look() -> Host:
    """See `Host`."""
    memory, group = psutil.virtual_memory(), group_here()
    total, free = _shm()
    return Host(
        system=sys.platform,
        cores=os.cpu_count() or 1,
        own_cores=num_cores(),
        total_bytes=memory.total,
        available_bytes=memory.available,
        swap_bytes=psutil.swap_memory().total,
        quota_cores=group.cores,
        group_bytes=group.limit_bytes,
        group_used_bytes=group.used_bytes,
        group_file=group.file,
        oom_kills=group.oom_kills,
        overcommit=_overcommit(),
        huge_pages=_huge_pages(),
        limits=_limits(),
        shm_bytes=total,
        shm_free_bytes=free,
        mallocs=tuple(sorted(set(_MALLOCS.findall(_text("/proc/self/maps"))))),
        infiniband=_has_infiniband(),
    )


def _shm() -> tuple[int | None, int | None]:
    if not hasattr(os, "statvfs") or not os.access(_SHM, os.W_OK):
        return None, None
    found = os.statvfs(_SHM)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _limits() -> dict[str, Limit]:
    if sys.platform == "win32":
        return {}
    import resource

    def number(value: int) -> int | None:
        return None if value == resource.RLIM_INFINITY else value

    found = {
        name: resource.getrlimit(getattr(resource, name))
        for name in _LIMITS
        if hasattr(resource, name)
    }
    return {name: Limit(number(soft), number(hard)) for name, (soft, hard) in found.items()}


def _overcommit() -> int | None:
    text = _text("/proc/sys/vm/overcommit_memory").strip()
    return int(text) if text.isdecimal() else None


def _huge_pages() -> str:
    found = re.search(r"\[(\w+)\]", _text("/sys/kernel/mm/transparent_hugepage/enabled"))
    return found[1] if found else ""


def _has_infiniband() -> bool:
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
