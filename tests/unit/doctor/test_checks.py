"""Machines with one thing broken: what the doctor says of it."""

from __future__ import annotations

import builtins
import json
import os
import resource
import socket
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from anybatch.doctor import checks
from anybatch.doctor.finding import Finding
from anybatch.process import control_group, process_memory, threads
from anybatch.process.control_group import Group

ROOT = Path(__file__).parents[3]
GIB = 1 << 30

Check = Callable[[], Iterator[Finding]]


@pytest.fixture(autouse=True)
def well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where all is well, whatever this one has."""
    for name in list(os.environ):
        if name.startswith(
            ("NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_", "MASTER_", "TORCH", "PYTORCH_")
        ):
            monkeypatch.delenv(name)
    memory = SimpleNamespace(total=64 * GIB, available=60 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(control_group, "group_here", Group)
    monkeypatch.setattr(threads, "num_cores", lambda: 8)
    monkeypatch.setattr(checks, "gpus_on_bus", lambda: 0)
    monkeypatch.setattr(checks, "gpus_here", lambda: 0)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")


def told(check: Check, name: str, level: str, *words: str) -> Finding:
    """The only finding of `check` that is not well, which is this one."""
    (found,) = [one for one in check() if one.name == name]
    assert found.level == level
    assert found.value
    missing = [word for word in words if word.lower() not in found.sentence.lower()]
    assert not missing, found.sentence
    assert found.level in ("ok", "note") or (found.meaning and found.remedy)
    return found


def levels(check: Check) -> set[str]:
    return {one.level for one in check()}


# ------------------------------------------------------------------------------- packages and torch


def installed(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], *requirements: str
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: list(requirements))


def test_packages_that_are_missing_too_old_or_broken_are_named(monkeypatch, tmp_path):
    (tmp_path / "half_installed.py").write_text("raise ImportError('libblas')")
    monkeypatch.syspath_prepend(str(tmp_path))
    versions = {"anybatch": "1", "pydantic": "1.10.9", "half-installed": "2", "json": "1"}
    versions |= {"tensorboard": "2.1", "wandb": "0.20"}
    asked = ("torch>=2.11", "pydantic>=2", "half-installed", "json")
    extras = ("submitit", "slurm"), ("tensorboard>=2.15", "board"), ("wandb", "board")
    optional = (f"{name}; extra == '{extra}'" for name, extra in extras)
    installed(monkeypatch, versions, *asked, *optional)
    told(checks.packages, "torch", "problem", "needs it", "'torch>=2.11'")
    told(checks.packages, "pydantic", "problem", "needs 2 or later", "'pydantic>=2'")
    told(checks.packages, "half-installed", "problem", "libblas", "--force-reinstall")
    slurm = told(checks.packages, "[slurm]", "note", "anybatch[slurm]")
    assert slurm.value == "no submitit"
    early = told(checks.packages, "[board]", "warning", "needs 2.15 or later of tensorboard")
    assert early.value == "tensorboard 2.1, wandb 0.20"
    assert not [one for one in checks.packages() if one.name == "json"]
    installed(monkeypatch, {}, *asked)
    told(checks.packages, "anybatch", "note", "not installed")
    monkeypatch.setenv("PATH", "")
    told(checks.packages, "C++ compiler", "note", "--compile", "g++")


def test_the_packages_of_this_interpreter_are_well(monkeypatch: pytest.MonkeyPatch):
    installed(monkeypatch, {"anybatch": "1", "numpy": "2.0"}, "numpy>=1.5")
    told(checks.packages, "packages", "ok")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("libcudart.so.13: cannot open shared object file", ("CUDA is missing", "LD_LIBRARY_PATH")),
        ("No module named 'torch'", ("pip install torch",)),
        ("libtorch_cpu.so: failed to map segment", ("ulimit",)),
        ("/x/libtorch_cpu.so: undefined symbol: iJIT", ("several versions", "LD_PRELOAD")),
        ("something else", ("reinstall torch",)),
    ],
)
def test_a_torch_that_cannot_be_imported_is_a_problem(
    monkeypatch, fault: str, words: tuple[str, ...]
):
    def fail(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise ImportError(fault)
        return importer(name, *rest)

    importer = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", fail)
    found = list(checks.torch())
    monkeypatch.undo()
    told(lambda: iter(found), "torch", "problem", *words)


def fake_torch(**changes: Any) -> SimpleNamespace:
    cuda = SimpleNamespace(
        init=lambda: None, device_count=lambda: 2, get_device_name=lambda index: "A100"
    )
    known = {
        "__version__": "2.13.0+cu130",
        "__file__": f"{sys.prefix}/torch/__init__.py",
        "Tensor": object,
        "version": SimpleNamespace(cuda="13.0", hip=None),
        "cuda": cuda,
    }
    return SimpleNamespace(**{**known, **changes})


def test_versions_and_builds_of_torch_are_judged(monkeypatch: pytest.MonkeyPatch):
    def use(**changes: Any) -> None:
        monkeypatch.setitem(sys.modules, "torch", fake_torch(**changes))

    use()
    assert levels(checks.torch) == {"ok"}
    use(__version__="2.10.1+cu126")
    told(checks.torch, "torch", "problem", "2.11 or later")
    use(__version__="2.14.0")
    told(checks.torch, "torch", "note", "2.11 to 2.13")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__file__="/home/me/torch.py"))
    told(checks.torch, "torch", "problem", "another module", "rename")
    monkeypatch.setattr(checks, "gpus_here", lambda: 2)
    use(version=SimpleNamespace(cuda=None, hip=None))
    told(checks.torch, "torch and CUDA", "warning", "does not use them", "build for CUDA")

    def fail() -> None:
        raise RuntimeError("the driver is too old")

    use(cuda=SimpleNamespace(init=fail))
    told(checks.torch, "torch and CUDA", "problem", "too old", "update the driver", "CUDA 13.0")
    no_device = SimpleNamespace(init=lambda: None, device_count=lambda: 0)
    use(cuda=no_device)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    told(checks.torch, "torch and CUDA", "note", "computes on the CPU")


def test_steps_on_this_cpu_come_out_right():
    told(checks.training_steps, "steps on cpu", "ok")


def test_steps_that_come_out_wrong_are_a_problem(monkeypatch: pytest.MonkeyPatch):
    right = torch.Tensor.sub_
    monkeypatch.setattr(
        torch.Tensor, "sub_", lambda self, other, alpha=1: right(self, other, alpha=alpha * 1.5)
    )
    came = "came to [-5.0, -8.0, -11.0, -14.0], not to [-3.0, -5.0, -7.0, -9.0]"
    told(checks.training_steps, "steps on cpu", "problem", came, "reinstall torch")


def test_a_device_that_is_not_there_is_a_problem():
    found = checks.training_step("cuda:99")
    assert (found.name, found.level) == ("steps on cuda:99", "problem")
    assert "Xid" in found.remedy


@pytest.mark.parametrize(
    ("version", "other", "earlier"),
    [
        ("2.9.1", "2.11", True),
        ("2.11.0+cpu", "2.11", False),
        ("2.11", "2.11.0", False),
        ("2.10.0", "2.11.0", True),
        ("2", "2.0.1", True),
        ("unknown", "2.11", False),
        ("3.0rc1", "2.11", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, other: str, earlier: bool):
    assert checks.is_before(version, other) is earlier


def test_the_versions_of_torch_are_those_that_the_project_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"torch>={checks.LEAST}" in project["dependencies"]
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert any(pin.startswith(f"torch=={checks.TESTED}.") for pin in pins)


def test_every_requirement_of_the_project_is_read():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    written = [f"{one}; extra == 'all'" for name in extras if name != "dev" for one in extras[name]]
    every = [*project["dependencies"], *written]
    assert len(checks.parse(every)) == len(every)
    assert checks.parse(
        ["pyright[nodejs]; extra == 'dev'", 'torchao>=0.18; extra == "torchao"']
    ) == [("torchao", "0.18", "torchao")]


# --------------------------------------------------------------------------------------------- GPUs


class NvmlError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """NVML with two GPUs."""
    fake = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlSystemGetCudaDriverVersion=lambda: 12040,
        nvmlSystemGetDriverVersion=lambda: "550.54.15",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 * GIB, free=79 * GIB),
        nvmlDeviceGetName=lambda handle: "NVIDIA A100",
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [],
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_gpus_are_seen_as_the_driver_shows_them(nvml: SimpleNamespace):
    found = {one.name: one.value for one in checks.gpus()}
    assert levels(checks.gpus) == {"ok"}
    assert found["driver"] == "550.54.15, for CUDA up to 12.4"
    assert found["GPU 1"] == "NVIDIA A100, 79.0 GiB of 80.0 GiB free"


def test_a_driver_that_is_not_reached_says_why(nvml, monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise NvmlError("Driver/library version mismatch")

    nvml.nvmlInit = fail
    assert levels(checks.gpus) == {"ok"}  # there are none
    monkeypatch.setattr(checks, "gpus_on_bus", lambda: 2)
    words = ("2 GPUs are on the bus", "--gpus all", "NVRM", "version mismatch")
    told(checks.gpus, "driver", "warning", *words)


def test_gpus_on_the_bus_are_counted_without_a_driver(tmp_path: Path, monkeypatch):
    monkeypatch.undo()
    for name, vendor, kind in (("0", "0x10de", "0x030200"), ("1", "0x10de", "0x040300")):
        folder = tmp_path / "bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    assert checks.gpus_on_bus(str(tmp_path)) == 1
    assert checks.gpus_on_bus(str(tmp_path / "nowhere")) == 0


def test_a_gpu_that_others_have_is_named_with_them(nvml: SimpleNamespace):
    user = SimpleNamespace(pid=os.getpid())
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: [user] if handle == 0 else []
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=80 * GIB, free=60 * GIB)
    told(checks.gpus, "GPU 0", "warning", "20.0 GiB are held", f"(pid {os.getpid()})")
    user.pid = 1 << 30
    told(checks.gpus, "GPU 0", "warning", "outside this container")

    def not_supported(handle: int) -> None:
        raise NvmlError("Not Supported")

    nvml.nvmlDeviceGetComputeRunningProcesses = not_supported
    told(checks.gpus, "GPU 0", "warning", "20.0 GiB are held by others, not known which")


@pytest.mark.parametrize(
    ("value", "seen", "level", "words"),
    [
        ("7", 0, "problem", ("names 1, of which CUDA shows 0; this machine has 2",)),
        ("1,2", 1, "problem", ("names 2, of which CUDA shows 1",)),
        ("", 0, "warning", ("hides all 2",)),
        ("-1", 0, "warning", ("hides all 2",)),
        ("1,0", 2, "ok", ()),
        ("GPU-1a", 1, "ok", ()),
    ],
)
def test_what_is_made_visible_has_to_be_there(monkeypatch, value, seen, level, words):
    cuda = SimpleNamespace(
        init=lambda: None, device_count=lambda: seen, get_device_name=lambda index: "A100"
    )
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda=cuda))
    monkeypatch.setattr(checks, "gpus_here", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    told(checks.torch, "CUDA_VISIBLE_DEVICES", level, *words)
    monkeypatch.setattr(checks, "gpus_here", lambda: 0)
    told(checks.torch, "CUDA_VISIBLE_DEVICES", "ok")


# --------------------------------------------------------------------------- cores, memory, folders


def test_less_than_the_machine_has_is_told(monkeypatch: pytest.MonkeyPatch):
    check = checks.cores_and_memory
    told(check, "memory", "ok")
    told(check, "cores", "ok")
    group = Group(limit_bytes=8 * GIB, used_bytes=15 << 29, file="/f", cores=2.5, oom_kills=2)
    monkeypatch.setattr(control_group, "group_here", lambda: group)
    told(check, "cores", "warning", "8 threads", "OMP_NUM_THREADS=2")
    told(check, "limit of the group", "warning", "nearly all", "give the group more")
    told(check, "killed for memory", "note", "ran out", "--memory")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    told(check, "cores", "ok")
    memory = SimpleNamespace(total=64 * GIB, available=GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    told(check, "memory", "warning", "nearly all")
    monkeypatch.setattr(control_group, "group_here", lambda: Group(63 * GIB, GIB, "/f"))
    told(check, "limit of the group", "ok")


def test_limits_of_the_shell_are_told(monkeypatch: pytest.MonkeyPatch):
    limits = {
        resource.RLIMIT_DATA: (GIB, -1),
        resource.RLIMIT_AS: (4 * GIB, -1),
        resource.RLIMIT_NOFILE: (256, 512),
    }
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[kind])
    monkeypatch.setattr(checks, "_enforcement", lambda: Finding("budget on the CPU", "enforced"))
    told(checks.cores_and_memory, "RLIMIT_DATA", "warning", "data", "ulimit -d")
    told(checks.cores_and_memory, "RLIMIT_AS", "warning", "addresses", "ulimit -v")
    told(checks.cores_and_memory, "open files", "warning", "by a file", "ulimit -n 512")
    limits[resource.RLIMIT_NOFILE] = (256, 256)
    told(checks.cores_and_memory, "open files", "warning", "as root")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has it")
def test_little_shared_memory_is_told(monkeypatch: pytest.MonkeyPatch):
    def have(total: int, free: int) -> None:
        monkeypatch.setattr(os, "access", lambda *_: total > 0)
        usage = SimpleNamespace(total=total, free=free)
        monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: usage)

    have(64 << 20, 64 << 20)
    told(checks.cores_and_memory, "/dev/shm", "warning", "refused if it is full", "--shm-size")
    have(GIB, 1 << 20)
    told(checks.cores_and_memory, "/dev/shm", "warning", "have left there")
    have(0, 0)
    told(checks.cores_and_memory, "/dev/shm", "warning", "--shm-size")
    have(GIB, GIB)
    told(checks.cores_and_memory, "/dev/shm", "ok")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux measures it")
def test_whether_the_kernel_measures_peaks(monkeypatch: pytest.MonkeyPatch):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    told(checks.cores_and_memory, "budget on the CPU", "ok")
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    monkeypatch.setattr(process_memory, "status", lambda field: 1 << 30)  # a peak that stays
    told(checks.cores_and_memory, "budget on the CPU", "warning", "32 MiB was measured as 0 MiB")
    monkeypatch.setattr(process_memory, "reset_peak", lambda: False)
    told(checks.cores_and_memory, "budget on the CPU", "warning", "does not begin a new peak")


def test_folders_are_written_to_and_left_as_they_were(tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    told(checks.folders, "runs", "ok")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    told(checks.folders, "cache", "warning", "cannot be written to", "XDG_CACHE_HOME")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    usage = SimpleNamespace(total=GIB, free=1 << 20)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: usage)
    told(checks.folders, "runs", "warning", "nearly full", "--out")

    def nowhere() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    told(checks.folders, "temporary files", "problem", "TMPDIR")


# ------------------------------------------------------------------------------------ several ranks


def test_builds_without_backends_are_a_problem(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "_meet", lambda: "refused")
    told(checks.gloo, "gloo", "problem", "could not meet", "refused")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    told(checks.gloo, "backends", "problem", "no NCCL", "2 GPUs")
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    told(checks.gloo, "backends", "problem", "no gloo")


def test_a_network_that_is_broken_is_told(monkeypatch: pytest.MonkeyPatch):
    assert levels(checks.network) <= {"ok"}
    monkeypatch.setattr(checks, "loopback_fault", lambda: "unreachable")
    told(checks.network, "loopback", "problem", "lo up")

    def unknown(name: str, port: int | None) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    told(checks.network, "host name", "warning", "no address", "/etc/hosts")
    monkeypatch.setenv("MASTER_ADDR", "node9")
    told(checks.network, "MASTER_ADDR", "problem", "leads nowhere (Name or service not known)")


def test_variables_of_launchers_have_to_agree(monkeypatch: pytest.MonkeyPatch):
    told(checks.network, "started as", "ok")
    monkeypatch.setenv("WORLD_SIZE", "2")
    told(checks.network, "started as", "problem", "RANK is not set")
    monkeypatch.setenv("RANK", "1")
    assert told(checks.network, "started as", "ok").value == "rank 1 of 2, by torchrun"


def test_the_port_where_rank_0_listens_has_to_be_free(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        told(checks.network, "MASTER_PORT", "warning", "something listens", "another port")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
        told(checks.network, "MASTER_PORT", "problem", "rank 0 cannot")
        # Others listen there as they should: rank 0, or the agent of torchrun.
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        assert levels(checks.network) == {"ok"}
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
        monkeypatch.setenv("RANK", "1")
        assert levels(checks.network) == {"ok"}
    monkeypatch.setenv("MASTER_PORT", "70000")
    told(checks.network, "MASTER_PORT", "problem", "1 to 65535")


def test_this_machine_reaches_itself():
    assert checks.loopback_fault() == ""


# -------------------------------------------------------------------------------------- environment


@pytest.mark.parametrize(
    ("name", "value", "level", "words"),
    [
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "warning", ("is off",)),
        ("OMP_NUM_THREADS", "64", "warning", ("8 cores", "set it to 8")),
        ("OMP_NUM_THREADS", "many", "warning", ("not a number",)),
        ("CUBLAS_WORKSPACE_CONFIG", "big", "warning", (":4096:8",)),
        ("CUDA_LAUNCH_BLOCKING", "1", "warning", ("waits for each kernel",)),
        ("NVIDIA_TF32_OVERRIDE", "1", "warning", ("TensorFloat-32 whatever",)),
        ("NVIDIA_TF32_OVERRIDE", "0", "warning", ("nothing is in TensorFloat-32",)),
        ("NCCL_P2P_DISABLE", "1", "warning", ("by way of the host",)),
        ("NCCL_DEBUG", "INFO", "note", ("slower",)),
        ("TORCHDYNAMO_DISABLE", "1", "note", ("--compile",)),
        ("NCCL_P2P_LEVEL", "NVL", "ok", ()),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "ok", ()),
        ("OMP_NUM_THREADS", "8", "ok", ()),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8:16:8", "ok", ()),
        ("CUDA_LAUNCH_BLOCKING", "0", "ok", ()),
    ],
)
def test_variables_are_judged(
    monkeypatch, name: str, value: str, level: str, words: tuple[str, ...]
):
    monkeypatch.setenv(name, value)
    assert told(checks.environment, name, level, *words).value == repr(value)


def test_only_variables_that_matter_are_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("API_TOKEN", "secret")
    (found,) = checks.environment()
    assert (found.name, found.level) == ("variables", "ok")
    assert "secret" not in json.dumps([found.value, found.sentence])
