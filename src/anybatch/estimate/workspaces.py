"""Workspaces: memory that libraries take on a CUDA device, computed by rule, since a trace does not
see it.

**cuBLAS** takes its workspaces from PyTorch's allocator: each of its handles gets a workspace when
it first multiplies on a stream. A handle belongs to a thread: forward has one, and backward, which
runs on autograd's thread, has another. A run takes all of them first
(`process.cuda_driver.take_workspaces`). In torch 2.11 each thread has an additional workspace of
1 MiB (`CUBLASLT_WORKSPACE_SIZE`) for products with a bias. From 2.15 on the two threads keep none,
unless `TORCH_CUBLAS_WORKSPACE_CACHE` is 1: each product takes one while it runs, which is counted
here as one that is kept. The other sizes are PyTorch's (`aten/src/ATen/cuda/CublasHandlePool.cpp`;
its documentation, "CUDA semantics: cuBLAS workspaces"): 32 MiB from compute capability 9 on (in
torch 2.11 only for 9), otherwise 8.125 MiB; on ROCm 128 MiB for the MI300 and its successors, and
32 MiB for others.

**NCCL** takes its buffers from the driver, outside of the allocator. A connection to a neighbor
takes 12 MiB on each channel: three protocols of 4 MiB (`NCCL_BUFFSIZE`), 4.7 and 0.5 MiB, each side
in units of 2 MiB (`src/transport/p2p.cc`; its issue 1685 lists the allocations). An all-reduce
creates the connections of a ring and of a tree when it first runs, over 24 channels between devices
on NVLink and over 2 on PCIe (from its log). A switch that reduces (NVLink SHARP, from compute
capability 9 on) takes 256 MiB more on a node of eight. With two A100, 544 MiB were measured, with
more 688 (its issue 964).
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

import torch

from anybatch.estimate.family import Traced
from anybatch.estimate.trace import Block
from anybatch.machine import Device

WORKSPACES = "libraries' workspaces"
"""The kind of these bytes."""

PRODUCTS = ("aten.mm.", "aten.addmm", "aten.bmm.", "aten.baddbmm")
"""Name prefixes of the operations that cuBLAS computes."""

_CONNECTION, _CONNECTIONS, _SWITCHED = 12 << 20, 2, 256 << 20
_NVLINK, _NVLINK_CHANNELS, _PCIE_CHANNELS = 1e11, 24, 2
"""Figures of NCCL. A link counts as NVLink from `_NVLINK` bytes per second on."""

_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
_UNIFIED = (2, 12)  # since this version cuBLASLt shares the workspaces of cuBLAS
_RELEASED = (2, 15)  # since this version none is kept
_LT = 1 << 20  # workspace of cuBLASLt, if it does not share those of cuBLAS

_LARGE, _SMALL, _ROCM_LARGE = 32 << 20, (2 * 4096 + 8 * 16) << 10, 128 << 20
_CONFIG, _CACHE = "CUBLAS_WORKSPACE_CONFIG", "TORCH_CUBLAS_WORKSPACE_CACHE"


def with_workspaces(traced: Traced, device: Device) -> Traced:
    """Return `traced` with the workspaces of cuBLAS, which a run takes before anything else."""
    if device.kind != "cuda":
        return traced
    blocks = [Block(size, 0, "setup", None, WORKSPACES) for size in workspaces_of(device)]
    timeline = replace(traced.timeline, blocks=[*blocks, *traced.timeline.blocks])
    return replace(traced, timeline=timeline)


def workspaces_of(device: Device) -> tuple[int, ...]:
    """Return the bytes of each workspace that a run takes, in its two threads."""
    size = workspace_bytes(device)
    if _TORCH < _UNIFIED:
        return (size, _LT) * 2
    is_kept = device.capability.startswith("gfx") or os.environ.get(_CACHE) == "1"
    return (size, size) if _TORCH < _RELEASED or is_kept else (size,)


def workspace_bytes(device: Device) -> int:
    """Return the bytes of one workspace; if the compute capability is not known, those on a newer
    device."""
    if device.present and (given := os.environ.get(_CONFIG)):
        pairs = re.findall(r":(\d+):(\d+)", given)
        if pairs:
            return sum(int(size) * int(count) for size, count in pairs) << 10
    if device.capability.startswith("gfx"):
        return _ROCM_LARGE if device.capability in ("gfx942", "gfx950") else _LARGE
    major = device.capability.partition(".")[0]
    if not major.isdigit():
        return _LARGE
    return _LARGE if int(major) == 9 or (int(major) > 9 and _TORCH >= _UNIFIED) else _SMALL


def communicator_bytes(device: Device) -> int:
    """Return the bytes of NCCL's buffers on one of several devices, for sums over ranks; 0 if ranks
    communicate through another library."""
    if device.kind != "cuda" or device.capability.startswith("gfx"):
        return 0
    if device.rates.link_bytes < _NVLINK:
        return _CONNECTION * _CONNECTIONS * _PCIE_CHANNELS
    major = device.capability.partition(".")[0]
    switched = _SWITCHED if not major.isdigit() or int(major) >= 9 else 0
    return _CONNECTION * _CONNECTIONS * _NVLINK_CHANNELS + switched
