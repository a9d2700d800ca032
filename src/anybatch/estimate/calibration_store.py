"""Store of what was measured on this machine, in files of the user's cache folder: speeds of its
devices, and how far predicted times were from measured ones.

A cache may be lost, torn or stale at any time, and none of that may stop a plan: a file that cannot be
read is as good as none, and one that cannot be written is not written. Files are named after what their
content depends on, so another driver or another number of threads finds none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from anybatch.estimate.calibration import Speeds, nominal
from anybatch.estimate.calibration_apart import SPEEDS, measure_apart
from anybatch.machine import Device
from anybatch.process.files import cache_folder

FORMAT = 6
"""Of the files, and of the way in which speeds are measured."""


@dataclass(frozen=True, slots=True)
class Where:
    """What measurements depend on: two runs that agree in all of it can be compared.

    Attributes:
        device: its name.
        driver: of the device; on a CPU the processor's model and the system.
        torch: version.
        threads: of torch, where the device is a CPU.
    """

    device: str
    driver: str
    torch: str
    threads: int

    @property
    def name(self) -> str:
        """Part of a file's name: readable, and unlike that of any other."""
        text = json.dumps([FORMAT, self.device, self.driver, self.torch, self.threads])
        readable = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        return f"{readable[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def where(device: Device) -> Where:
    """What measurements on `device`, which is here, depend on."""
    if device.kind == "cpu":
        return Where(device.name, _processor(), torch.__version__, torch.get_num_threads())
    return Where(device.name, _cuda_driver(), torch.__version__, 0)


def read(path: Path, adapter: TypeAdapter[Any]) -> Any | None:
    """What is in the file, or None if it is not there or not what it should be."""
    try:
        return adapter.validate_json(path.read_bytes())
    except (OSError, ValidationError, ValueError):
        return None


def write(path: Path, adapter: TypeAdapter[Any], value: Any) -> bool:
    """Write the file whole or not at all. Returns False if it could not be."""
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(adapter.dump_json(value, indent=1))
        os.replace(partial, path)
    except (OSError, ValueError):
        if partial is not None:
            with contextlib.suppress(OSError):
                os.unlink(partial)
        return False
    return True


# ---------------------------------------------------------------------------------------- speeds

_memo: dict[Where, Speeds] = {}


def speeds_of(device: Device) -> Speeds:
    """The speeds of `device`: as measured, now or earlier, or nominal where it is not here."""
    if not device.present:
        return nominal(device)
    here = where(device)
    found = _memo.get(here) or _load(here)
    if found is None:
        try:
            found = measure_apart(device, torch.get_num_threads())
        except Exception:  # no room for it, say: a plan can do with less, and asks more than once
            found = nominal(device)
        else:
            write(_speeds_path(here), SPEEDS, found)
    _memo[here] = found
    return found


def forget_speeds(device: Device) -> None:
    """Measure `device` again when its speeds are next asked for."""
    here = where(device)
    _memo.pop(here, None)
    with contextlib.suppress(OSError):
        _speeds_path(here).unlink(missing_ok=True)


def _load(here: Where) -> Speeds | None:
    found = read(_speeds_path(here), SPEEDS)
    return found if found is not None and _sound(found) else None


def _sound(speeds: Speeds) -> bool:
    """Whether the figures can be calculated with."""
    curves = [*speeds.matmul.values(), speeds.memory]
    figures = [figure for curve in curves for point in curve for figure in point]
    return (
        "float32" in speeds.matmul
        and all(curves)
        and all(math.isfinite(figure) and figure > 0 for figure in (*figures, speeds.call_seconds))
    )


def _speeds_path(here: Where) -> Path:
    return cache_folder() / f"speeds-{here.name}.json"


@cache
def _processor() -> str:
    system = f"{sys.platform} {os.uname().release}" if hasattr(os, "uname") else sys.platform
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {system}"
    import platform

    return f"{platform.processor() or platform.machine()}, {system}"


@cache
def _cuda_driver() -> str:
    runtime = torch.version.cuda or torch.version.hip or ""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no NVML (ROCm, a container without it)
        return runtime
    return f"{version.decode() if isinstance(version, bytes) else version}, {runtime}"
