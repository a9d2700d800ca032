"""Link: measures the speed of an all-reduce between the ranks, before a plan is made for them.

All-reduces of increasing size run in the group that gradients will use, in buckets of the same size:

    bytes    1 Ki |  4 Ki | 16 Ki | ...    up to 16 Mi over gloo, 64 Mi over NCCL
    rounds    1+8 |   1+8 |   1+8 | ...    fewer if a round is slow; none if it would take too long

After the first round of a size, and after the others, a small all-reduce gives all ranks the time of
the slowest rank, so that they continue or stop together, and obtain the same figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from anybatch.compute.buckets import BUCKET_BYTES, CPU_BUCKET_BYTES
from anybatch.errors import RankLost
from anybatch.oom import as_memory_failure
from anybatch.parallel.vote import calling
from anybatch.plans import Link

_SIZES = {
    "cpu": tuple(1024 * 4**i for i in range(8)),
    "cuda": tuple(1024 * 4**i for i in range(9)),
}
"""Sizes of the all-reduces in bytes."""

_SECONDS_OF_SIZE = 0.1
"""Time for the rounds of one size after the first; larger sizes are skipped if a round takes longer."""

_ROUNDS = 8
"""Rounds of one size after the first. The first counts only if there is no time for others: its memory
is new, or, conversely, a rate limiter of the link passes the first bytes immediately."""

_connected: WeakSet[dist.ProcessGroup | None] = WeakSet()
"""NCCL groups that have connected for all-reduces of all sizes."""

_DEADLINE = timedelta(seconds=60)
"""Time after which a rank that does not answer is considered lost: all were present a moment before."""


def measured_link(device: torch.device) -> Link | None:
    """Measure the link between the ranks of the default group. All ranks call it together, and get the
    same result. Its memory, up to 16 MiB on gloo and 64 MiB on NCCL, is released afterwards.

    Args:
        device: device of this rank, from which it exchanges gradients.

    Returns None if no speed can be derived from the measurement.

    Raises:
        PeerLost: a rank is gone, or does not answer.
        RankLost: this rank ran out of memory while ranks communicated.
    """
    with _together("while the exchange between ranks was measured", device):
        seen = list(_timed(device))
    if len(seen) < 2:
        return None
    # The smallest size takes no longer than the others, unless it was disturbed.
    least = seen[0][0], min(seconds for _, seconds in seen)
    return Link.through(least, seen[-1], dist.get_world_size())


def connect(device: torch.device) -> None:
    """Let NCCL connect the ranks of the default group for all-reduces of all sizes. All ranks call it
    together. NCCL allocates buffers for this outside of torch's allocator. Gloo connects when the group
    is created.

    Raises the same errors as `measured_link`.
    """
    if device.type == "cuda" and dist.group.WORLD not in _connected:
        with _together("while the ranks were connected", device):
            _sums(device)


@contextmanager
def _together(when: str, device: torch.device) -> Iterator[None]:
    with calling(when):
        try:
            yield
        except Exception as error:
            failure = as_memory_failure(error)
            if failure is None:
                raise
            raise RankLost(
                f"memory ran out {when}, so that the others wait for this one: {failure.message}"
            ) from error
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _sums(device: torch.device) -> Sequence[Sequence[Tensor]]:
    """The tensors to all-reduce, in increasing size, the same on all ranks."""
    sizes = _SIZES[device.type]
    memory = torch.empty(sizes[-1] // 4, dtype=torch.float32, device=device).zero_()
    _of_the_slowest([0.0], device)  # waits for the last rank
    bucket = CPU_BUCKET_BYTES if device.type == "cpu" else BUCKET_BYTES
    sums = [memory[: size // memory.itemsize].split(bucket // memory.itemsize) for size in sizes]
    if device.type == "cuda":
        # NCCL connects the ranks again at the first use of each algorithm, and chooses the algorithm by
        # size: this can take longer than all rounds of one size.
        for flats in sums:
            _seconds_of(flats, device)
        _connected.add(dist.group.WORLD)
    return sums


def _timed(device: torch.device) -> Iterator[tuple[int, float]]:
    """(bytes, seconds) of all-reduces, in increasing size, the same on all ranks."""
    for flats in _sums(device):
        (first,) = _of_the_slowest([_seconds_of(flats, device)], device)
        rounds = min(_ROUNDS, int(_SECONDS_OF_SIZE / first))
        others = [_seconds_of(flats, device) for _ in range(rounds)]
        # The minimum excludes time that a round lost to other processes.
        seconds = min(_of_the_slowest(others, device)) if others else first
        yield sum(flat.nbytes for flat in flats), seconds
        if seconds > _SECONDS_OF_SIZE:
            return


def _seconds_of(flats: Sequence[Tensor], device: torch.device) -> float:
    """The time that this rank waits for `flats` to be all-reduced."""
    begun = time.perf_counter()
    _wait([dist.all_reduce(flat, async_op=True) for flat in flats], device)
    return time.perf_counter() - begun


def _of_the_slowest(own: Sequence[float], device: torch.device) -> list[float]:
    """The elementwise maximum over all ranks."""
    speeds = torch.tensor(own, dtype=torch.float64, device=device)
    _wait([dist.all_reduce(speeds, dist.ReduceOp.MAX, async_op=True)], device)
    return speeds.tolist()


def _wait(works: Sequence[Any], device: torch.device) -> None:
    if device.type == "cpu":
        for work in works:
            work.wait(_DEADLINE)
        return
    # With a timeout NCCL polls for completion only at intervals; the group has its own timeout.
    for work in works:
        work.wait()
    torch.cuda.synchronize(device)
