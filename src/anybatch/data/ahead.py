"""Batches on their device, copied one ahead of the one in use.

On the CPU nothing moves. On CUDA each batch is pinned and copied on a stream of its own, so the
copy of the next goes on while the current one is computed with:

    copies    | batch 0 | batch 1 | batch 2 |
    compute             | batch 0 ..... | batch 1 ..... |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anybatch.data.microbatch import map_leaves, to_device

_END = object()


def on_device(batches: Iterator[Any], device: torch.device | str) -> Iterator[Any]:
    """The batches with their tensors on `device`; for the CPU the iterator itself.

    On CUDA up to two batches are on the device at once: let go of this iterator before a step is
    redone, so that the one ahead is freed.
    """
    target = torch.device(device)
    if target.type == "cpu":
        return batches
    if target.type != "cuda":
        return (to_device(batch, target) for batch in batches)
    return _copied_ahead(batches, target)


def _copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    copies = torch.cuda.Stream(device)
    ahead = _copy(batches, device, copies)
    while ahead is not _END:
        batch = ahead
        compute = torch.cuda.current_stream(device)
        # 1. Computing waits for the copy of this batch, not for that of the next.
        compute.wait_stream(copies)
        # 2. Its memory belongs to the stream of copies; it must not be reused before computing is
        #    done with it.
        map_leaves(batch, lambda leaf, stream=compute: _record(leaf, stream))
        # 3. The next one is on its way while this one is in use.
        ahead = _copy(batches, device, copies)
        yield batch
        del batch  # else it would live on while the next one is waited for


def _copy(batches: Iterator[Any], device: torch.device, stream: torch.cuda.Stream) -> Any:
    """The next batch, its copy to `device` begun on `stream`; `_END` if there is none."""
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
        leaf.record_stream(stream)
    return leaf
