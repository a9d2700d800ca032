"""Copies batches to their device, one ahead of the batch in use.

On the CPU nothing is copied. On CUDA each batch is pinned and copied on a separate stream, so that the
copy of the next batch overlaps with the computation on the current one:

    copies    | batch 0 | batch 1 | batch 2 |
    compute             | batch 0 ..... | batch 1 ..... |
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anybatch.data.batch_slices import map_leaves, to_device

_END = object()


def on_device(batches: Iterator[Any], device: torch.device | str) -> Iterator[Any]:
    """Returns the batches with their tensors on `device`; for the CPU, the iterator itself.

    On CUDA, memory is needed for two batches, regardless of their number. The next batch is fetched and
    copied when the caller, having enqueued the computation on the current one, requests it. Drop this
    iterator before a step is redone, so that the batch it holds is freed.
    """
    target = torch.device(device)
    if target.type == "cpu":
        return batches
    if target.type != "cuda":
        return (to_device(batch, target) for batch in batches)
    return _copied_ahead(batches, target)


def _copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    copies = _stream_of_copies(device)
    before: torch.Event | None = None
    batch = _copy(batches, device, copies)
    while batch is not _END:
        compute = torch.cuda.current_stream(device)
        # 1. The compute stream waits for the copy of this batch.
        compute.wait_stream(copies)
        # 2. The memory of this batch belongs to the copy stream; it must not be reused before the
        #    computation on it is done.
        map_leaves(batch, lambda leaf, stream=compute: _record(leaf, stream))
        yield batch
        # 3. During the computation on this batch the next one is copied, into the memory of the
        #    previous one. The host may be far ahead of the device, so it waits until the previous
        #    batch is no longer needed.
        done = compute.record_event()
        if before is not None:
            before.synchronize()
        before = done
        batch = _copy(batches, device, copies)


@cache
def _stream_of_copies(device: torch.device) -> torch.cuda.Stream:
    """Returns the copy stream of a device, one per device: torch's allocator reserves the memory of
    each stream for that stream."""
    return torch.cuda.Stream(device)


def _copy(batches: Iterator[Any], device: torch.device, stream: torch.cuda.Stream) -> Any:
    """Fetches the next batch and starts its copy to `device` on `stream`; returns `_END` if there is
    none."""
    batch = next(batches, _END)
    if batch is _END:
        return batch
    # The allocator of pinned memory keeps the source alive until its copy is done.
    pinned = map_leaves(batch, _pinned)
    with torch.cuda.stream(stream):
        return to_device(pinned, device, non_blocking=True)


def _pinned(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.device.type != "cpu" or leaf.is_pinned():
        return leaf
    return leaf.pin_memory()


def _record(leaf: Any, stream: torch.cuda.Stream) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_cuda:
        for part in _dense(leaf):
            part.record_stream(stream)
    return leaf


def _dense(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors that hold the memory of `tensor`."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if tensor.is_nested and tensor.layout is torch.strided:
        return (tensor.values(),)
    return (tensor,)
