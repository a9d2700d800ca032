"""Cores and memory, and what limits them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from anybatch.doctor.facts import Facts, Host, Torch
from anybatch.doctor.finding import Finding
from anybatch.units import format_bytes

_FEW_FILES, _MANY_FILES = 1024, 65536
_SMALL_SHM_BYTES, _FULL_SHM_BYTES = 256 << 20, 64 << 20
_LITTLE = 0.1
"""Of the machine's memory, available."""


def judge(facts: Facts) -> Iterator[Finding]:
    """Findings on `Facts.host` and `Facts.enforcement`."""
    host = facts.host
    if host is not None:
        yield from _cores(host, facts.torch)
        yield _memory(host)
        yield from _group(host)
        yield from _limits(host)
        yield from _shm(host)
        yield from _kernel(host)
        yield from _malloc(host)
    if facts.enforcement is not None:
        if facts.enforcement.fault:
            yield Finding(
                "budget on the CPU",
                "cannot be enforced",
                "warning",
                meaning=f"{facts.enforcement.fault}: --memory is planned with, and nothing holds a"
                " run to it",
            )
        else:
            yield Finding("budget on the CPU", "enforced: memory beyond a limit was refused")


def _cores(host: Host, torch: Torch | None) -> Iterator[Finding]:
    value = f"{host.own_cores} of {host.cores} for this process"
    threads = torch.threads if torch is not None else 0
    quota = host.quota_cores
    if quota is not None and quota < host.own_cores:
        value += f", {quota:g} at a time"
        few = max(1, math.floor(quota))
        if threads > math.ceil(quota):
            yield Finding(
                "cores",
                value,
                "warning",
                place="control group",
                meaning=f"torch computes with {threads} threads, which wait for each other when the"
                " group has used up its time",
                remedy=f"set OMP_NUM_THREADS={few}, or give the group more",
            )
            return
    yield Finding("cores", value + (f"; torch uses {threads}" if threads else ""))


def _memory(host: Host) -> Finding:
    value = f"{format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)} available"
    if host.swap_bytes:
        value += f", swap {format_bytes(host.swap_bytes)}"
    if host.available_bytes < _LITTLE * host.total_bytes:
        return Finding(
            "memory",
            value,
            "warning",
            meaning="other processes have nearly all of it",
            remedy="end what you no longer need",
        )
    return Finding("memory", value)


def _group(host: Host) -> Iterator[Finding]:
    if host.group_bytes is not None and host.group_bytes < host.total_bytes:
        name, left = "limit of the group", max(0, host.group_bytes - host.group_used_bytes)
        value = f"{format_bytes(host.group_bytes)}, {format_bytes(host.group_used_bytes)} in use"
        if left < host.available_bytes:
            yield Finding(
                name,
                value,
                "warning",
                place=host.group_file,
                meaning="the control group (a container, or a job) may use less than the machine"
                " has free, for which plans for a CPU are made; a process that goes beyond is"
                " killed",
                remedy=f"give --memory, of at most {format_bytes(0.9 * left)} in all, when you"
                " train on the CPU",
            )
        else:
            yield Finding(name, value)
    if host.oom_kills:
        yield Finding(
            "killed for memory",
            f"{host.oom_kills} process{'es' if host.oom_kills > 1 else ''} of the control group",
            "note",
            meaning="since the group was made, the kernel has ended them because its memory ran out",
            remedy="give --memory, so that runs are refused memory in good time",
        )


def _limits(host: Host) -> Iterator[Finding]:
    unlimited = []
    for name, flag, what in (("RLIMIT_DATA", "-d", "data"), ("RLIMIT_AS", "-v", "addresses")):
        limit = host.limits.get(name)
        if limit is None:
            continue
        if limit.soft is None:
            unlimited.append(what)
            continue
        meaning = f"the {what} of a process may not grow beyond that"
        if name == "RLIMIT_AS":
            meaning += (
                "; libraries reserve many times the addresses that they fill, CUDA more than all"
            )
        yield Finding(
            name,
            format_bytes(limit.soft),
            "warning",
            meaning=meaning,
            remedy=f"ulimit {flag} unlimited, and --memory for a budget",
        )
    if unlimited:
        yield Finding("limits", f"none on {' and '.join(unlimited)}")
    files = host.limits.get("RLIMIT_NOFILE")
    if files is not None and files.soft is not None:
        value = f"{files.soft} at a time"
        if files.soft < _FEW_FILES:
            most = _MANY_FILES if files.hard is None else min(files.hard, _MANY_FILES)
            yield Finding(
                "open files",
                value,
                "warning",
                place="RLIMIT_NOFILE",
                meaning="workers that load data hand over each tensor by a file",
                remedy=f"ulimit -n {most}"
                if most > files.soft
                else "raise the hard limit, as root",
            )
        else:
            yield Finding("open files", value)
    locked = host.limits.get("RLIMIT_MEMLOCK")
    if locked is not None and locked.soft is not None and host.infiniband:
        yield Finding(
            "locked memory",
            format_bytes(locked.soft),
            "warning",
            place="RLIMIT_MEMLOCK",
            meaning="NCCL locks the memory that it sends over InfiniBand, which is here",
            remedy="ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )


def _shm(host: Host) -> Iterator[Finding]:
    if host.system != "linux":
        return
    meaning = (
        "workers that load data hand over samples in it, and end with a bus error where it is full"
    )
    remedy = (
        "docker run --shm-size 8g, or mount -o remount,size=8G /dev/shm, or load without workers"
    )
    if host.shm_bytes is None or host.shm_free_bytes is None:
        yield Finding(
            "/dev/shm", "not there, or not to be written to", "warning", "", meaning, remedy
        )
        return
    value = f"{format_bytes(host.shm_free_bytes)} of {format_bytes(host.shm_bytes)} free"
    if host.shm_bytes < _SMALL_SHM_BYTES:
        yield Finding("/dev/shm", value, "warning", "", meaning, remedy)
    elif host.shm_free_bytes < _FULL_SHM_BYTES:
        remedy = "delete what ended processes have left there, or load without workers"
        yield Finding("/dev/shm", value, "warning", "", meaning, remedy)
    else:
        yield Finding("/dev/shm", value)


def _kernel(host: Host) -> Iterator[Finding]:
    if host.overcommit == 2:
        yield Finding(
            "overcommit",
            "2",
            "warning",
            place="/proc/sys/vm/overcommit_memory",
            meaning="the kernel refuses addresses that might not all be filled, and libraries"
            " reserve many times those that they fill",
            remedy="sysctl vm.overcommit_memory=0, as root",
        )
    if host.huge_pages == "always":
        yield Finding(
            "huge pages",
            "always",
            "note",
            place="/sys/kernel/mm/transparent_hugepage/enabled",
            meaning="memory is taken in pieces of 2 MiB, so that on the CPU more may be used than"
            " is predicted",
            remedy="echo madvise to that file, as root, if it matters",
        )


def _malloc(host: Host) -> Iterator[Finding]:
    for library in host.mallocs:
        yield Finding(
            "malloc",
            library,
            "warning",
            place="LD_PRELOAD, or linked in",
            meaning="it stands in for that of the C library, which anybatch tells to give memory"
            " back: on the CPU predictions of bytes do not hold, and a budget counts what it keeps",
            remedy="take it out of LD_PRELOAD when you train on the CPU",
        )
