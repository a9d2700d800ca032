"""Link: how fast the ranks add up what each of them has, measured before a plan is made for them.

Sums of growing size cross the group that gradients are going to cross, in buckets like theirs:

    bytes    1 Ki |  4 Ki | 16 Ki | ...    up to 16 Mi over gloo, 64 Mi over NCCL
    rounds    1+8 |   1+8 |   1+8 | ...    fewer of what takes long; none of what would take too long

After the first round of a size, and after the others, one small sum tells all ranks what the slowest of
them took, so that all go on, or stop, alike, and come to the same figures.
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
"""Bytes of the sums."""

_SECONDS_OF_SIZE = 0.1
"""For the sums of one size after the first; larger ones are left out where one takes longer."""

_ROUNDS = 8
"""Of one size after the first, which counts only where there is no time for others: its memory is new,
or, the other way round, what limits the rate of a cable lets the beginning through at once."""

_connected: WeakSet[dist.ProcessGroup | None] = WeakSet()
"""Groups over NCCL that have connected for sums of all sizes."""

_DEADLINE = timedelta(seconds=60)
"""After which a rank that does not answer is lost: all of them were there a moment before."""


def measured_link(device: torch.device) -> Link | None:
    """What joins the ranks of the default group, the same on all of them, which call it together. What
    memory it takes, up to 16 MiB over gloo and 64 MiB over NCCL, it gives back.

    Args:
        device: of this rank, from which it exchanges gradients.

    Returns None if a rank has no memory for it, or what was measured tells no speed.

    Raises:
        PeerLost: a rank is gone, or does not answer.
        RankLost: this one ran out of memory while ranks spoke to each other.
    """
    with _together("while the exchange between ranks was measured", device):
        seen = list(_timed(device))
    if len(seen) < 2:
        return None
    # The smallest takes no longer than others, unless it was disturbed.
    least = seen[0][0], min(seconds for _, seconds in seen)
    return Link.through(least, seen[-1], dist.get_world_size())


def connect(device: torch.device) -> None:
    """Let NCCL connect the ranks of the default group, which call it together, for sums of all sizes.
    It takes buffers for them, beside torch's allocator. Gloo did so when the group was made.

    Raises what `measured_link` raises.
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
    """What is to be added up, in growing sizes, alike on all ranks; nothing if one has no memory."""
    sizes = _SIZES[device.type]
    memory = _taken(sizes[-1], device)
    (missing,) = _of_the_slowest([float(memory is None)], device)  # and who comes last is here now
    if memory is None or missing:
        return []
    bucket = CPU_BUCKET_BYTES if device.type == "cpu" else BUCKET_BYTES
    sums = [memory[: size // memory.itemsize].split(bucket // memory.itemsize) for size in sizes]
    if device.type == "cuda":
        # NCCL connects the ranks anew for every algorithm that it uses for the first time, and chooses
        # by size: that may take longer than all rounds of one.
        for flats in sums:
            _seconds_of(flats, device)
        _connected.add(dist.group.WORLD)
    return sums


def _timed(device: torch.device) -> Iterator[tuple[int, float]]:
    """(bytes, seconds) of sums, in growing sizes, alike on all ranks; none if one has no memory."""
    for flats in _sums(device):
        (first,) = _of_the_slowest([_seconds_of(flats, device)], device)
        rounds = min(_ROUNDS, int(_SECONDS_OF_SIZE / first))
        others = [_seconds_of(flats, device) for _ in range(rounds)]
        # What other processes take of a round is no part of the link.
        seconds = min(_of_the_slowest(others, device)) if others else first
        yield sum(flat.nbytes for flat in flats), seconds
        if seconds > _SECONDS_OF_SIZE:
            return


def _taken(num_bytes: int, device: torch.device) -> Tensor | None:
    """Memory that is written to, so that it is there; None where there is no room for it."""
    try:
        return torch.empty(num_bytes // 4, dtype=torch.float32, device=device).zero_()
    except Exception as error:
        if as_memory_failure(error) is None:
            raise
        return None


def _seconds_of(flats: Sequence[Tensor], device: torch.device) -> float:
    """That this rank waits until `flats` are added up."""
    begun = time.perf_counter()
    _wait([dist.all_reduce(flat, async_op=True) for flat in flats], device)
    return time.perf_counter() - begun


def _of_the_slowest(own: Sequence[float], device: torch.device) -> list[float]:
    """For each place the largest number of all ranks."""
    told = torch.tensor(own, dtype=torch.float64, device=device)
    _wait([dist.all_reduce(told, dist.ReduceOp.MAX, async_op=True)], device)
    return told.tolist()


def _wait(works: Sequence[Any], device: torch.device) -> None:
    if device.type == "cpu":
        for work in works:
            work.wait(_DEADLINE)
        return
    # With a deadline NCCL asks only every so often whether it is done; it has its own, of the group.
    for work in works:
        work.wait()
    torch.cuda.synchronize(device)
