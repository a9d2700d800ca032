"""NVIDIA's GPUs as the driver shows them by NVML, and as the bus does where no driver answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from anybatch.doctor.facts import Gpu, Gpus, GpuUser

T = TypeVar("T")

_NVIDIA, _DISPLAY = "0x10de", "0x03"

_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def look(sys: str = "/sys", proc: str = "/proc") -> Gpus:
    """See `Gpus`."""
    on_bus, module = _on_bus(Path(sys)), _module(Path(proc))
    try:
        import pynvml
    except Exception as error:
        return Gpus(fault=f"{type(error).__name__}: {error}", on_bus=on_bus, module=module)
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetCudaDriverVersion()
        return Gpus(
            driver=_text(pynvml.nvmlSystemGetDriverVersion()),
            cuda=f"{version // 1000}.{version % 1000 // 10}",
            on_bus=on_bus,
            module=module,
            gpus=tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())),
        )
    except pynvml.NVMLError as error:
        return Gpus(fault=str(error), on_bus=on_bus, module=module)


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)

    def ask(question: Callable[..., T], *arguments: object) -> T | None:
        try:
            return question(handle, *arguments)
        except nvml.NVMLError:  # this GPU, or this driver, does not know
            return None

    capability = ask(nvml.nvmlDeviceGetCudaComputeCapability)
    ecc, mig = ask(nvml.nvmlDeviceGetEccMode), ask(nvml.nvmlDeviceGetMigMode)
    mode = ask(nvml.nvmlDeviceGetComputeMode)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        total_bytes=memory.total,
        free_bytes=memory.free,
        capability="{}.{}".format(*capability) if capability else "",
        ecc=bool(ecc[0]) if ecc else None,
        errors=ask(
            nvml.nvmlDeviceGetTotalEccErrors,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        mig=bool(mig[0]) if mig else None,
        compute_mode=_COMPUTE_MODES.get(mode or 0, "default"),
        users=tuple(
            GpuUser(one.pid, _name_of(one.pid), one.usedGpuMemory)
            for one in ask(nvml.nvmlDeviceGetComputeRunningProcesses) or ()
        ),
    )


def _name_of(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _on_bus(sys: Path) -> int | None:
    devices = sys / "bus/pci/devices"
    if not devices.is_dir():
        return None
    return sum(
        _content(device / "vendor") == _NVIDIA and _content(device / "class").startswith(_DISPLAY)
        for device in devices.iterdir()
    )


def _module(proc: Path) -> str:
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _content(proc / "driver/nvidia/version"))
    return found[1] if found else ""


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
