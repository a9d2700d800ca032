"""Checks whether `/dev/shm` has room for the batches that worker processes hand over.

A worker that writes beyond the end of a full `/dev/shm` is killed by a bus error, without any message.
A container has 64 MiB of shared memory by default. If little is free, the size of a batch is therefore
estimated from one sample before workers are started.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from anybatch.data.fetch import Piece, Request
from anybatch.data.microbatch import map_leaves
from anybatch.errors import DataError
from anybatch.units import format_bytes

SHM = Path("/dev/shm")

_AHEAD = 2
"""Batches that each worker may have fetched and not handed over: torch's `prefetch_factor`."""

_PLENTY = 4 << 30
"""If at least this many bytes are free, nothing is estimated, and no sample is loaded for it."""


def check_shared_memory(
    fetch: Callable[[Request], Any], request: Request, num_workers: int, shm: Path = SHM
) -> None:
    """Warns if the batches that `num_workers` prefetch, each like `request`, might not fit into `shm`.

    Raises `DataError` if not even one batch per worker fits.
    """
    free = _free_bytes(shm)
    if free is None or free >= _PLENTY:
        return
    size = _batch_bytes(fetch, request)
    least, most = num_workers * size, num_workers * size * _AHEAD
    if most <= free:
        return
    told = (
        f"the {num_workers} worker processes that load samples hand over batches of about"
        f" {format_bytes(size)} in {shm}, of which {format_bytes(free)} are free, and may have"
        f" {format_bytes(most)} there at a time; where it is full a worker is killed by a bus error."
    )
    remedy = "make it larger (docker run --shm-size), or use fewer num_workers, or num_workers=0"
    if least > free:
        raise DataError(f"{told} {remedy[0].upper()}{remedy[1:]}.")
    warnings.warn(f"{told} If that happens, {remedy}.", stacklevel=2)


def _batch_bytes(fetch: Callable[[Request], Any], request: Request) -> int:
    """Returns the size of the batch of `request` if all its samples are as large as the first; 0 if the
    first cannot be loaded alone."""
    first = request[0]
    try:
        sample = fetch([Piece(first.epoch, first.indices[:1])])
    except Exception:  # the worker that loads it reports the error
        return 0
    sizes: list[int] = []

    def count(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            sizes.append(leaf.nbytes)
        return leaf

    map_leaves(sample, count)
    return sum(sizes) * sum(len(piece.indices) for piece in request)


def _free_bytes(shm: Path) -> int | None:
    """Returns the free bytes in `shm`; None if there is no such folder."""
    try:
        found = os.statvfs(shm)
    except (OSError, AttributeError):  # the latter on Windows
        return None
    return found.f_bavail * found.f_frsize
