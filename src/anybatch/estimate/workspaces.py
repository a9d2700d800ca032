"""Workspaces: what cuBLAS takes of torch's CUDA allocator, by rule, since a trace does not see it.

torch gives each of cuBLAS's handles a workspace when it first multiplies on a stream, and keeps it. A
handle belongs to a thread: forward has one, and backward, which runs on autograd's, has another.
Their sizes are torch's (`aten/src/ATen/cuda/CublasHandlePool.cpp`; its documentation, "CUDA semantics:
cuBLAS workspaces"): 32 MiB from compute capability 9 on, 8.125 MiB before; on ROCm 128 MiB for the
MI300 and its followers, and 32 MiB for others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace

from anybatch.estimate.family import Traced
from anybatch.estimate.trace import Block
from anybatch.machine import Device

WORKSPACES = "libraries' workspaces"
"""Their kind."""

PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
"""How the names of operations begin that cuBLAS computes."""

_LARGE, _SMALL, _ROCM_LARGE = 32 << 20, (2 * 4096 + 8 * 16) << 10, 128 << 20
_CONFIG = "CUBLAS_WORKSPACE_CONFIG"


def with_workspaces(traced: Traced, device: Device) -> Traced:
    """`traced` with the workspaces of its first product in forward and in backward, which stay."""
    if device.kind != "cuda":
        return traced
    size = workspace_bytes(device)
    blocks = [Block(size, at, "compute", None, WORKSPACES) for at in _first_products(traced)]
    timeline = replace(traced.timeline, blocks=[*traced.timeline.blocks, *blocks])
    return replace(traced, timeline=timeline)


def workspace_bytes(device: Device) -> int:
    """Bytes of one workspace; as a newer device has it where its capability is not known."""
    if device.present and (given := os.environ.get(_CONFIG)):
        pairs = re.findall(r":(\d+):(\d+)", given)
        if pairs:
            return sum(int(size) * int(count) for size, count in pairs) << 10
    if device.capability.startswith("gfx"):
        return _ROCM_LARGE if device.capability in ("gfx942", "gfx950") else _LARGE
    major = device.capability.partition(".")[0]
    return _SMALL if major.isdigit() and int(major) < 9 else _LARGE


def _first_products(traced: Traced) -> Iterator[int]:
    """The moments of the first product outside backward, and of the first in it."""
    missing = {False, True}
    for moment, operation in enumerate(traced.timeline.operations, 1):
        if operation.backward in missing and operation.name.startswith(PRODUCTS):
            missing.remove(operation.backward)
            yield moment
            if not missing:
                return
