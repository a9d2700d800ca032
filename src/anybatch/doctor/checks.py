"""The checks. Each examines a part of this machine and yields findings. A check runs in a child
process, where it may hang or crash, so the parts that are most likely to do so come last."""

from __future__ import annotations

import importlib
import math
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from importlib import metadata
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Any, NamedTuple

from anybatch.doctor.finding import Finding, Level
from anybatch.units import format_bytes

LEAST, TESTED = "2.11", "2.13"
"""Minimum version of torch, and latest version that anybatch has been tested with."""

VISIBLE = "CUDA_VISIBLE_DEVICES"

_LITTLE = 0.1
"""Fraction of memory. Less available memory, or more GPU memory held by others, is a warning."""

_MISSING = "not installed"
_GET_STARTED = "https://pytorch.org/get-started/locally"
_REINSTALL = f"reinstall torch ({_GET_STARTED})"
_LOOPBACK_SECONDS, _GLOO_SECONDS = 3.0, 60.0


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# ------------------------------------------------------------------------------- packages and torch


def packages() -> Iterator[Finding]:
    yield Finding("Python", f"{platform.python_version()}, {sys.executable}")
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("system", ", ".join(filter(None, (system, " ".join(platform.libc_ver())))))
    yield _compiler()
    folder = str(Path(__file__).parents[1])
    try:
        version, requirements = metadata.version("anybatch"), metadata.requires("anybatch") or []
    except metadata.PackageNotFoundError:
        meaning = "it is found, but not installed, so it is not known which packages it needs"
        yield Finding("anybatch", folder, "note", meaning, "install it with pip")
        return
    yield Finding("anybatch", _with_folder(version, folder))
    asked = parse(requirements)
    needed = [(name, least) for name, least, extra in asked if not extra]
    faults = [found for name, least in needed if (found := _package(name, least))]
    if not faults:
        yield Finding("packages", f"all {len(needed)} that anybatch needs")
    yield from faults
    for extra in dict.fromkeys(extra for _, _, extra in asked if extra):
        yield _extra(extra, [(name, least) for name, least, of in asked if of == extra])


def _extra(extra: str, packages: list[tuple[str, str]]) -> Finding:
    """The finding for optional packages that are installed together."""
    faults = [found for name, least in packages if (found := _package(name, least, imported=False))]
    missing = {one.name for one in faults if one.value == _MISSING}
    words = (
        f"no {name}" if name in missing else f"{name} {metadata.version(name)}"
        for name, _ in packages
    )
    name, value, remedy = f"[{extra}]", ", ".join(words), f"pip install 'anybatch[{extra}]'"
    early = [f"{one.meaning} of {one.name}" for one in faults if one.name not in missing]
    if early:
        return Finding(name, value, "warning", " and ".join(early), remedy)
    return Finding(name, value, "note", "", remedy) if missing else Finding(name, value)


def _compiler() -> Finding:
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    found = next((path for name in names if name and (path := shutil.which(name))), "")
    remedy = "if you want that, install g++, or name one in CXX"
    if found:
        return Finding("C++ compiler", found)
    return Finding("C++ compiler", "none", "note", "--compile needs one on a CPU", remedy)


_REQUIREMENT = re.compile(
    r"([\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([\d.]+))?\s*(?:;\s*extra\s*==\s*['\"]([\w-]+)['\"])?\s*"
)
"""The forms of requirements that are used in pyproject.toml."""


def parse(requirements: list[str]) -> list[tuple[str, str, str]]:
    """(name, minimum version, extra) of each requirement, except those for development."""
    matches = filter(None, map(_REQUIREMENT.fullmatch, requirements))
    found = [(match[1], match[2] or "", match[3] or "") for match in matches]
    return [one for one in found if one[2] != "dev"]


def is_before(version: str, other: str) -> bool:
    """Whether `version` is earlier than `other`, if both can be parsed: `2.13.0+cpu` is (2, 13)."""
    found = [re.match(r"\d+(?:\.\d+)*?(?=(?:\.0+)*(?![.\d]))", one) for one in (version, other)]
    one, two = ([*map(int, it[0].split("."))] if it else [] for it in found)
    return bool(one and two) and one < two


def _package(name: str, least: str, imported: bool = True) -> Finding | None:
    """The problem with a package, or None. torch, which may crash, has a separate check."""
    install = f"pip install '{name}{'>=' * bool(least)}{least}'"
    version = "broken"
    try:
        version = metadata.version(name)
        if is_before(version, least):
            return Finding(name, version, "problem", f"anybatch needs {least} or later", install)
        if imported and name != "torch":
            importlib.import_module("pynvml" if name == "nvidia-ml-py" else name.replace("-", "_"))
    except metadata.PackageNotFoundError:
        return Finding(name, _MISSING, "problem", "anybatch needs it", install)
    except Exception as error:
        meaning = f"it cannot be imported ({first_line(error)})"
        remedy = f"pip install --force-reinstall {name}"
        return Finding(name, version, "problem", meaning, remedy)
    return None


def _with_folder(version: str, folder: str) -> str:
    """The version of a package, and its folder unless it belongs to the interpreter."""
    return version if folder.startswith(sys.prefix) else f"{version}, {folder}"


_RAISE_LIMITS = "raise the limits of this process (ulimit -v, ulimit -d)"
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
"""(pattern, remedy): remedies by a pattern in the error of importing torch."""


def torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:  # a partial installation may raise anything
        fault = first_line(error)
        remedy = next((it for words, it in _CAUSES if re.search(words, fault)), _REINSTALL)
        yield Finding("torch", "cannot be imported", "problem", fault.rstrip("."), remedy)
        return
    folder = str(Path(getattr(torch, "__file__", None) or next(iter(torch.__path__), "")).parent)
    if not hasattr(torch, "Tensor") or not hasattr(torch, "__version__"):
        remedy = "rename that, or run anybatch from another folder"
        meaning = "another module has its name"
        yield Finding("torch", "not torch", "problem", meaning, remedy, folder)
        return
    version = str(torch.__version__)
    value = _with_folder(version, folder)
    if is_before(version, LEAST):
        meaning = f"anybatch needs {LEAST} or later"
        yield Finding("torch", value, "problem", meaning, f"pip install 'torch>={LEAST}'")
    elif is_before(TESTED, ".".join(version.split(".")[:2])):
        meaning = f"tested are {LEAST} to {TESTED}: predictions may be further off"
        yield Finding("torch", value, "note", meaning)
    else:
        yield Finding("torch", value)
    if torch.version.cuda or torch.version.hip:
        yield _usable(torch)
        if VISIBLE in os.environ:
            yield _visible(os.environ[VISIBLE], torch.cuda.device_count(), gpus_here())
    elif gpus_here():
        meaning = "there are GPUs here, and torch does not use them"
        remedy = f"install its build for CUDA: {_GET_STARTED}"
        yield Finding("torch and CUDA", "built for CPUs", "warning", meaning, remedy)


def _usable(torch: Any) -> Finding:
    """The finding for the GPUs that torch can use."""
    name, fault = "torch and CUDA" if torch.version.cuda else "torch and ROCm", ""
    try:
        torch.cuda.init()
        names = [torch.cuda.get_device_name(it) for it in range(torch.cuda.device_count())]
        if names:
            return Finding(name, f"{len(names)} seen: {', '.join(dict.fromkeys(names))}")
    except Exception as error:
        fault = first_line(error)
    if (count := gpus_here()) and VISIBLE not in os.environ:
        meaning = f"this machine has {count}, and torch can use none" + f" ({fault})" * bool(fault)
        needed = f"if it is older than CUDA {torch.version.cuda}; else restart the machine"
        return Finding(name, "no device seen", "problem", meaning, f"update the driver {needed}")
    return Finding(name, "no device seen", "note", "torch computes on the CPU")


def training_steps() -> Iterator[Finding]:
    """Run two small training steps on each device."""
    import torch

    for device in ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))):
        yield training_step(device)


def training_step(device: str) -> Finding:
    """Run two training steps on a device, and check the exact result: the loss is linear in the
    weights, so each step changes them by the learning rate times the column sums of the samples."""
    import torch

    name, fault, expected = f"steps on {device}", "", [-3.0, -5.0, -7.0, -9.0]
    try:
        layer = torch.nn.Linear(4, 3).to(device)
        torch.nn.init.ones_(layer.weight)
        samples = torch.arange(8.0, device=device).reshape(2, 4)
        for _ in range(2):  # without torch.optim, which loads the compiler
            gradients = torch.autograd.grad(layer(samples).sum(), list(layer.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.5)
        image = torch.ones(1, 1, 4, 4, device=device)
        sums = torch.nn.functional.conv2d(image, image[..., :3, :3])
        if layer.weight.tolist() != [expected] * 3:
            fault = f"weights came to {layer.weight[0].tolist()}, not to {expected}"
        elif not torch.equal(sums, torch.full_like(sums, 9.0)):
            fault = f"a convolution came to {sums.flatten().tolist()}, and not to 9 everywhere"
    except Exception as error:
        fault = first_line(error)
    if not fault:
        return Finding(name, "two small ones came out right")
    remedy = (
        "see the group GPUs; else set CUDA_LAUNCH_BLOCKING=1, look for Xid in dmesg, and restart the"
        " machine"
    )
    if "no kernel image" in fault:
        remedy = f"install a build of torch for this GPU ({_GET_STARTED})"
    remedy = _REINSTALL if device == "cpu" else remedy
    meaning = f"two small steps of training failed ({fault})"
    return Finding(name, "wrong or failed", "problem", meaning, remedy)


# --------------------------------------------------------------------------------------------- GPUs


def gpus() -> Iterator[Finding]:
    """NVIDIA GPUs as reported by NVML, including those hidden by `CUDA_VISIBLE_DEVICES`."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        driver = pynvml.nvmlSystemGetDriverVersion()
    except Exception as error:
        yield _no_driver(first_line(error))
        return
    value = f"{driver}, for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"
    yield Finding("driver", value)
    for index, handle in enumerate(handles):
        yield _gpu(pynvml, index, handle)


def gpus_on_bus(sys: str = "/sys") -> int:
    """Number of NVIDIA display controllers on the PCI bus, which is known without a driver."""

    def text(path: Path) -> str:
        with suppress(OSError):
            return path.read_text(encoding="utf-8", errors="replace")
        return ""

    return sum(
        text(device / "vendor").startswith("0x10de") and text(device / "class").startswith("0x03")
        for device in Path(sys).glob("bus/pci/devices/*")
    )


def gpus_here() -> int:
    """Number of NVIDIA GPUs: from the driver, or from the PCI bus if the driver cannot be reached."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount()
    except Exception:
        return gpus_on_bus()


def _no_driver(fault: str) -> Finding:
    count = gpus_on_bus()
    if not count:
        return Finding("driver", "none, and no GPU of NVIDIA")
    are = "GPUs are" if count > 1 else "GPU is"
    meaning = f"{count} {are} on the bus of this machine, and NVML reaches no driver ({fault})"
    remedy = (
        "in a container, add docker run --gpus all; else install NVIDIA's driver, or restart the "
        "machine after its update, or look for NVRM in dmesg"
    )
    return Finding("driver", "not reached", "warning", meaning, remedy)


def _visible(text: str, seen: int, there: int) -> Finding:
    """Compare the number of GPUs that a variable names with that which torch sees."""
    level: Level = "warning"
    named = len(text.split(","))
    if not there or named == seen:
        return Finding(VISIBLE, repr(text))
    if text.strip() in ("", "-1"):
        remedy = "unset it, unless that is meant"
        meaning = f"it hides all {there} GPUs from torch, which computes on the CPU"
    else:
        level, remedy = "problem", "name GPUs that are here, each once, or unset it"
        meaning = f"it names {named}, of which CUDA shows {seen}; this machine has {there}"
    return Finding(VISIBLE, repr(text), level, meaning, remedy, "environment")


def _gpu(nvml: Any, index: int, handle: Any) -> Finding:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    free, total = format_bytes(memory.free), format_bytes(memory.total)
    held = memory.total - memory.free
    name, value = f"GPU {index}", f"{nvml.nvmlDeviceGetName(handle)}, {free} of {total} free"
    if held > _LITTLE * memory.total:
        users = ""
        with suppress(nvml.NVMLError):  # not supported by this GPU or driver
            users = _users(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        meaning = f"{format_bytes(held)} are held by {users or 'others, not known which'}"
        remedy = "end what you no longer need; plans are made for 90% of what is free"
        return Finding(name, value, "warning", meaning, remedy)
    return Finding(name, value)


def _users(processes: Any) -> str:
    import psutil

    found: list[str] = []
    for one in processes:
        name = "a process outside this container"
        with suppress(psutil.Error):
            name = psutil.Process(one.pid).name()
        found.append(f"{name} (pid {one.pid})")
    return ", ".join(found)


# --------------------------------------------------------------------------- cores, memory, folders


def cores_and_memory() -> Iterator[Finding]:
    import psutil

    from anybatch.process.control_group import group_here

    group, memory = group_here(), psutil.virtual_memory()
    yield _cores(group.cores)
    free, total = format_bytes(memory.available), format_bytes(memory.total)
    value, remedy = f"{free} of {total} available", "end what you no longer need"
    if memory.available < _LITTLE * memory.total:
        meaning = "other processes have nearly all of it"
        yield Finding("memory", value, "warning", meaning, remedy)
    else:
        yield Finding("memory", value)
    limit, used = group.limit_bytes, group.used_bytes
    if limit is not None and limit < memory.total:
        value = f"{format_bytes(limit)}, {format_bytes(used)} in use"
        if limit - used < _LITTLE * limit:
            meaning = "other processes of the group have nearly all of it"
            remedy += ", or give the group more"
            yield Finding("limit of the group", value, "warning", meaning, remedy, group.file)
        else:
            yield Finding("limit of the group", value)
    if group.oom_kills:
        value = f"{group.oom_kills} process{'es' * (group.oom_kills > 1)} of the control group"
        meaning = "since the group was made, the kernel has ended them because its memory ran out"
        remedy = "give --memory, so that runs are refused memory in good time"
        yield Finding("killed for memory", value, "note", meaning, remedy)
    if sys.platform != "win32":
        yield from _limits()
    if sys.platform == "linux":
        yield _shm()
    yield _enforcement()


def _cores(quota: float | None) -> Finding:
    from anybatch.process.threads import num_cores

    own, text = num_cores(), os.environ.get("OMP_NUM_THREADS", "")
    threads = int(text) if text.isdecimal() else own
    value = f"{own} of {os.cpu_count()} for this process"
    if quota is not None and quota < own:
        value += f", {quota:g} at a time"
        if threads > math.ceil(quota):
            meaning = (
                f"torch's {threads} threads wait for each other when the group's time is used up"
            )
            remedy = f"set OMP_NUM_THREADS={max(1, math.floor(quota))}, or give the group more"
            return Finding("cores", value, "warning", meaning, remedy, "control group")
    return Finding("cores", value)


def _limits() -> Iterator[Finding]:
    import resource

    for name, flag, what in (("RLIMIT_DATA", "-d", "data"), ("RLIMIT_AS", "-v", "addresses")):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            meaning = f"the {what} of a process may not grow beyond that"
            if name == "RLIMIT_AS":
                meaning += "; libraries reserve far more addresses than they fill, CUDA above all"
            remedy = f"ulimit {flag} unlimited, and --memory for a budget"
            yield Finding(name, format_bytes(soft), "warning", meaning, remedy)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 1024:
        most = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
        meaning = "workers that load data hand over each tensor by a file"
        remedy = f"ulimit -n {most}" if most > soft else "raise the hard limit, as root"
        value = f"{soft} at a time"
        yield Finding("open files", value, "warning", meaning, remedy, "RLIMIT_NOFILE")


def _shm() -> Finding:
    meaning = "workers that load data pass batches through it, and are refused if it is full"
    remedy = "docker run --shm-size 8g, mount -o remount,size=8G /dev/shm, or load without workers"
    if not os.access("/dev/shm", os.W_OK):
        return Finding("/dev/shm", "not there, or not to be written to", "warning", meaning, remedy)
    found = shutil.disk_usage("/dev/shm")
    value = f"{format_bytes(found.free)} of {format_bytes(found.total)} free"
    if found.total >= 256 << 20 and found.free < 64 << 20:
        remedy = "delete what ended processes have left there, or load without workers"
    if found.total < 256 << 20 or found.free < 64 << 20:
        return Finding("/dev/shm", value, "warning", meaning, remedy)
    return Finding("/dev/shm", value)


def _enforcement(num_bytes: int = 32 << 20) -> Finding:
    """Whether the kernel measures memory peaks, which are used to enforce budgets on a CPU: reset the
    peak, map and write `num_bytes`, unmap them, and read the peak."""
    from anybatch.process.process_memory import reset_peak, status

    fault = "the kernel does not begin a new peak of the memory of a process when it is asked to"
    if reset_peak():
        before = status("VmRSS")
        with mmap(-1, num_bytes) as fresh:  # the heap may hold freed memory, which is resident
            for start in range(0, num_bytes, PAGESIZE):
                fresh[start] = 1
        grown = status("VmHWM") - before
        fault = ""
        if grown < 0.9 * num_bytes:
            fault = f"a peak of {num_bytes >> 20} MiB was measured as {grown >> 20} MiB"
    name, value = "budget on the CPU", "enforced: the kernel measures the peak of each pass"
    if fault:
        meaning = f"{fault}, so a run may go beyond --memory"
        remedy = "use Linux, and let this process write to /proc/self/clear_refs"
        return Finding(name, "cannot be enforced", "warning", meaning, remedy)
    return Finding(name, value)


_NOT_KEPT = (
    "what was measured is not kept, so each plan measures anew, and no run corrects the next"
)
_BY_FILES = "ranks are started with the help of files there"


def folders() -> Iterator[Finding]:
    """The folders that anybatch writes to, each tested by writing to it."""
    from anybatch.process.files import cache_folder

    runs, elsewhere = "runs go there without --out", "give --out, or train elsewhere"
    set_cache = "set XDG_CACHE_HOME to a writable folder"
    yield _folder("runs", lambda: Path.cwd() / "runs", 2 << 30, "warning", runs, elsewhere)
    yield _folder("cache", cache_folder, 16 << 20, "warning", _NOT_KEPT, set_cache)
    set_tmp = "set TMPDIR to a writable folder"
    tmp = "temporary files", lambda: Path(tempfile.gettempdir()), 16 << 20
    yield _folder(*tmp, "problem", _BY_FILES, set_tmp)


def _folder(
    name: str, find: Callable[[], Path], least: int, level: Level, meaning: str, remedy: str
) -> Finding:
    """Test a folder. If it does not exist yet, the folder in which it would be created is tested."""
    value = "none"
    try:
        folder = find()
        value = str(folder)
        place = next((one for one in (folder, *folder.parents) if one.exists()), folder)
        free = shutil.disk_usage(place).free
        value = f"{folder}, {format_bytes(free)} free"
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"a")
            file.flush()
    except OSError as error:
        meaning = f"it cannot be written to ({error.strerror or error}): {meaning}"
        return Finding(name, value, level, meaning, remedy)
    if free < least:
        return Finding(name, value, "warning", f"the disk is nearly full: {meaning}", remedy)
    return Finding(name, value)


# ------------------------------------------------------------------------------------ several ranks


def gloo() -> Iterator[Finding]:
    """The backends of torch.distributed, tested with two processes on this machine that connect as
    ranks do and sum a tensor."""
    import torch
    from torch import distributed

    there = distributed.is_available()
    names = [
        it
        for it in ("gloo", "nccl", "mpi", "ucc")
        if there and getattr(distributed, f"is_{it}_available")()
    ]
    value, count = ", ".join(names) or "none", torch.cuda.device_count()
    with suppress(Exception):  # an NCCL other than the one that torch was built with
        from torch.cuda import nccl

        version = ".".join(map(str, nccl.version()))
        value = value.replace("nccl", f"nccl {version}")
    if "gloo" not in names:
        meaning = "this build of torch has no gloo, by which ranks speak to each other"
        remedy = f"install a build from {_GET_STARTED} to train on several ranks"
        yield Finding("backends", value, "problem", meaning, remedy)
        return
    if count > 1 and "nccl" not in names:
        meaning = f"this build of torch has no NCCL, by which {count} GPUs exchange gradients"
        remedy = f"install a build for CUDA from {_GET_STARTED}"
        yield Finding("backends", value, "problem", meaning, remedy)
    else:
        yield Finding("backends", value)
    if fault := _meet():
        meaning = f"two processes here could not meet and add up a tensor ({fault.rstrip('.')})"
        remedy = (
            "see the rows below, whether a firewall blocks 127.0.0.1, and whether GLOO_SOCKET_IFNAME"
            " names an interface that is here"
        )
        yield Finding("gloo", "does not work here", "problem", meaning, remedy)
    else:
        yield Finding("gloo", "two processes met and added up a tensor")


def _meet() -> str:
    """Let two processes add up 1 and 2. Returns the reason for a failure; empty: none."""
    from torch import multiprocessing

    if fault := loopback_fault():  # torch would retry for a long time
        return f"this machine does not reach itself at 127.0.0.1: {fault}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.spawn(add_up, (str(Path(folder, "store")),), nprocs=2)
        except Exception as error:  # without the location in gloo's source code
            return re.sub(
                r"\[enforce fail at .*?\] .*?\. ", "", str(error).strip().splitlines()[-1]
            )
    return ""


def add_up(rank: int, file: str) -> None:
    """Check the sum of `rank + 1` over both ranks, over the interface that is selected as in
    `anybatch.launch` for ranks on one machine."""
    import torch
    from torch import distributed

    from anybatch.launch.network import LOOPBACK, interface_to

    if interface := os.environ.get("GLOO_SOCKET_IFNAME") or interface_to(LOOPBACK, 1):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    store, wait = distributed.FileStore(file, 2), timedelta(seconds=_GLOO_SECONDS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
    try:
        number = torch.tensor([rank + 1.0])
        distributed.all_reduce(number)
        distributed.barrier()
        if number.item() != 3.0:
            raise ArithmeticError(f"1 and 2 came to {number.item():g}")
    finally:
        distributed.destroy_process_group()


def loopback_fault() -> str:
    """The reason why this machine cannot connect to itself; empty if it can."""
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
            listener.settimeout(_LOOPBACK_SECONDS)
            with socket.create_connection(listener.getsockname(), _LOOPBACK_SECONDS):
                listener.accept()[0].close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def network() -> Iterator[Finding]:
    """The network of this machine, and the environment variables for ranks and their rendezvous."""
    if fault := loopback_fault():
        meaning = f"ranks of this machine cannot meet at 127.0.0.1 ({fault})"
        yield Finding("loopback", "does not work", "problem", meaning, "ip link set lo up, as root")
    rank, started = _started()
    yield started
    yield from _meeting(rank)
    name = socket.gethostname()
    if fault := _name_fault(name):
        meaning = f"it leads to no address ({fault}), and ranks of several machines look for it"
        remedy = (
            f"add '127.0.1.1 {name}' to /etc/hosts, or give addresses (MASTER_ADDR, --rendezvous)"
        )
        yield Finding("host name", name, "warning", meaning, remedy)
    else:
        yield Finding("host name", name)


def _name_fault(name: str) -> str:
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _started() -> tuple[int | None, Finding]:
    """The rank of this process according to the environment, and a finding with its launcher."""
    from anybatch.errors import InputError
    from anybatch.launch.membership import find

    try:
        found = find()
    except InputError as error:
        meaning, _, remedy = str(error).rstrip(".").rpartition(": ")
        value = "variables of a launcher that do not agree"
        return None, Finding("started as", value, "problem", meaning, remedy, "environment")
    if found is None:
        return None, Finding("started as", "a process by itself")
    return found.rank, Finding(
        "started as", f"rank {found.rank} of {found.world_size}, by {found.launcher}"
    )


def _meeting(rank: int | None) -> Iterator[Finding]:
    """Check the address at which ranks meet, if the environment specifies it."""
    from anybatch.launch.network import is_free, is_here

    host, text = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    port = int(text) if text.isdecimal() and 0 < int(text) < 1 << 16 else None
    if text and port is None:
        meaning, remedy = "a port is a number from 1 to 65535", "correct it, or unset it"
        yield Finding("MASTER_PORT", repr(text), "problem", meaning, remedy, "environment")
    if host and (fault := _name_fault(host)):
        meaning = f"the name leads nowhere ({fault})"
        remedy = "correct it, or give the address of rank 0's machine"
        yield Finding("MASTER_ADDR", repr(host), "problem", meaning, remedy, "environment")
        return
    # Rank 0, or torchrun's agent in its place, listens on the port; for other ranks it must be in use.
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if port and not rank and not by_agent and (not host or is_here(host)) and not is_free(port):
        level: Level = "warning" if rank is None else "problem"
        meaning = f"something listens on port {port} of this machine, so rank 0 cannot"
        remedy = f"end it ('ss -ltnp sport = :{port}' shows it), or choose another port"
        yield Finding("MASTER_PORT", repr(text), level, meaning, remedy, "environment")


# -------------------------------------------------------------------------------------- environment

_ON = r"(?i)(?!\s*(0|false|off|no|n)?\s*$).*"


class Rule(NamedTuple):
    """An environment variable, and the values that lead to a finding.

    Attributes:
        values: regular expression that matches the whole value; by default, any value that enables the
            variable.
    """

    name: str
    level: Level
    meaning: str
    remedy: str = "unset it"
    values: str = _ON


_TF32 = "products are in TensorFloat-32 whatever precision says"
_NO_TF32 = "nothing is in TensorFloat-32, even with --precision tf32"
_USE_PRECISION = "unset it, and use --precision tf32"
_NO_COMPILER = "nothing is compiled, even with --compile"
_UNCACHED = (
    "torch's allocator, which enforces a budget on CUDA and whose bytes are predicted, is off"
)
_WORKSPACE = "torch cannot read it, and uses workspaces of its default size"
_WRITE = "write :4096:8 or :16:8, or unset it"
_BLOCKING = "the CPU waits for each kernel of the GPU: training is slower, often by far"

RULES = (
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", "warning", _UNCACHED),
    Rule("CUBLAS_WORKSPACE_CONFIG", "warning", _WORKSPACE, _WRITE, r"(?!(:\d+:\d+)+$).*"),
    Rule("CUDA_LAUNCH_BLOCKING", "warning", _BLOCKING),
    Rule("NVIDIA_TF32_OVERRIDE", "warning", _TF32, _USE_PRECISION, "1"),
    Rule("NVIDIA_TF32_OVERRIDE", "warning", _NO_TF32, _USE_PRECISION, "0"),
    Rule("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "warning", _TF32, _USE_PRECISION),
    Rule("NCCL_P2P_DISABLE", "warning", "GPUs exchange by way of the host"),
    Rule("NCCL_SHM_DISABLE", "warning", "GPUs of one machine exchange slowly"),
    Rule("NCCL_IB_DISABLE", "note", "InfiniBand is not used between machines"),
    Rule("NCCL_DEBUG", "note", "NCCL logs what it does, and is slower", values="INFO|TRACE"),
    Rule("TORCH_DISTRIBUTED_DEBUG", "note", "each collective is checked: slow", values="DETAIL"),
    Rule("TORCHDYNAMO_DISABLE", "note", _NO_COMPILER),
    Rule("TORCH_COMPILE_DISABLE", "note", _NO_COMPILER),
)

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SHOWN = {
    *(rule.name for rule in RULES),
    *_THREADS,
    "GLOO_SOCKET_IFNAME",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
}
"""Variables that are shown, in addition to those of NCCL. No other values are used here."""


def environment() -> Iterator[Finding]:
    shown = False
    for name, value in sorted(os.environ.items()):
        if name in _SHOWN or name.startswith(("NCCL_", "TORCH_NCCL_")):
            shown = True
            yield _variable(name, value)
    if not shown:
        yield Finding("variables", "none is set that changes what is computed")


def _variable(name: str, value: str) -> Finding:
    if name in _THREADS:
        return _threads(name, value)
    for rule in RULES:
        if rule.name == name and re.fullmatch(rule.values, value):
            words = rule.level, rule.meaning, rule.remedy
            return Finding(name, repr(value), *words, "environment")
    return Finding(name, repr(value))


def _threads(name: str, value: str) -> Finding:
    from anybatch.process.threads import num_cores

    first, cores, meaning = value.split(",")[0].strip(), num_cores(), ""
    if not first.isdecimal() or int(first) == 0:
        meaning = "it is not a number of threads, and ignored"
    elif int(first) > cores:
        meaning = f"these threads share {cores} core{'s' * (cores > 1)}, and wait for each other"
    if not meaning:
        return Finding(name, repr(value))
    remedy = f"set it to {cores}, or unset it"
    return Finding(name, repr(value), "warning", meaning, remedy, "environment")
