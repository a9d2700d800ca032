"""Headroom: memory that is this process's own before it is needed, for what must not be refused any.

When the ranks have agreed on a step, its update has to succeed on all of them, and a rank that speaks
to others has to come to its end. So the memory for both is taken while failing is still harmless.
Taking it and giving it back is not enough on a CPU: it would go back to the kernel, which may refuse it
a moment later. So the block comes from the heap, and while the room is open, the heap keeps it:

    take    | block of the heap          |     refused: out of memory, the step is done again
    opened  | what the update asks for | |     from what the block left: the kernel is not asked
    after   the block goes back to the kernel

Pages that nobody writes to are never resident: room costs addresses, not memory. torch's allocator on
CUDA keeps what is freed anyway, so there it is enough to have had it: in pieces as large as the tensors
of an update, which find their places where the pieces were. One piece would be taken from the driver
beside all that is free already.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import final

import torch

from anybatch.engine.process import HeapBlock, has_glibc
from anybatch.oom import is_limited
from anybatch.parallel import Group


@final
class Headroom:
    """Memory on `device` that nobody can take away. Empty until `take`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block: HeapBlock | None = None

    def __bool__(self) -> bool:
        """Whether there is any."""
        return self._block is not None

    def take(self, least: int, most: int = 0, pieces: Sequence[int] = ()) -> None:
        """Have `most` bytes if they can be had, `least` at any rate. In place of what was taken before.
        `pieces`: sizes of what will be asked for; see the module.

        Raises `MemoryError` (on CUDA `torch.OutOfMemoryError`) if not even `least` can be had.
        """
        self.give_back()
        if self._device.type != "cpu":
            _try_out(least, pieces, self._device)
            return
        size = max(least, most) if has_glibc() else 0
        while size:
            self._block = HeapBlock.of(size)
            if self._block is not None:
                return
            if size == least:
                raise MemoryError(f"you tried to allocate {least} bytes for the update")
            size = max(least, size // 2 if size > 1 << 16 else 0)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """What is asked for inside comes from the room, as far as it goes."""
        if self._block is not None:
            self._block.open()
        try:
            yield
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Have none."""
        block, self._block = self._block, None
        if block is not None:
            block.close()


def _try_out(num_bytes: int, pieces: Sequence[int], device: torch.device) -> None:
    """Have so many bytes at once, in pieces of these sizes in turn, and give them back."""
    held: list[torch.Tensor] = []
    sizes = itertools.cycle(tuple(filter(None, pieces)) or (num_bytes,))
    while num_bytes > 0:
        size = min(next(sizes), num_bytes)
        held.append(torch.empty(size, dtype=torch.uint8, device=device))
        num_bytes -= size


LEAST_BYTES, MOST_BYTES = 4 << 20, 16 << 20
"""What gloo takes while ranks speak: pieces of the tensors under way, at most two at a time."""


@final
class Crossing:
    """Around what ranks do together. What it takes is the network's, and short-lived; a rank that were
    refused it could not even vote.

    So where the operating system may refuse it (`ulimit`) it is set aside: a rank that has run out of
    memory in a pass may have nothing else to speak with.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._by_gloo = group.size > 1 and device.type == "cpu"
        self._headroom = Headroom(torch.device("cpu"))

    def reserve(self) -> None:
        """While failing is harmless: have what speaking will take. Raises `MemoryError`."""
        if self._by_gloo and not self._headroom and is_limited():
            self._headroom.take(LEAST_BYTES, MOST_BYTES)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Speak."""
        if self._by_gloo and not self._headroom and is_limited():
            self._headroom.take(0, MOST_BYTES)
        with self._headroom.opened():
            yield
        with suppress(MemoryError):
            self.reserve()

    def close(self) -> None:
        """Nobody will speak any more."""
        self._headroom.give_back()
