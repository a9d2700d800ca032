"""Driver: what a process holds on a CUDA device beside the tensors of a run: of the driver, and of
torch's allocator."""

from __future__ import annotations

import gc
import os
from functools import cache

import torch

TYPICAL_CONTEXT_BYTES = 832 << 20
"""Context and kernels: 828 MiB in runs on an H200 with CUDA 13 (benchmarks/results/gpu.md). Drivers of
2022 and 2023 showed 256 to 670 MiB (pull requests 86509 of PyTorch and 9413 of InvokeAI)."""

_LATER_BYTES = 128 << 20
"""Kernels are loaded when they are first used, and few are by the time that the context is measured."""

_MOST_BYTES = 2 << 30
"""More is no context, but what other processes hold and the driver does not tell apart."""


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
    # In a container the driver may not know our number: then what is missing is taken as ours.
    free, total = torch.cuda.mem_get_info(device)
    return total - free


@cache
def context_bytes(index: int) -> int:
    """Bytes of this process's context on the CUDA device of that number, with what its kernels will
    take; measured once, when a product and a convolution have loaded theirs."""
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
    """Bytes that this process holds on a CUDA device beside torch's allocator: context, kernels,
    libraries; with `later`, what it will take yet. A typical figure where the driver does not tell this
    process from others."""
    held = process_bytes_on(device) - torch.cuda.memory_reserved(device)
    return held + later if 0 < held <= _MOST_BYTES else TYPICAL_CONTEXT_BYTES


def release_unused(device: torch.device) -> None:
    """Let torch's allocator give back to the driver whatever segments nobody uses, so that what is
    taken next does not depend on what was taken before. Of reference cycles only young ones are looked
    for: all of them took 0.2 s on the host of an H200."""
    gc.collect(1)
    with torch.cuda.device(device):
        torch.cuda.empty_cache()


def release_workspaces(device: torch.device) -> None:
    """Let cuBLAS give up its workspaces on `device`, which it takes anew when it needs them, and
    torch's allocator whatever nobody uses then. Those that a script's own passes took may lie in
    segments of gigabytes, none of which could be given back."""
    torch._C._cuda_clearCublasWorkspaces()
    release_unused(device)


def take_workspaces(device: torch.device) -> None:
    """Let cuBLAS and cuBLASLt have their workspaces on `device`, in this thread, which is forward's,
    and in backward's. They keep them for good; taken before anything else, they lie beside the
    tensors of a run, not between them."""
    if device.type != "cuda":
        return
    weight = torch.ones(16, 16, device=device, requires_grad=True)

    def forward() -> torch.Tensor:
        return torch.nn.functional.linear(weight, weight, weight[0])

    def again(_gradient: torch.Tensor) -> None:  # in backward's thread, as recompute does
        torch.add(weight, 1)  # a first kernel: cuBLAS warns of a thread without a CUDA context
        forward()

    result = forward()
    result.register_hook(again)
    result.sum().backward()
