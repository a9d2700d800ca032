"""Compress: gradients that cross the network in 16 bits.

An all-reduce of 16-bit numbers would also add them up in 16 bits, rounding at every hop, so that the
error grows with the number of ranks, and float16 overflows in the middle of a sum. Here only what
crosses is 16 bits wide; sums are made in float32, each piece by the one rank that it belongs to:

              piece 0   piece 1   piece 2
    rank 0   | a0      | a1      | a2      |     every rank rounds its gradients to 16 bits,
    rank 1   | b0      | b1      | b2      |     and sends piece r to rank r            (all-to-all)
    rank 2   | c0      | c1      | c2      |

    rank r:  sum of its pieces in float32, rounded to 16 bits, sent to all              (all-gather)

Two roundings, however many ranks there are, and exactly half the bytes of a float32 ring all-reduce:
2 (n - 1) / n pieces of 2 bytes instead of 4 per gradient on n ranks. All ranks take the rounded sums,
their own piece too, so that they stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from anybatch.parallel.sums import Exact, Sums


@final
class Halved(Sums):
    """In 16 bits; see the module. Tensors that are no wider cross as they are.

    What crosses is staged in memory of its own, as much as one float32 copy of the tensors, which is
    kept: a rank that could not get it in the middle of a step would leave the others waiting.

    Args:
        dtype: `torch.bfloat16`, with the range of float32 and 8 bits of precision, or
            `torch.float16`: 11 bits, and a number above 65504 becomes infinite.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rank = dist.get_rank()
        self._size = dist.get_world_size()
        self._rooms: list[tuple[Tensor, Tensor]] = []
        self._started: list[tuple[Tensor, Any]] = []

    @property
    def num_started(self) -> int:
        """See `Sums`."""
        return len(self._started)

    def reserve(self, flats: Sequence[Tensor]) -> None:
        """See `Sums`."""
        for number, flat in enumerate(flats):
            self._room(number, flat)

    def start(self, flat: Tensor) -> None:
        """See `Sums`."""
        if flat.itemsize <= 2:
            self._started.append((flat, dist.all_reduce(flat, async_op=True)))
            return
        out, into = self._room(len(self._started), flat)
        out[: len(flat)].copy_(flat)
        # As bytes: nothing is computed on the way, and every backend carries bytes.
        work = dist.all_to_all_single(_bytes(into), _bytes(out), async_op=True)
        self._started.append((flat, work))

    def finish(self, then: Callable[[int], None] | None = None) -> None:
        """See `Sums`."""
        gathers: list[Any] = []
        for number, (flat, work) in enumerate(self._started):
            work.wait()
            if flat.itemsize > 2:
                out, into = self._room(number, flat)
                total = into.view(self._size, -1).sum(0, dtype=torch.float32)
                own = out[: len(total)].copy_(total)  # what was in `out` has arrived
                gathers.append(_all_gather()(_bytes(into), _bytes(own), async_op=True))
            else:
                gathers.append(None)
        for number, ((flat, _), work) in enumerate(zip(self._started, gathers, strict=True)):
            if work is not None:
                work.wait()
                flat.copy_(self._room(number, flat)[1][: len(flat)])
            if then is not None:
                then(number)
        self._started.clear()

    def _room(self, number: int, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Where tensor `number` of a round is sent from and received, whole pieces for all ranks."""
        length = -(-len(flat) // self._size) * self._size
        if number == len(self._rooms):
            kind = {"dtype": self._dtype, "device": flat.device}
            self._rooms.append((torch.zeros(length, **kind), torch.zeros(length, **kind)))
        room = self._rooms[number]
        assert len(room[0]) == length
        return room


def sums_in(compress: str | None) -> Sums:
    """`Exact` for None, `Halved` for `"bf16"` and `"fp16"`."""
    if compress is None:
        return Exact()
    return Halved({"bf16": torch.bfloat16, "fp16": torch.float16}[compress])


def _all_gather() -> Any:
    """torch 2.13 gave it a new name, and warns of the old one."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
