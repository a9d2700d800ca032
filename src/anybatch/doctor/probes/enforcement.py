"""Whether the kernel refuses memory beyond a limit on data, by which budgets on a CPU are enforced."""

from __future__ import annotations

import sys

from anybatch.doctor.facts import Enforcement

_ROOM_BYTES, _ASKED_BYTES = 32 << 20, 256 << 20


def look() -> Enforcement:
    """Sets a limit, asks for more, and sets the limit back. See `Enforcement`."""
    if sys.platform != "linux":
        return Enforcement(f"no limit on the data of a process is enforced by {sys.platform}")
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + _ROOM_BYTES
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
        try:
            bytearray(_ASKED_BYTES)
        except MemoryError:
            return Enforcement()
        return Enforcement(
            f"{_ASKED_BYTES >> 20} MiB were had under a limit that left {_ROOM_BYTES >> 20} MiB"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _data_bytes() -> int:
    """What the kernel counts under the limit so far."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmData:"):
                return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmData")
