"""torch: whether it can be imported, what it was built for, and what it sees."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from anybatch.doctor.facts import CudaDevice, Torch

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def look() -> Torch:
    """See `Torch`."""
    try:
        import torch
    except Exception as error:  # half an installation raises anything
        return Torch(fault=_first_line(error))
    folder = str(Path(getattr(torch, "__file__", None) or next(iter(torch.__path__), "")).parent)
    if not hasattr(torch, "Tensor") or not hasattr(torch, "__version__"):
        return Torch(fault="it is another module of this name", folder=folder)
    from torch import distributed

    devices, cuda_fault = _devices(torch)
    has_nccl = distributed.is_available() and distributed.is_nccl_available()
    return Torch(
        version=str(torch.__version__),
        folder=folder,
        cuda=torch.version.cuda or "",
        hip=torch.version.hip or "",
        architectures=_architectures(torch),
        cpu=torch.backends.cpu.get_cpu_capability(),
        cudnn=_cudnn_version(torch),
        libraries=tuple(
            name
            for name in ("mkl", "mkldnn", "openmp")
            if getattr(torch.backends, name).is_available()
        ),
        threads=torch.get_num_threads(),
        backends=_backends(distributed),
        nccl=_nccl_version(torch) if has_nccl else "",
        devices=devices,
        cuda_fault=cuda_fault,
        allocator_fault=_allocator_fault(torch),
    )


def _backends(distributed: Any) -> tuple[str, ...]:
    if not distributed.is_available():
        return ()
    names = ("gloo", "nccl", "mpi", "ucc")
    return tuple(name for name in names if getattr(distributed, f"is_{name}_available")())


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
    if not number:
        return ""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _architectures(torch: Any) -> tuple[str, ...]:
    """Also where no device is, unlike `torch.cuda.get_arch_list`."""
    ask = getattr(torch._C, "_cuda_getArchFlags", None)
    return tuple(((ask() if ask else None) or "").split())


def _devices(torch: Any) -> tuple[tuple[CudaDevice, ...], str]:
    """Those that torch sees, and what it says if CUDA cannot be started."""
    if not (torch.version.cuda or torch.version.hip):
        return (), ""
    try:
        torch.cuda.init()
        found: list[CudaDevice] = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            if torch.version.hip:
                capability = str(properties.gcnArchName).partition(":")[0]
            else:
                capability = f"{properties.major}.{properties.minor}"
            found.append(CudaDevice(properties.name, capability, properties.total_memory))
    except Exception as error:
        return (), _first_line(error)
    return tuple(found), ""


def _allocator_fault(torch: Any) -> str:
    """What torch says of the settings. It reads them by itself only where CUDA is used."""
    text = next((told for name in ALLOCATOR_VARIABLES if (told := os.environ.get(name))), "")
    take = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if not text or take is None:
        return ""
    try:
        take(text)
    except Exception as error:
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0].strip()
