"""What checks see, of this machine and of made-up files."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anybatch.doctor import look

GIB = 1 << 30


@pytest.fixture
def files(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Write files with these texts below a root."""

    def write(texts: dict[str, str]) -> Path:
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return write


# ---------------------------------------------------------------------------------------------- GPUs


class NvmlError(Exception):
    pass


def nvml(**changes: object) -> SimpleNamespace:
    """NVML with one GPU, of which one thing is not known."""

    def not_supported(*arguments: object) -> None:
        raise NvmlError("Not Supported")

    known = {
        "NVMLError": NvmlError,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_VOLATILE_ECC": 0,
        "nvmlInit": lambda: None,
        "nvmlSystemGetCudaDriverVersion": lambda: 12040,
        "nvmlSystemGetDriverVersion": lambda: b"550.54.15",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=24 * GIB, free=23 * GIB),
        "nvmlDeviceGetName": lambda handle: "NVIDIA RTX A5000",
        "nvmlDeviceGetUUID": lambda handle: "GPU-1",
        "nvmlDeviceGetEccMode": lambda handle: [1, 1],
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 2,
        "nvmlDeviceGetMigMode": not_supported,
        "nvmlDeviceGetComputeMode": lambda handle: 3,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            SimpleNamespace(pid=1 << 30, usedGpuMemory=None)
        ],
    }
    return SimpleNamespace(**{**known, **changes})


def test_gpus_are_seen_as_the_driver_shows_them(
    monkeypatch: pytest.MonkeyPatch, files: Callable[[dict[str, str]], Path]
):
    root = files(
        {
            "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de",
            "sys/bus/pci/devices/0000:01:00.0/class": "0x030200",
            "sys/bus/pci/devices/0000:01:00.1/vendor": "0x10de",
            "sys/bus/pci/devices/0000:01:00.1/class": "0x040300",
        }
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    seen = look.gpus(str(root / "sys"))
    assert (seen["driver"], seen["cuda"]) == ("550.54.15", "12.4")
    assert seen["on_bus"] == 1
    (gpu,) = seen["gpus"]
    assert (gpu["name"], gpu["free_bytes"]) == ("NVIDIA RTX A5000", 23 * GIB)
    assert (gpu["ecc"], gpu["errors"], gpu["mig"]) == (True, 2, None)
    assert gpu["compute_mode"] == "exclusive process"
    assert gpu["users"] == [{"pid": 1 << 30, "name": "", "num_bytes": None}]


def test_a_driver_that_is_not_reached_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def fail() -> None:
        raise NvmlError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=fail))
    seen = look.gpus(str(tmp_path))
    assert (seen["driver"], seen["fault"], seen["on_bus"]) == ("", "Driver Not Loaded", None)


# ------------------------------------------------------------------------------- packages and torch


def test_requirements_are_read_and_those_for_development_left_out():
    found = look.parse(
        [
            "submitit; extra == 'slurm'",
            "torch>=2.11",
            'torchao>=0.18; extra == "torchao"',
            "pyright[nodejs]; extra == 'dev'",
            "numpy",
        ]
    )
    assert [(one["name"], one["extra"], one["least"]) for one in found] == [
        ("torch", "", "2.11"),
        ("numpy", "", ""),
        ("submitit", "slurm", ""),
        ("torchao", "torchao", "0.18"),
    ]


def test_the_packages_of_this_interpreter_can_be_imported():
    seen = look.python()
    needed = [one for one in seen["packages"] if not one["extra"]]
    assert {"torch", "numpy", "nvidia-ml-py"} <= {one["name"] for one in needed}
    assert [one for one in needed if one["version"] is None or one["fault"]] == []


def test_torch_is_seen_as_it_is(monkeypatch: pytest.MonkeyPatch):
    for name in look.ALLOCATORS:
        monkeypatch.delenv(name, raising=False)
    seen = look.torch()
    assert (seen["fault"], seen["version"]) == ("", torch.__version__)
    assert Path(torch.__file__).parent == Path(seen["folder"])
    assert "gloo" in seen["backends"]
    assert seen["allocator_fault"] == ""


def test_torch_itself_reads_the_settings_of_its_allocator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:5")
    assert "max_split_size_mb too small" in look.torch()["allocator_fault"]


def test_steps_on_this_cpu_come_out_right():
    assert look.step("cpu") == {"device": "cpu", "fault": ""}


def test_steps_that_come_out_wrong_are_a_fault(monkeypatch: pytest.MonkeyPatch):
    right = torch.Tensor.sub_
    monkeypatch.setattr(
        torch.Tensor, "sub_", lambda self, other, alpha=1: right(self, other, alpha=alpha * 1.5)
    )
    assert (
        "came to [-5.0, -8.0, -11.0, -14.0], not to [-3.0, -5.0, -7.0, -9.0]"
        in look.step("cpu")["fault"]
    )


def test_a_device_that_is_not_there_is_a_fault():
    seen = look.step("cuda:99")
    assert seen["device"] == "cuda:99"
    assert seen["fault"]


# -------------------------------------------------------------------------- host, network, folders


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux enforces it")
def test_the_kernel_refuses_memory_and_the_limit_is_put_back():
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert look.enforcement() == {"fault": ""}
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_cores_and_memory_are_those_of_this_process():
    seen = look.host()
    assert 1 <= seen["own_cores"] <= seen["cores"]
    assert 0 < seen["available_bytes"] <= seen["total_bytes"]


def test_a_port_where_somebody_listens_is_not_free(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        seen = look.network()["master"]
    assert (seen["host"], seen["port"], seen["here"]) == ("127.0.0.1", port, True)
    assert seen["port_free"] is False


def test_variables_of_starters_that_do_not_agree_are_a_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen = look.network()
    assert "RANK is not set" in seen["launcher_fault"]
    monkeypatch.setenv("RANK", "1")
    seen = look.network()
    assert (seen["launcher_fault"], seen["launcher"], seen["rank"]) == ("", "torchrun", 1)


def test_this_machine_reaches_itself():
    assert look.loopback_fault() == ""


def test_folders_are_written_to_and_left_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    seen = look.folders()
    assert seen["cache"]["fault"]
    assert (seen["runs"]["path"], seen["runs"]["fault"]) == (str(tmp_path / "runs"), "")
    assert seen["runs"]["free_bytes"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
