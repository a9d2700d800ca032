"""Cores and memory and what limits them, and the folders that are written to."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from anybatch.doctor.finding import Facts, Finding, Level, note, warning
from anybatch.units import format_bytes

_FEW_FILES, _MANY_FILES = 1024, 65536
_SMALL_SHM_BYTES, _FULL_SHM_BYTES = 256 << 20, 64 << 20
_LITTLE_MEMORY = 0.1
"""Of the memory of the machine or of its control group, available."""
_LEFT_BYTES, _ASKED_BYTES = 32 << 20, 256 << 20

_MALLOCS = re.compile(r"lib(?:jemalloc|tcmalloc|mimalloc|snmalloc|hoard)[\w.+-]*")

# ---------------------------------------------------------------------------------- cores and memory


def look() -> Facts:
    """Cores and memory of the machine, and what of them this process may use. None: not known, or no
    limit."""
    import psutil

    from anybatch.process.control_group import group_here
    from anybatch.process.threads import num_cores

    group = group_here()
    memory, overcommit = psutil.virtual_memory(), _text("/proc/sys/vm/overcommit_memory")
    infiniband = Path("/sys/class/infiniband")
    shm = None
    if hasattr(os, "statvfs") and os.access("/dev/shm", os.W_OK):
        shm = os.statvfs("/dev/shm")
    return {
        "system": sys.platform,
        "cores": os.cpu_count() or 1,
        "own_cores": num_cores(),
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "swap_bytes": psutil.swap_memory().total,
        "quota_cores": group.cores,
        "group_bytes": group.limit_bytes,
        "group_used_bytes": group.used_bytes,
        "group_file": group.file,
        "oom_kills": group.oom_kills,
        "overcommit": int(overcommit) if overcommit.isdecimal() else None,
        "limits": _rlimits(),
        "shm_bytes": shm and shm.f_blocks * shm.f_frsize,
        "shm_free_bytes": shm and shm.f_bavail * shm.f_frsize,
        "mallocs": sorted(set(_MALLOCS.findall(_text("/proc/self/maps")))),
        "infiniband": infiniband.is_dir() and any(infiniband.iterdir()),
    }


def _rlimits() -> dict[str, tuple[int | None, int | None]]:
    """The soft and the hard limit by name; None: none."""
    if sys.platform == "win32":
        return {}
    import resource

    names = ("RLIMIT_DATA", "RLIMIT_AS", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE")
    found = {it: resource.getrlimit(getattr(resource, it)) for it in names if hasattr(resource, it)}
    none = resource.RLIM_INFINITY
    return {
        it: (None if soft == none else soft, None if hard == none else hard)
        for it, (soft, hard) in found.items()
    }


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def look_limit() -> Facts:
    """Whether the kernel refuses memory beyond a limit on data, by which budgets on a CPU are enforced:
    set one, ask for more, and set it back."""
    if sys.platform != "linux":
        return {"fault": f"no limit on the data of a process is enforced by {sys.platform}"}
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    counted = re.search(r"^VmData:\s+(\d+)", _text("/proc/self/status"), re.MULTILINE)
    if counted is None:
        raise OSError("/proc/self/status has no VmData")
    limit = (int(counted[1]) << 10) + _LEFT_BYTES
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
        bytearray(_ASKED_BYTES)
    except MemoryError:
        return {"fault": ""}
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    had, left = _ASKED_BYTES >> 20, _LEFT_BYTES >> 20
    return {"fault": f"{had} MiB were had under a limit that left {left} MiB"}


def check(facts: Facts) -> Iterator[Finding]:
    host, limit = facts["host"], facts["enforcement"]
    if host is not None:
        yield _cores(host, facts["torch"])
        yield _memory(host)
        yield from _group(host)
        yield from _limits(host)
        if host["system"] == "linux":
            yield _shm(host)
        yield from _kernel(host)
    if limit is not None and limit["fault"]:
        meaning = f"{limit['fault']}: --memory is planned with, and nothing holds a run to it"
        yield warning("budget on the CPU", "cannot be enforced", meaning)
    elif limit is not None:
        yield Finding("budget on the CPU", "enforced: memory beyond a limit was refused")


def _cores(host: Facts, torch: Facts | None) -> Finding:
    value = f"{host['own_cores']} of {host['cores']} for this process"
    threads = torch["threads"] if torch is not None and not torch["fault"] else 0
    quota = host["quota_cores"]
    if quota is not None and quota < host["own_cores"]:
        value += f", {quota:g} at a time"
        if threads > math.ceil(quota):
            meaning = (
                f"torch's {threads} threads wait for each other when the group has used up its time"
            )
            remedy = f"set OMP_NUM_THREADS={max(1, math.floor(quota))}, or give the group more"
            return warning("cores", value, meaning, remedy, "control group")
    return Finding("cores", value + f"; torch uses {threads}" * bool(threads))


def _memory(host: Facts) -> Finding:
    available, total, swap = host["available_bytes"], host["total_bytes"], host["swap_bytes"]
    value = f"{format_bytes(available)} of {format_bytes(total)} available"
    value += f", swap {format_bytes(swap)}" * bool(swap)
    if available < _LITTLE_MEMORY * total:
        meaning = "other processes have nearly all of it"
        return warning("memory", value, meaning, "end what you no longer need")
    return Finding("memory", value)


def _group(host: Facts) -> Iterator[Finding]:
    limit, used, kills = host["group_bytes"], host["group_used_bytes"], host["oom_kills"]
    if limit is not None and limit < host["total_bytes"]:
        value = f"{format_bytes(limit)}, {format_bytes(used)} in use"
        if limit - used < _LITTLE_MEMORY * limit:
            meaning = "other processes of the group have nearly all of it"
            remedy = "end what you no longer need, or give the group more"
            yield warning("limit of the group", value, meaning, remedy, host["group_file"])
        else:
            yield Finding("limit of the group", value)
    if kills:
        value = f"{kills} process{'es' * (kills > 1)} of the control group"
        meaning = "since the group was made, the kernel has ended them because its memory ran out"
        remedy = "give --memory, so that runs are refused memory in good time"
        yield note("killed for memory", value, meaning, remedy)


def _limits(host: Facts) -> Iterator[Finding]:
    limits, unlimited = host["limits"], []
    for name, flag, what in (("RLIMIT_DATA", "-d", "data"), ("RLIMIT_AS", "-v", "addresses")):
        soft = limits.get(name, (None, None))[0]
        if soft is not None:
            meaning = f"the {what} of a process may not grow beyond that"
            if name == "RLIMIT_AS":
                meaning += "; libraries reserve far more addresses than they fill, CUDA above all"
            remedy = f"ulimit {flag} unlimited, and --memory for a budget"
            yield warning(name, format_bytes(soft), meaning, remedy)
        elif name in limits:
            unlimited.append(what)
    if unlimited:
        yield Finding("limits", f"none on {' and '.join(unlimited)}")
    soft, hard = limits.get("RLIMIT_NOFILE", (None, None))
    if soft is not None and soft < _FEW_FILES:
        most = min(hard or _MANY_FILES, _MANY_FILES)
        meaning = "workers that load data hand over each tensor by a file"
        remedy = f"ulimit -n {most}" if most > soft else "raise the hard limit, as root"
        yield warning("open files", f"{soft} at a time", meaning, remedy, "RLIMIT_NOFILE")
    elif soft is not None:
        yield Finding("open files", f"{soft} at a time")
    locked = limits.get("RLIMIT_MEMLOCK", (None, None))[0]
    if locked is not None and host["infiniband"]:
        meaning = "NCCL locks the memory that it sends over InfiniBand, which is here"
        remedy = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
        yield warning("locked memory", format_bytes(locked), meaning, remedy, "RLIMIT_MEMLOCK")


def _shm(host: Facts) -> Finding:
    size, free = host["shm_bytes"], host["shm_free_bytes"]
    meaning = (
        "workers that load data pass samples through it, and end with a bus error if it is full"
    )
    remedy = "docker run --shm-size 8g, mount -o remount,size=8G /dev/shm, or load without workers"
    if size is None or free is None:
        return warning("/dev/shm", "not there, or not to be written to", meaning, remedy)
    value = f"{format_bytes(free)} of {format_bytes(size)} free"
    if size < _SMALL_SHM_BYTES:
        return warning("/dev/shm", value, meaning, remedy)
    if free < _FULL_SHM_BYTES:
        remedy = "delete what ended processes have left there, or load without workers"
        return warning("/dev/shm", value, meaning, remedy)
    return Finding("/dev/shm", value)


def _kernel(host: Facts) -> Iterator[Finding]:
    if host["overcommit"] == 2:
        meaning = "the kernel refuses addresses that may stay unfilled, which libraries reserve"
        remedy = "sysctl vm.overcommit_memory=0, as root"
        yield warning("overcommit", "2", meaning, remedy, "/proc/sys/vm/overcommit_memory")
    for library in host["mallocs"]:
        meaning = (
            "it replaces the C library's, which anybatch sets: on a CPU predictions do not hold"
        )
        remedy = "take it out of LD_PRELOAD when you train on the CPU"
        yield warning("malloc", library, meaning, remedy, "LD_PRELOAD, or linked in")


# ------------------------------------------------------------------------------------------- folders


def look_folders() -> Facts:
    """The folders that are written to, each tested by writing to it."""
    from anybatch.process.files import cache_folder

    try:
        temporary = _folder(Path(tempfile.gettempdir()))
    except OSError as error:
        fault = error.strerror or str(error)
        temporary = {"path": "", "fault": fault, "free_bytes": None}
    return {
        "runs": _folder(Path.cwd() / "runs"),
        "cache": _folder(cache_folder()),
        "temporary": temporary,
    }


def _folder(folder: Path) -> Facts:
    """Where it does not exist yet, the folder in which it would be made is tested."""
    place = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    fault, free = "", None
    with suppress(OSError):
        free = shutil.disk_usage(place).free
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"a")
            file.flush()
    except OSError as error:
        fault = error.strerror or str(error)
    return {"path": str(folder), "fault": fault, "free_bytes": free}


_NOT_KEPT = (
    "what was measured is not kept, so each plan measures anew, and no run corrects the next"
)

_FOLDERS: dict[str, tuple[str, int, Level, str, str]] = {
    "runs": (
        "runs",
        2 << 30,
        "warning",
        "runs go there without --out",
        "give --out, or train elsewhere",
    ),
    "cache": ("cache", 16 << 20, "warning", _NOT_KEPT, "set XDG_CACHE_HOME to a writable folder"),
    "temporary": (
        *("temporary files", 16 << 20, "problem", "ranks are started with the help of files there"),
        "set TMPDIR to a writable folder",
    ),
}
"""Name, bytes that should be free, level where it cannot be written to, meaning and remedy."""


def check_folders(facts: Facts) -> Iterator[Finding]:
    for key, folder in (facts["folders"] or {}).items():
        name, least, unwritable, meaning, remedy = _FOLDERS[key]
        free = folder["free_bytes"]
        words = (folder["path"], "" if free is None else f"{format_bytes(free)} free")
        value = ", ".join(filter(None, words)) or "none"
        if folder["fault"]:
            meaning = f"it cannot be written to ({folder['fault']}): {meaning}"
            yield Finding(name, value, unwritable, "", meaning, remedy)
        elif free is not None and free < least:
            yield warning(name, value, f"the disk is nearly full: {meaning}", remedy)
        else:
            yield Finding(name, value)
