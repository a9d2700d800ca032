"""Bytes of tensors, to files and back, each block of them with its checksum.

`torch.save` makes one object of everything; here nothing larger than a tensor is ever copied, some rows
of one are read without the rest, and what is read is checked before it counts. A tensor lies in its
file as its elements in row-major order, whatever its strides were.

The checksum is zlib's CRC-32. It finds every flipped bit and every burst of up to 32 bits, and misses
other damage to a block with a chance of 2**-32; it ran at 6.5 GB/s on one core, where SHA-256 made 1.7
and BLAKE2 1.1. It protects from accidents, not from forgery, and no more is needed: what a checkpoint
holds is numbers, never code.
"""

from __future__ import annotations

import math
import os
import re
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from anybatch.errors import InputError

BLOCK_BYTES = 4 << 20
"""Bytes with one checksum: large against the cost of a call, small against a memory budget."""

Box = tuple[slice, ...]
"""A part of a tensor: a range in each dim."""

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not re.search(r"\.q|\.quint|int[1-7]$", str(value))
}
"""What can be written, by name. A quantised tensor is more than its numbers, and one of parts of a byte
cannot be copied."""


def dtype_name(dtype: torch.dtype) -> str:
    """Its name in `DTYPES`."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements of `tensor` in row-major order, in host memory: its own where they lie so there."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().data


def staged(tensor: Tensor) -> Tensor:
    """A copy of `tensor` in host memory, contiguous. From a GPU it is pinned and may still be on its
    way: wait for the stream before it is read.

    Raises what the allocator raises if there is no room.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


def write_tensor(descriptor: int, tensor: Tensor) -> list[int]:
    """Append `tensor` to the file; the checksums of its blocks.

    Raises `OSError` if the file system refuses.
    """
    checksums: list[int] = []
    content = bytes_of(tensor)
    for start in range(0, len(content), BLOCK_BYTES):
        block = content[start : start + BLOCK_BYTES]
        checksums.append(zlib.crc32(block))
        while block:
            block = block[os.write(descriptor, block) :]
    return checksums


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

    Only blocks are read that hold some of its rows, those of dim 0. Numbers are converted to the dtype
    of `target`. Raises `InputError` if a block is damaged; `target` then holds anything.
    """
    if not target.numel():
        return
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    rows = box[0] if box else slice(0, 1)
    first, last = rows.start * row_bytes, rows.stop * row_bytes
    begin = first // block_bytes * block_bytes
    end = min(-(-last // block_bytes) * block_bytes, math.prod(shape) * dtype.itemsize)
    whole = all(part == slice(0, size) for part, size in zip(box, shape, strict=True))
    is_plain = target.is_contiguous() and not target.is_conj() and not target.is_neg()
    if whole and is_plain and target.dtype == dtype and target.device.type == "cpu":
        buffer = target.detach().view(-1).view(torch.uint8)
    else:
        buffer = torch.empty(end - begin, dtype=torch.uint8)
    memory = buffer.numpy().data
    for number in range(begin // block_bytes, -(-end // block_bytes)):
        at = number * block_bytes
        file.read(memory[at - begin : at - begin + block_bytes], start + at, checksums[number])
    if buffer.data_ptr() != target.data_ptr():
        read = buffer[first - begin : last - begin].view(dtype)
        read = read.view(rows.stop - rows.start, *shape[1:])
        target.copy_(read[:, *box[1:]].reshape(target.shape))
