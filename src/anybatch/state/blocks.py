"""Bytes of tensors, to files and back, a block at a time and each block with its checksum.

`torch.save` makes one object of everything; here nothing larger than a block is ever copied, a part of
a tensor is read without the rest, and what is read is checked before it counts. A tensor lies in its
file as its elements in row-major order, whatever its strides were.

The checksum is zlib's CRC-32. It finds every flipped bit and every burst of up to 32 bits, and misses
other damage to a block with a chance of 2**-32; it ran at 6.5 GB/s on one core, where SHA-256 made 1.7
and BLAKE2 1.1. It protects from accidents, not from forgery, and no more is needed: what a checkpoint
holds is numbers, never code.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from anybatch.errors import InputError

BLOCK_BYTES = 4 << 20
"""Bytes with one checksum: large against the cost of a call, small against a memory budget."""

_RUN_BLOCKS = 16
"""Written by one call, where memory can be written as it lies. While it runs the interpreter is free; a
thread of low priority that is stopped while it holds the interpreter would stop training with it."""

Box = tuple[slice, ...]
"""A part of a tensor: a range in each dim."""

_QUANTISED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and value not in _QUANTISED
}
"""What can be written, by name. A quantised tensor is more than its numbers."""


def dtype_name(dtype: torch.dtype) -> str:
    """Its name in `DTYPES`."""
    return str(dtype).removeprefix("torch.")


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements `start` to `stop`, in row-major order, of a tensor of `shape`, as few boxes.

    A row begun in the middle, whole rows, a row that ends in the middle; and so for each of these.
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, into = divmod(start, row)
    last, rest = divmod(stop, row)
    if into:
        end = rest if first == last else row
        for box in boxes(shape[1:], into, end):
            yield (slice(first, first + 1), *box)
        if first == last:
            return
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(0, size) for size in shape[1:]))
    if rest:
        for box in boxes(shape[1:], 0, rest):
            yield (slice(last, last + 1), *box)


def staged(tensor: Tensor) -> Tensor:
    """A copy of `tensor` in host memory, contiguous. From a GPU it is pinned and may still be on its
    way: wait for the stream before it is read.

    Raises what the allocator raises if there is no room.
    """
    on_host = tensor.device.type == "cpu"
    if on_host and _plain(tensor):
        copy = torch.empty(_num_bytes(tensor), dtype=torch.uint8)
        copy.copy_(_bytes(tensor))
        return copy.view(tensor.dtype).view(tensor.shape)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


def write_tensor(descriptor: int, tensor: Tensor) -> list[int]:
    """Append `tensor` to the file; the checksums of its blocks.

    Raises `OSError` if the file system refuses.
    """
    checksums: list[int] = []
    for run in _runs(tensor):
        checksums += [
            zlib.crc32(run[start : start + BLOCK_BYTES])
            for start in range(0, len(run), BLOCK_BYTES)
        ]
        left = run
        while left:
            left = left[os.write(descriptor, left) :]
    return checksums


def checksum_of(tensor: Tensor, before: int = 0) -> int:
    """CRC-32 of the bytes of `tensor`, after those that gave `before`."""
    for run in _runs(tensor):
        before = zlib.crc32(run, before)
    return before


def _runs(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of `tensor`, some blocks at a time; they are gone when the next ones are asked for."""
    if not tensor.numel():
        return
    if tensor.device.type == "cpu" and _plain(tensor):
        memory = _bytes(tensor).numpy().data
        for start in range(0, len(memory), _RUN_BLOCKS * BLOCK_BYTES):
            yield memory[start : start + _RUN_BLOCKS * BLOCK_BYTES]
        return
    buffer = Buffer(min(BLOCK_BYTES, _num_bytes(tensor)), tensor.device)
    per_block = BLOCK_BYTES // tensor.element_size()
    for start in range(0, tensor.numel(), per_block):
        stop = min(start + per_block, tensor.numel())
        elements = buffer.as_dtype(tensor.dtype, stop - start)
        done = 0
        for box in boxes(tensor.shape, start, stop):
            part = tensor[box]
            elements[done : done + part.numel()].view(part.shape).copy_(part)
            done += part.numel()
        yield buffer.memory(done * tensor.element_size())


class Buffer:
    """Host memory for one block on its way to or from a tensor on `device`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # pageable memory does too, more slowly
                self._bytes = self._bytes.pin_memory()

    def as_dtype(self, dtype: torch.dtype, num_elements: int) -> Tensor:
        """The first elements, shape [num_elements]."""
        return self._bytes[: num_elements * dtype.itemsize].view(dtype)

    def memory(self, num_bytes: int) -> memoryview:
        """The first bytes."""
        return self._bytes[:num_bytes].numpy().data


class DataFile:
    """A file of tensors, open to be read.

    Raises `InputError` if it is not there, is no plain file, or has not `num_bytes` bytes.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path: Path = path
        try:
            # A link may lead out of the folder, and a pipe would be waited for.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise InputError(f"{path.name} cannot be read ({error.strerror or error})") from None
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            wrong = f"{path.name} is no plain file"
        elif found.st_size != num_bytes:
            wrong = f"{path.name} has {found.st_size:,} bytes where {num_bytes:,} were written"
        else:
            return
        os.close(self._descriptor)
        raise InputError(wrong)

    def close(self) -> None:
        """Nothing more will be read."""
        os.close(self._descriptor)

    def read(self, memory: memoryview, start: int, checksum: int) -> None:
        """Fill `memory` with what is at `start`. Raises `InputError` if that was not written there."""
        done = 0
        try:
            while done < len(memory):
                count = os.preadv(self._descriptor, [memory[done:]], start + done)
                if not count:
                    raise InputError(f"{self.path.name} ends at byte {start + done:,}")
                done += count
        except OSError as error:
            raise InputError(
                f"{self.path.name} cannot be read at byte {start + done:,} ({error.strerror})"
            ) from None
        if zlib.crc32(memory) != checksum:
            raise InputError(
                f"{self.path.name} is damaged: its bytes {start:,} to {start + len(memory):,} are not"
                " those that were written"
            )


def read_box(
    file: DataFile,
    start: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    block_bytes: int,
    checksums: Sequence[int],
    box: Box,
    target: Tensor,
) -> None:
    """Fill `target` with the part `box` of a tensor of `shape` and `dtype` that lies at byte `start`.

    Only blocks that hold some of it are read. Numbers are converted to the dtype of `target`.
    Raises `InputError` if a block is damaged; `target` then holds anything.
    """
    if not target.numel():
        return
    num_elements = math.prod(shape)
    per_block = block_bytes // dtype.itemsize
    everything = all(part == slice(0, size) for part, size in zip(box, shape, strict=True))
    if everything and target.dtype == dtype and target.device.type == "cpu" and _plain(target):
        memory = _bytes(target).numpy().data
        for number, checksum in enumerate(checksums):
            begin = number * block_bytes
            file.read(memory[begin : begin + block_bytes], start + begin, checksum)
        return
    buffer = Buffer(min(block_bytes, num_elements * dtype.itemsize), target.device)
    for number, checksum in enumerate(checksums):
        first = number * per_block
        last = min(first + per_block, num_elements)
        pieces = []
        done = 0
        for piece in boxes(shape, first, last):
            sizes = [part.stop - part.start for part in piece]
            common = [
                slice(max(one.start, other.start), min(one.stop, other.stop))
                for one, other in zip(piece, box, strict=True)
            ]
            if all(part.start < part.stop for part in common):
                pieces.append((done, sizes, piece, common))
            done += math.prod(sizes)
        if not pieces:
            continue
        file.read(buffer.memory(done * dtype.itemsize), start + number * block_bytes, checksum)
        elements = buffer.as_dtype(dtype, done)
        for at, sizes, piece, common in pieces:
            source = elements[at : at + math.prod(sizes)].view(sizes)
            target[_within(common, box)].copy_(source[_within(common, piece)])


def _within(part: Sequence[slice], whole: Box) -> Box:
    """`part`, counted from where `whole` begins."""
    return tuple(
        slice(one.start - other.start, one.stop - other.start)
        for one, other in zip(part, whole, strict=True)
    )


def _plain(tensor: Tensor) -> bool:
    """Whether the memory of `tensor` is its elements in row-major order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
