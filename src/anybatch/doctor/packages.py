"""Python, the packages, and torch: its version, its build, and whether it computes."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from anybatch.doctor.finding import (
    Facts,
    Finding,
    first_line,
    is_before,
    note,
    numbers_of,
    problem,
    warning,
)

LEAST, TESTED = "2.11", "2.13"
"""The first version of torch that will do, and the last that anybatch was tested with."""

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable with the settings of torch's allocator, and its former name."""

_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*(?P<least>[\d.]+))?"
    r"\s*(?:;\s*extra\s*==\s*['\"](?P<extra>[\w-]+)['\"])?\s*"
)
"""The forms that pyproject.toml uses."""

_REINSTALL = "install torch anew (https://pytorch.org/get-started/locally)"
_ON_A_GPU = (
    "see the group GPUs; else set CUDA_LAUNCH_BLOCKING=1, look for Xid in dmesg, and restart"
)

_CAUSES = (
    (r"No module named 'torch'", "pip install torch"),
    (
        r"failed to map segment|[Cc]annot allocate memory|MemoryError",
        "memory ran out while it was loaded: raise the limits of this process (ulimit -v, ulimit -d)",
    ),
    (
        r"lib(?:cud|cublas|nccl|nv|cufft|curand|cusolver|cusparse)[\w.-]*\.so",
        f"a library of CUDA is missing, or LD_LIBRARY_PATH leads astray: unset it, or {_REINSTALL}",
    ),
    (
        r"undefined symbol",
        f"several versions are mixed: unset LD_LIBRARY_PATH and LD_PRELOAD, or {_REINSTALL}",
    ),
)
"""What the loader of libraries says, and what to do."""

# ------------------------------------------------------------------------------- Python and packages


def look() -> Facts:
    """The interpreter, the system, and the packages that this one asks for, needed ones first."""
    try:
        version, requirements = metadata.version("anybatch"), metadata.requires("anybatch") or []
    except metadata.PackageNotFoundError:
        version, requirements = "", []
    compilers = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "anybatch": version,  # empty: found, but not installed
        "folder": str(Path(__file__).parents[1]),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(filter(None, platform.libc_ver())),
        "compiler": next((found for name in compilers if (found := shutil.which(name))), ""),
        "packages": [_looked_up(package) for package in parse(requirements)],
    }


def parse(requirements: list[str]) -> list[Facts]:
    """Name, extra and least version of these requirements, without those for development."""
    matches = filter(None, map(_REQUIREMENT.fullmatch, requirements))
    found = [{key: text or "" for key, text in match.groupdict().items()} for match in matches]
    return sorted(
        (one for one in found if one["extra"] != "dev"), key=lambda one: one["extra"] != ""
    )


def _looked_up(package: Facts) -> Facts:
    """With its version, and for a needed one why it cannot be imported. torch, which may crash, has a
    check of its own."""
    name, version, fault = package["name"], None, ""
    try:
        version = metadata.version(name)
        if not package["extra"] and name != "torch":
            importlib.import_module("pynvml" if name == "nvidia-ml-py" else name.replace("-", "_"))
    except metadata.PackageNotFoundError:
        pass
    except Exception as error:
        fault = first_line(error)
    return {**package, "version": version, "fault": fault}


def check_packages(facts: Facts) -> Iterator[Finding]:
    python = facts["python"]
    if python is None:
        return
    yield Finding("Python", f"{python['version']}, {python['executable']}")
    system = ", ".join(filter(None, (python["system"], python["libc"])))
    if system.startswith("Linux") and not python["libc"].startswith("glibc"):
        meaning = (
            "the C library is not glibc, which anybatch sets: a CPU uses more bytes than predicted"
        )
        yield note("system", system, meaning)
    else:
        yield Finding("system", system)
    if python["anybatch"]:
        yield Finding("anybatch", _with_folder(python["anybatch"], python["folder"], python))
    else:
        meaning = "it is found, but not installed, so it is not known which packages it needs"
        yield note("anybatch", python["folder"], meaning, "install it with pip")
    needed = [one for one in python["packages"] if not one["extra"]]
    faults = list(_faults(needed))
    if needed and not faults:
        yield Finding("packages", f"all {len(needed)} that anybatch needs")
    yield from faults
    for extra in dict.fromkeys(one["extra"] for one in python["packages"] if one["extra"]):
        yield _extra(extra, [one for one in python["packages"] if one["extra"] == extra])


def _with_folder(version: str, folder: str, python: Facts | None) -> str:
    """The version of a package, and its folder unless that is the interpreter's own."""
    is_own = python is not None and folder.startswith(python["prefix"])
    return version if is_own else f"{version}, {folder}"


def _faults(needed: list[Facts]) -> Iterator[Finding]:
    for one in needed:
        name, version, least = one["name"], one["version"], one["least"]
        install = f"pip install '{name}{'>=' * bool(least)}{least}'"
        if version is None:
            yield problem(name, "not installed", "anybatch needs it", install)
        elif least and is_before(version, least):
            yield problem(name, version, f"anybatch needs {least} or later", install)
        elif one["fault"]:
            meaning = f"it cannot be imported ({one['fault']})"
            yield problem(name, version, meaning, f"pip install --force-reinstall {name}")


def _extra(extra: str, packages: list[Facts]) -> Finding:
    """Optional packages that are installed together."""
    missing = [one["name"] for one in packages if one["version"] is None]
    there = [one for one in packages if one["version"] is not None]
    early = [one for one in there if is_before(one["version"], one["least"])]
    words = [*(f"{one['name']} {one['version']}" for one in there), *(f"no {it}" for it in missing)]
    name, value, remedy = f"[{extra}]", ", ".join(words), f"pip install 'anybatch[{extra}]'"
    if early:
        needs = (f"{one['least']} or later is needed of {one['name']}" for one in early)
        return warning(name, value, " and ".join(needs), remedy)
    return note(name, value, "", remedy) if missing else Finding(name, value)


# --------------------------------------------------------------------------------------------- torch


def look_torch() -> Facts:
    """torch, in a process that imports it. `fault`: why it cannot be imported."""
    try:
        import torch
    except Exception as error:  # half an installation raises anything
        return {"fault": first_line(error), "folder": ""}
    folder = str(Path(getattr(torch, "__file__", None) or next(iter(torch.__path__), "")).parent)
    if not hasattr(torch, "Tensor") or not hasattr(torch, "__version__"):
        return {"fault": "it is another module of this name", "folder": folder}
    from torch import distributed

    devices, cuda_fault = _devices(torch)
    backends = [
        name
        for name in ("gloo", "nccl", "mpi", "ucc")
        if distributed.is_available() and getattr(distributed, f"is_{name}_available")()
    ]
    libraries = ("mkl", "mkldnn", "openmp")
    architectures = getattr(torch._C, "_cuda_getArchFlags", str)  # known without a device, too
    return {
        "fault": "",
        "version": str(torch.__version__),
        "folder": folder,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "architectures": (architectures() or "").split(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cudnn": _cudnn_version(torch),
        "libraries": [one for one in libraries if getattr(torch.backends, one).is_available()],
        "threads": torch.get_num_threads(),
        "backends": backends,
        "nccl": _nccl_version(torch) if "nccl" in backends else "",
        "devices": devices,
        "cuda_fault": cuda_fault,
        "allocator_fault": _allocator_fault(torch),
    }


def _nccl_version(torch: Any) -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:
        return "unknown"


def _cudnn_version(torch: Any) -> str:
    try:
        number = torch.backends.cudnn.version() or 0
    except Exception:  # it is not the one that torch was built with
        return "unknown"
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}" if number else ""


def _devices(torch: Any) -> tuple[list[Facts], str]:
    """The devices that torch sees, and what it says if CUDA cannot be started."""
    if not (torch.version.cuda or torch.version.hip):
        return [], ""
    found: list[Facts] = []
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            capability = f"{device.major}.{device.minor}"
            if torch.version.hip:
                capability = str(device.gcnArchName).partition(":")[0]
            found.append(
                {
                    "name": device.name,
                    "capability": capability,
                    "total_bytes": device.total_memory,
                }
            )
    except Exception as error:
        return [], first_line(error)
    return found, ""


def _allocator_fault(torch: Any) -> str:
    """What torch says of the settings, which it reads by itself only where CUDA is used."""
    text = next((value for name in ALLOCATORS if (value := os.environ.get(name))), "")
    read = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    try:
        if text and read is not None:
            read(text)
    except Exception as error:
        return first_line(error)
    return ""


# The loss is linear in the weights, so each step moves them by the rate times the sums of the columns
# of the samples; all numbers are whole, and exact in any format.
_SAMPLES = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
_WEIGHTS = [1.0 - 2 * 0.5 * sum(column) for column in zip(*_SAMPLES, strict=True)]


def look_step(device: str) -> Facts:
    """Two steps of training on a device, whose result is known to the last bit."""
    import torch

    def shown(numbers: list[float]) -> str:
        return ", ".join(f"{number:.3g}" for number in numbers)

    fault = ""
    try:
        layer = torch.nn.Linear(4, 3).to(device)
        torch.nn.init.ones_(layer.weight)
        samples = torch.tensor(_SAMPLES, device=device)
        for _ in range(2):  # by hand, since torch's optimizers load its compiler
            loss = layer(samples).sum()
            gradients = torch.autograd.grad(loss, list(layer.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.5)
        image = torch.ones(1, 1, 4, 4, device=device)
        convolved = torch.nn.functional.conv2d(image, torch.ones(1, 1, 3, 3, device=device))
        weights, sums = layer.weight.tolist(), convolved.flatten().tolist()
        if weights != [_WEIGHTS] * 3:
            fault = f"weights came to {shown(weights[0])}, not to {shown(_WEIGHTS)}"
        elif sums != [9.0] * 4:
            fault = f"a convolution came to {shown(sums)}, and not to 9 everywhere"
    except Exception as error:
        fault = first_line(error)
    return {"device": device, "fault": fault}


def check_torch(facts: Facts) -> Iterator[Finding]:
    torch, python = facts["torch"], facts["python"]
    if torch is None:
        return
    if torch["fault"]:
        yield _not_there(torch, facts["host"])
        return
    value = _with_folder(torch["version"], torch["folder"], python)
    if is_before(torch["version"], LEAST):
        yield problem(
            "torch", value, f"anybatch needs {LEAST} or later", f"pip install 'torch>={LEAST}'"
        )
    elif numbers_of(TESTED) < numbers_of(torch["version"])[:2]:
        meaning = f"tested are {LEAST} to {TESTED}: predictions may be further off"
        yield note("torch", value, meaning)
    else:
        yield Finding("torch", value)
    yield Finding("build", _build(torch))
    if python is not None and python["compiler"]:
        yield Finding("C++ compiler", python["compiler"])
    elif python is not None:
        remedy = "if you want that, install g++, or name one in CXX"
        yield note("C++ compiler", "none", "--compile needs one on a CPU", remedy)
    for step in facts["steps"]:
        name = f"steps on {step['device']}"
        if step["fault"]:
            meaning = f"two small steps of training failed ({step['fault']})"
            remedy = _REINSTALL if step["device"] == "cpu" else _ON_A_GPU
            yield problem(name, "wrong or failed", meaning, remedy)
        else:
            yield Finding(name, "two small ones came out right")


def _not_there(torch: Facts, host: Facts | None) -> Finding:
    fault, folder = torch["fault"], torch["folder"]
    if folder:
        remedy = "rename that, or run anybatch from another folder"
        return problem("torch", "not torch", "another module has its name", remedy, folder)
    found = [remedy for pattern, remedy in _CAUSES if re.search(pattern, fault)]
    limits = host["limits"] if host is not None else {}
    tight = [
        it for it in ("RLIMIT_AS", "RLIMIT_DATA") if limits.get(it, (None, None))[0] is not None
    ]
    if tight:
        found.append(
            f"raise {' and '.join(tight)} of this process, under which libraries may fail so"
        )
    return problem("torch", "cannot be imported", fault.rstrip("."), [*found, _REINSTALL][0])


def _build(torch: Facts) -> str:
    names = {"mkl": "MKL", "mkldnn": "oneDNN", "openmp": "OpenMP"}
    cuda, hip, cudnn = torch["cuda"], torch["hip"], torch["cudnn"]
    target = f"for CUDA {cuda}" if cuda else f"for ROCm {hip}" if hip else "for CPUs"
    libraries = (names[name] for name in torch["libraries"])
    return ", ".join(filter(None, (target, cudnn and f"cuDNN {cudnn}", torch["cpu"], *libraries)))
