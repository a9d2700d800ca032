"""Driver: memory that a process holds on a CUDA device in addition to the tensors of a run: that of
the driver, and of torch's allocator."""

from __future__ import annotations

import gc
import os
from functools import cache

import torch

TYPICAL_CONTEXT_BYTES = 832 << 20
"""Memory of context and kernels: 828 MiB in runs on an H200 with CUDA 13
(benchmarks/results/gpu.md). Drivers of 2022 and 2023 used 256 to 670 MiB (pull requests 86509 of
PyTorch and 9413 of InvokeAI)."""

_LATER_BYTES = 128 << 20
"""For kernels that are loaded later: kernels are loaded on first use, and few are loaded when the
context is measured."""

_MOST_BYTES = 2 << 30
"""A larger value is not that of a context, but includes memory of other processes, which the driver
does not distinguish."""


def process_bytes_on(device: torch.device) -> int:
    """Bytes that this process holds on a CUDA device."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        )
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
    except pynvml.NVMLError:
        pass
    # In a container the driver may not know this process ID: then all used memory is counted.
    free, total = torch.cuda.mem_get_info(device)
    return total - free


@cache
def context_bytes(index: int) -> int:
    """Bytes of this process's context on the CUDA device with that index, plus what its kernels
    will take. Measured once, after a matrix product and a convolution have loaded their kernels."""
    device = torch.device("cuda", index)
    matrix = torch.ones(64, 64, device=device, requires_grad=True)
    image = torch.ones(1, 8, 16, 16, device=device)
    weight = torch.ones(8, 8, 3, 3, device=device, requires_grad=True)
    result = torch.nn.functional.conv2d(image, weight).sum() + (matrix @ matrix).sum()
    result.backward()
    torch.cuda.synchronize(device)
    del matrix, image, weight, result
    release_unused(device)
    return beside_bytes(device, _LATER_BYTES)


def beside_bytes(device: torch.device, later: int = 0) -> int:
    """Bytes that this process holds on a CUDA device outside torch's allocator (context, kernels,
    libraries), plus `later`, which it has yet to take. A typical value if the driver does not
    distinguish this process from others."""
    held = process_bytes_on(device) - torch.cuda.memory_reserved(device)
    return held + later if 0 < held <= _MOST_BYTES else TYPICAL_CONTEXT_BYTES


def release_unused(device: torch.device) -> None:
    """Make torch's allocator return unused segments to the driver, so that later allocations do not
    depend on earlier ones. Only young reference cycles are collected: collecting all of them took
    0.2 s on the host of an H200."""
    gc.collect(1)
    with torch.cuda.device(device):
        torch.cuda.empty_cache()


def release_workspaces(device: torch.device) -> None:
    """Release cuBLAS's workspaces on `device`, which it allocates again when it needs them, and
    then all unused segments of torch's allocator. Workspaces from a script's own passes may be in
    segments of gigabytes, which could not be returned otherwise."""
    torch._C._cuda_clearCublasWorkspaces()
    release_unused(device)


def take_workspaces(device: torch.device) -> None:
    """Make cuBLAS and cuBLASLt allocate their workspaces on `device`, in this thread, which runs
    forward, and in the thread of backward. Both libraries keep them permanently. If they are
    allocated first, they are not located between the tensors of a run."""
    if device.type != "cuda":
        return
    weight = torch.ones(16, 16, device=device, requires_grad=True)

    def forward() -> torch.Tensor:
        return torch.nn.functional.linear(weight, weight, weight[0])

    def again(_gradient: torch.Tensor) -> None:  # runs in the backward thread, as recompute does
        torch.add(weight, 1)  # a first kernel: cuBLAS warns of a thread without a CUDA context
        forward()

    result = forward()
    result.register_hook(again)
    result.sum().backward()
