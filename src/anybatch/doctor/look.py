"""Looks: what is seen of this machine, as plain values. Each runs in a child process, where it may hang
or crash; `check` judges what they saw.

A value that is not known, or a limit that there is not, is None; a `fault` is empty where all is well.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybatch.doctor.finding import Facts

if TYPE_CHECKING:
    from torch.distributed import Store

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable with the settings of torch's allocator, and its former name."""

_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*(?P<least>[\d.]+))?"
    r"\s*(?:;\s*extra\s*==\s*['\"](?P<extra>[\w-]+)['\"])?\s*"
)
"""The forms that pyproject.toml uses."""

_NAME_SECONDS, _LOOPBACK_SECONDS, _PAIR_SECONDS = 5.0, 3.0, 20.0


def answer() -> None:
    """The child process: look at what its arguments name. What libraries print goes to standard
    error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    name, *arguments = sys.argv[1:]
    try:
        reply = {"seen": _LOOKS[name](*arguments)}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a broken library may raise anything
        reply = {"why": first_line(error)}
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# -------------------------------------------------------------------------------------------- GPUs


def gpus(sys: str = "/sys") -> Facts:
    """NVIDIA's GPUs as NVML shows them, whatever `CUDA_VISIBLE_DEVICES` hides, and their number on the
    PCI bus, which is known without a driver."""
    bus = Path(sys) / "bus/pci/devices"
    on_bus = sum(map(_is_gpu, bus.iterdir())) if bus.is_dir() else None
    found = {"driver": "", "cuda": "", "fault": "", "on_bus": on_bus, "gpus": []}
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
            "gpus": [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())],
        }
    except pynvml.NVMLError as error:
        return {**found, "fault": str(error)}


def _gpu(nvml: Any, index: int) -> Facts:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)

    def ask(question: Callable[..., Any], *arguments: object) -> Any:
        try:
            return question(handle, *arguments)
        except nvml.NVMLError:  # not supported by this GPU or driver
            return None

    ecc, mig = ask(nvml.nvmlDeviceGetEccMode), ask(nvml.nvmlDeviceGetMigMode)
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    modes = {1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
    return {
        "index": index,
        "name": _decoded(nvml.nvmlDeviceGetName(handle)),
        "uuid": _decoded(nvml.nvmlDeviceGetUUID(handle)),
        "total_bytes": memory.total,
        "free_bytes": memory.free,
        "ecc": bool(ecc[0]) if ecc else None,
        "errors": ask(nvml.nvmlDeviceGetTotalEccErrors, *kinds),
        "mig": bool(mig[0]) if mig else None,
        "compute_mode": modes.get(ask(nvml.nvmlDeviceGetComputeMode), "default"),
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


# ------------------------------------------------------------------------- cores, memory, folders


def host() -> Facts:
    """Cores and memory of the machine, and what of them this process may use."""
    import psutil

    from anybatch.process.control_group import group_here
    from anybatch.process.threads import num_cores

    group, memory = group_here(), psutil.virtual_memory()
    shm = None
    if hasattr(os, "statvfs") and os.access("/dev/shm", os.W_OK):
        shm = os.statvfs("/dev/shm")
    mallocs = r"lib(?:jemalloc|tcmalloc|mimalloc|snmalloc|hoard)[\w.+-]*"
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
        "limits": _limits(),
        "shm_bytes": shm and shm.f_blocks * shm.f_frsize,
        "shm_free_bytes": shm and shm.f_bavail * shm.f_frsize,
        "mallocs": sorted(set(re.findall(mallocs, _text("/proc/self/maps")))),
    }


def _limits() -> dict[str, list[int | None]]:
    """The soft and the hard limit by name."""
    if sys.platform == "win32":
        return {}
    import resource

    names = ("RLIMIT_DATA", "RLIMIT_AS", "RLIMIT_NOFILE")
    found = {it: resource.getrlimit(getattr(resource, it)) for it in names if hasattr(resource, it)}
    none = resource.RLIM_INFINITY
    return {it: [None if one == none else one for one in both] for it, both in found.items()}


def enforcement(left: int = 32 << 20, asked: int = 256 << 20) -> Facts:
    """Whether the kernel refuses memory beyond a limit on data, by which budgets on a CPU are enforced:
    set one that has `left` bytes, ask for more, and set it back."""
    if sys.platform != "linux":
        return {"fault": f"no limit on the data of a process is enforced by {sys.platform}"}
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    counted = re.search(r"^VmData:\s+(\d+)", _text("/proc/self/status"), re.MULTILINE)
    if counted is None:
        raise OSError("/proc/self/status has no VmData")
    limit = (int(counted[1]) << 10) + left
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
        bytearray(asked)
    except MemoryError:
        return {"fault": ""}
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return {"fault": f"{asked >> 20} MiB were had under a limit that left {left >> 20} MiB"}


def folders() -> Facts:
    """The folders that are written to, each tested by writing to it."""
    from anybatch.process.files import cache_folder

    try:
        temporary = _folder(Path(tempfile.gettempdir()))
    except OSError as error:
        temporary = {"path": "", "fault": _words(error), "free_bytes": None}
    runs, cache = _folder(Path.cwd() / "runs"), _folder(cache_folder())
    return {"runs": runs, "cache": cache, "temporary": temporary}


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
        fault = _words(error)
    return {"path": str(folder), "fault": fault, "free_bytes": free}


# ------------------------------------------------------------------------------- packages and torch


def python() -> Facts:
    """The interpreter, the system, and the packages that anybatch asks for, needed ones first."""
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
        "packages": [_package(package) for package in parse(requirements)],
    }


def parse(requirements: list[str]) -> list[Facts]:
    """Name, extra and least version of these requirements, without those for development."""
    matches = filter(None, map(_REQUIREMENT.fullmatch, requirements))
    found = [{key: text or "" for key, text in match.groupdict().items()} for match in matches]
    kept = [one for one in found if one["extra"] != "dev"]
    return sorted(kept, key=lambda one: one["extra"] != "")


def _package(package: Facts) -> Facts:
    """With its version, and for a needed one why it cannot be imported. torch, which may crash, has a
    look of its own."""
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


def torch() -> Facts:
    """torch: why it cannot be imported, or how it was built and which devices it sees."""
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
    try:
        torch.cuda.init()
        seen = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return [{"name": one.name, "total_bytes": one.total_memory} for one in seen], ""
    except Exception as error:
        return [], first_line(error)


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


def step(device: str) -> Facts:
    """Two steps of training on a device, whose result is known to the last bit: the loss is linear in
    the weights, so each step moves them by the rate times the sums of the columns of the samples."""
    import torch

    fault, expected = "", [-3.0, -5.0, -7.0, -9.0]
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
    return {"device": device, "fault": fault}


# ------------------------------------------------------------------------------------ several ranks


def network() -> Facts:
    """The network of this machine, and what the environment says of ranks and of where they meet."""
    import psutil

    from anybatch.errors import InputError
    from anybatch.launch.membership import find
    from anybatch.launch.network import is_free, is_here, joined

    membership, launcher_fault = None, ""
    try:
        membership = find()
    except InputError as error:
        launcher_fault = str(error)
    name = socket.gethostname()
    address, name_fault = _resolve(name)
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    host, text = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    port = int(text) if text.isdecimal() and 0 < int(text) < 1 << 16 else None
    host_fault = _resolve(host)[1] if host else ""
    here = not host or (not host_fault and is_here(host))
    return {
        "name": name,
        "address": address,
        "name_fault": name_fault,
        "loopback_fault": loopback_fault(),
        "interfaces": {
            name: [one.address for one in addresses if one.family in families]
            for name, addresses in psutil.net_if_addrs().items()
            if name in up
        },
        "master": {
            "host": host,
            "port": port,
            "host_fault": host_fault,
            "here": here,
            "port_free": is_free(port) if here and port else None,
            "place": joined(host or "this machine", port) if port else host,
        },
        "launcher": membership.launcher if membership else "",
        "rank": membership.rank if membership else None,
        "world_size": membership.world_size if membership else None,
        "launcher_fault": launcher_fault,
    }


def _resolve(name: str) -> tuple[str, str]:
    """The address of a name, or why there is none. A resolver may take its time."""
    from anybatch.launch.network import Deadline

    try:
        found = Deadline(_NAME_SECONDS).within(lambda: socket.getaddrinfo(name, None))
    except OSError as error:
        return "", _words(error)
    return (str(found[0][4][0]), "") if found else ("", f"no answer within {_NAME_SECONDS:g} s")


def loopback_fault() -> str:
    """Why this machine does not reach itself; empty: it does."""
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
            listener.settimeout(_LOOPBACK_SECONDS)
            with socket.create_connection(listener.getsockname(), _LOOPBACK_SECONDS):
                listener.accept()[0].close()
    except OSError as error:
        return _words(error)
    return ""


def pair() -> Facts:
    """Two processes of this machine that meet, as ranks do, and add up a tensor by gloo."""
    if fault := loopback_fault():  # torch would try for long
        fault = f"this machine does not reach itself at 127.0.0.1: {fault}"
        return {"interface": "", "fault": fault}
    from anybatch.launch.network import LOOPBACK, Deadline, meet

    with subprocess.Popen(
        [sys.executable, "-c", "from anybatch.doctor.look import second; second()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as peer:
        try:
            store = meet(LOOPBACK, 0, "host", Deadline(_PAIR_SECONDS), listen=LOOPBACK)
            assert peer.stdin is not None
            peer.stdin.write(f"{store.port}\n")
            peer.stdin.flush()
            found, interface = _add_up(0, store)
            fault = "" if found == 3.0 else f"1 and 2 came to {found:g}"
            return {"interface": interface, "fault": fault}
        except Exception as error:  # without the place in the sources of gloo
            fault = re.sub(r"\[enforce fail at .*?\] .*?\. ", "", first_line(error))
            return {"interface": "", "fault": fault}
        finally:
            peer.kill()


def second() -> None:
    """The second process of a pair."""
    from anybatch.launch.network import LOOPBACK, Deadline, meet

    line = sys.stdin.readline()
    if line:  # else the first is gone
        _add_up(1, meet(LOOPBACK, int(line), "guest", Deadline(_PAIR_SECONDS)))


def _add_up(rank: int, store: Store) -> tuple[float, str]:
    """The sum over both ranks of their number from 1, and the interface that they are joined by, as
    `anybatch.launch` joins ranks of one machine."""
    import torch
    from torch import distributed

    from anybatch.launch.network import LOOPBACK, interface_to

    interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_to(LOOPBACK, 1) or ""
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    wait = timedelta(seconds=_PAIR_SECONDS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=wait)
    try:
        number = torch.tensor([rank + 1.0])
        distributed.all_reduce(number)
        distributed.barrier()
        return number.item(), interface
    finally:
        distributed.destroy_process_group()


_LOOKS: dict[str, Callable[..., Facts]] = {
    look.__name__: look
    for look in (gpus, host, enforcement, folders, network, python, torch, step, pair)
}
