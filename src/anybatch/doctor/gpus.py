"""GPUs: the driver, whether torch can use them, which are visible, their settings and their users."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from anybatch.doctor.finding import Facts, Finding, first_line, note, problem, warning
from anybatch.units import format_bytes

T = TypeVar("T")

VISIBLE = "CUDA_VISIBLE_DEVICES"

_MUCH = 0.1
"""Of a GPU's memory, held by others."""

_SHOWN_USERS = 3

_GET_STARTED = "https://pytorch.org/get-started/locally"

_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def look(sys: str = "/sys") -> Facts:
    """NVIDIA's GPUs as NVML shows them, whatever `CUDA_VISIBLE_DEVICES` hides, and their number on the
    PCI bus, which is known without a driver. None: not known."""
    devices = Path(sys) / "bus/pci/devices"
    found = {
        "driver": "",
        "cuda": "",
        "fault": "",
        "on_bus": sum(map(_is_gpu, devices.iterdir())) if devices.is_dir() else None,
        "gpus": [],
    }
    try:
        import pynvml
    except Exception as error:
        return {**found, "fault": first_line(error)}
    try:
        pynvml.nvmlInit()
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        return {
            **found,
            "driver": _decoded(pynvml.nvmlSystemGetDriverVersion()),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "gpus": [_seen_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())],
        }
    except pynvml.NVMLError as error:
        return {**found, "fault": str(error)}


def _seen_gpu(nvml: Any, index: int) -> Facts:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)

    def ask(question: Callable[..., T], *arguments: object) -> T | None:
        try:
            return question(handle, *arguments)
        except nvml.NVMLError:  # not supported by this GPU or driver
            return None

    ecc, mig = ask(nvml.nvmlDeviceGetEccMode), ask(nvml.nvmlDeviceGetMigMode)
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    mode = ask(nvml.nvmlDeviceGetComputeMode)
    return {
        "index": index,
        "name": _decoded(nvml.nvmlDeviceGetName(handle)),
        "uuid": _decoded(nvml.nvmlDeviceGetUUID(handle)),
        "total_bytes": memory.total,
        "free_bytes": memory.free,
        "ecc": bool(ecc[0]) if ecc else None,
        "errors": ask(nvml.nvmlDeviceGetTotalEccErrors, *kinds),
        "mig": bool(mig[0]) if mig else None,
        "compute_mode": _COMPUTE_MODES.get(mode or 0, "default"),
        "users": [
            {"pid": one.pid, "name": _process_name(one.pid), "num_bytes": one.usedGpuMemory}
            for one in ask(nvml.nvmlDeviceGetComputeRunningProcesses) or ()
        ],
    }


def _process_name(pid: int) -> str:
    import psutil

    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""


def _decoded(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _is_gpu(device: Path) -> bool:
    """Whether a device of the PCI bus is a display controller of NVIDIA."""
    return _text(device / "vendor") == "0x10de" and _text(device / "class").startswith("0x03")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------ findings


def check(facts: Facts) -> Iterator[Finding]:
    gpus, environment = facts["gpus"], facts["environment"]
    torch = facts["torch"] if facts["torch"] is not None and not facts["torch"]["fault"] else None
    if gpus is not None and not (torch is not None and torch["hip"]):
        yield _driver(gpus, torch)
    if torch is not None and (torch["cuda"] or torch["hip"]):
        yield _usable(torch, gpus, VISIBLE in environment or bool(torch["allocator_fault"]))
    elif torch is not None and gpus is not None and (gpus["gpus"] or gpus["on_bus"]):
        meaning = "there are GPUs here, and torch does not use them"
        remedy = f"install its build for CUDA: {_GET_STARTED}"
        yield warning("torch and CUDA", "built for CPUs", meaning, remedy)
    if gpus is not None:
        if VISIBLE in environment:
            yield _visible(environment[VISIBLE], gpus["gpus"])
        yield from map(_gpu, gpus["gpus"])
        order = environment.get("CUDA_DEVICE_ORDER", "") or "FASTEST_FIRST"
        if len({gpu["name"] for gpu in gpus["gpus"]}) > 1 and order != "PCI_BUS_ID":
            meaning = "they differ, and CUDA numbers them in another order than nvidia-smi"
            remedy = "set CUDA_DEVICE_ORDER=PCI_BUS_ID to have one order"
            yield note("order of GPUs", order, meaning, remedy)


def _driver(gpus: Facts, torch: Facts | None) -> Finding:
    fault, count = gpus["fault"], gpus["on_bus"] or 0
    if gpus["driver"]:
        return Finding("driver", f"{gpus['driver']}, for CUDA up to {gpus['cuda']}")
    if torch is not None and torch["devices"]:
        meaning = f"torch sees its GPUs; their users and settings are not known ({fault})"
        return note("driver", "not reached by NVML", meaning)
    if count:
        are = "GPUs are" if count > 1 else "GPU is"
        meaning = f"{count} {are} on the bus of this machine, and no driver answers ({fault})"
        remedy = (
            "in a container, add docker run --gpus all; else install NVIDIA's driver, or restart the "
            "machine after its update, or look for NVRM in dmesg"
        )
        return problem("driver", "none", meaning, remedy)
    if torch is not None and torch["cuda"]:
        meaning = f"no GPU of NVIDIA is here: torch for CUDA {torch['cuda']} computes on the CPU"
        return note("driver", "none", meaning)
    return Finding("driver", "none, and no GPU of NVIDIA")


def _usable(torch: Facts, gpus: Facts | None, is_explained: bool) -> Finding:
    """The devices that torch can use. `is_explained`: a variable that has a finding of its own hides
    them or stops torch."""
    name = "torch and CUDA" if torch["cuda"] else "torch and ROCm"
    if torch["devices"]:
        names = dict.fromkeys(device["name"] for device in torch["devices"])
        return Finding(name, f"{len(torch['devices'])} seen: {', '.join(names)}")
    if gpus is not None and gpus["gpus"] and not is_explained:
        meaning = f"the driver shows {len(gpus['gpus'])}, and torch can use none"
        meaning += f" ({torch['cuda_fault']})" * bool(torch["cuda_fault"])
        remedy = (
            f"update the driver if it is older than CUDA {torch['cuda']}; else restart the machine"
        )
        return problem(name, "no device seen", meaning, remedy)
    return Finding(name, "no device seen")


def _visible(text: str, gpus: list[Facts]) -> Finding:
    value, count = repr(text), len(gpus)
    names = [name.strip() for name in text.split(",")]
    wrong = [index for index, name in enumerate(names) if not _is_one(name, gpus)]
    level, meaning, remedy = warning, "", "unset it"
    if text.strip() in ("", "-1"):
        if count:
            meaning = f"it hides all {count} GPUs from torch, which computes on the CPU"
            remedy = "unset it, unless that is meant"
    elif not count:
        meaning = "no GPU is to be had here under any name"
    elif wrong:
        # CUDA takes those before the first that it does not know.
        seen = f"only the {wrong[0]} before it" if wrong[0] else "none"
        there = "GPU 0" if count == 1 else f"GPUs 0 to {count - 1}"
        level, remedy = problem, "name those that are here, or unset it"
        meaning = f"{names[wrong[0]]!r} is none of this machine's {there}: CUDA shows {seen}"
    elif len(set(names)) < len(names):
        level, remedy = problem, "name each once, or unset it"
        meaning = "it names a GPU twice, so CUDA shows none"
    return (
        level(VISIBLE, value, meaning, remedy, "environment")
        if meaning
        else Finding(VISIBLE, value)
    )


def _is_one(name: str, gpus: list[Facts]) -> bool:
    if name.isdecimal():
        return int(name) < len(gpus)
    if name.startswith("MIG"):
        return any(gpu["mig"] for gpu in gpus)
    return bool(name) and any(gpu["uuid"].startswith(name) for gpu in gpus)


def _gpu(gpu: Facts) -> Finding:
    index, mode, total = gpu["index"], gpu["compute_mode"], gpu["total_bytes"]
    held, users = total - gpu["free_bytes"], _users(gpu["users"])
    name = f"GPU {index}"
    value = f"{gpu['name']}, {format_bytes(gpu['free_bytes'])} of {format_bytes(total)} free"
    value += {None: "", True: ", ECC on", False: ", ECC off"}[gpu["ecc"]]
    value += ", divided (MIG)" * bool(gpu["mig"]) + f", {mode}" * (mode != "default")
    reset = f"nvidia-smi -i {index} -c DEFAULT, as root"
    if mode == "prohibited":
        return problem(name, value, "its compute mode lets no process compute on it", reset)
    if gpu["errors"]:
        meaning = f"its memory had {gpu['errors']} errors since the driver was loaded that ECC left"
        remedy = f"look at nvidia-smi -q -i {index} -d ECC, and have it replaced if they go on"
        return warning(name, value, meaning, remedy)
    if mode.startswith("exclusive") and users:
        meaning = f"it takes one process at a time, and {users} has it"
        return problem(name, value, meaning, f"end that, or {reset}")
    if total and held > _MUCH * total:
        who = users or "the driver does not say who"
        remedy = "end what you no longer need; plans are made for 90% of what is free"
        return warning(name, value, f"{format_bytes(held)} are held by others ({who})", remedy)
    return Finding(name, value)


def _users(users: list[Facts]) -> str:
    shown = [
        f"{one['name'] or 'a process outside this container'} (pid {one['pid']})"
        + ("" if one["num_bytes"] is None else f" with {format_bytes(one['num_bytes'])}")
        for one in users[:_SHOWN_USERS]
    ]
    more = len(users) - len(shown)
    return ", ".join(shown) + f", and {more} more" * bool(more)
