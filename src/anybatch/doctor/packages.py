"""Python, the packages, and torch: its version, its build, and whether it computes."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from anybatch.doctor.finding import Facts, Finding, first_line, note, problem, warning

LEAST, TESTED = "2.11", "2.13"
"""The first version of torch that will do, and the last that anybatch was tested with."""

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable with the settings of torch's allocator, and its former name."""

_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*(?P<least>[\d.]+))?"
    r"\s*(?:;\s*extra\s*==\s*['\"](?P<extra>[\w-]+)['\"])?\s*"
)
"""The forms that pyproject.toml uses."""

_REINSTALL = "reinstall torch (https://pytorch.org/get-started/locally)"
_RAISE_LIMITS = "raise the limits of this process (ulimit -v, ulimit -d)"
_ON_A_GPU = (
    "see the group GPUs; else set CUDA_LAUNCH_BLOCKING=1, look for Xid in dmesg, and restart"
)

_CAUSES = (
    (r"No module named 'torch'", "pip install torch"),
    (
        r"failed to map segment|[Cc]annot allocate memory|MemoryError",
        f"memory ran out while it was loaded: {_RAISE_LIMITS}",
    ),
    (
        r"lib(?:cud|cublas|nccl|nv|cufft|curand|cusolver|cusparse)[\w.-]*\.so",
        f"a library of CUDA is missing, or LD_LIBRARY_PATH is wrong: unset it, or {_REINSTALL}",
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


def numbers_of(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13), without zeros at the end; empty if it does not begin with a number."""
    found = re.match(r"\d+(?:\.\d+)*?(?=(?:\.0+)*(?![.\d]))", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def is_before(version: str, other: str) -> bool:
    """Whether `version` is an earlier one, if both can be read."""
    one, two = numbers_of(version), numbers_of(other)
    return bool(one and two) and one < two


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
    from torch.cuda import nccl

    devices, cuda_fault = _devices(torch)
    backends = [
        name
        for name in ("gloo", "nccl", "mpi", "ucc")
        if distributed.is_available() and getattr(distributed, f"is_{name}_available")()
    ]
    libraries = ("mkl", "mkldnn", "openmp")
    return {
        "fault": "",
        "version": str(torch.__version__),
        "folder": folder,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cudnn": _version(torch.backends.cudnn.version),
        "libraries": [one for one in libraries if getattr(torch.backends, one).is_available()],
        "threads": torch.get_num_threads(),
        "backends": backends,
        "nccl": _version(nccl.version) if "nccl" in backends else "",
        "devices": devices,
        "cuda_fault": cuda_fault,
        "allocator_fault": _allocator_fault(torch),
    }


def _version(ask: Callable[[], Any]) -> str:
    """The version of a library; empty: it is not there."""
    try:
        found = ask() or ""
    except Exception:  # it is not the one that torch was built with
        return "unknown"
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


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
# of the samples. All numbers are whole, and exact in any format.
_SAMPLES = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
_WEIGHTS = [-3.0, -5.0, -7.0, -9.0]


def look_step(device: str) -> Facts:
    """Two steps of training on a device, whose result is known to the last bit."""
    import torch

    fault = ""
    try:
        layer = torch.nn.Linear(4, 3).to(device)
        torch.nn.init.ones_(layer.weight)
        samples = torch.tensor(_SAMPLES, device=device)
        for _ in range(2):  # without torch.optim, which loads the compiler
            gradients = torch.autograd.grad(layer(samples).sum(), list(layer.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.5)
        image = torch.ones(1, 1, 4, 4, device=device)
        sums = torch.nn.functional.conv2d(image, image[..., :3, :3])
        if layer.weight.tolist() != [_WEIGHTS] * 3:
            fault = f"weights came to {layer.weight[0].tolist()}, not to {_WEIGHTS}"
        elif not torch.equal(sums, torch.full_like(sums, 9.0)):
            fault = f"a convolution came to {sums.flatten().tolist()}, and not to 9 everywhere"
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
    elif is_before(TESTED, ".".join(torch["version"].split(".")[:2])):
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
            if "no kernel image" in step["fault"]:
                remedy = "install a build of torch for this GPU (https://pytorch.org/get-started/locally)"
            yield problem(name, "wrong or failed", meaning, remedy)
        else:
            yield Finding(name, "two small ones came out right")


def _not_there(torch: Facts, host: Facts | None) -> Finding:
    fault, folder = torch["fault"], torch["folder"]
    if folder:
        remedy = "rename that, or run anybatch from another folder"
        return problem("torch", "not torch", "another module has its name", remedy, folder)
    remedy = next((it for words, it in _CAUSES if re.search(words, fault)), "")
    limits = host["limits"] if host is not None else {}
    if not remedy and any(limits.get(it, [None])[0] for it in ("RLIMIT_AS", "RLIMIT_DATA")):
        remedy = _RAISE_LIMITS
    return problem("torch", "cannot be imported", fault.rstrip("."), remedy or _REINSTALL)


def _build(torch: Facts) -> str:
    names = {"mkl": "MKL", "mkldnn": "oneDNN", "openmp": "OpenMP"}
    cuda, hip, cudnn = torch["cuda"], torch["hip"], torch["cudnn"]
    target = f"for CUDA {cuda}" if cuda else f"for ROCm {hip}" if hip else "for CPUs"
    libraries = (names[name] for name in torch["libraries"])
    return ", ".join(filter(None, (target, cudnn and f"cuDNN {cudnn}", torch["cpu"], *libraries)))
