"""The manifest: what lies where in a checkpoint, as JSON, believed only after it was checked.

    {"sha256": "...", "manifest": {"version": 1, "step": 120, "files": [...], "tensors": {...}, ...}}

torch's own checkpoints keep this in a pickle, which can run any code when it is read. A manifest holds
numbers and names; it names no paths (files are numbered), its sizes are held against those of the files
before anything is allocated, and the slices of each tensor have as many elements as it has.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from anybatch.errors import InputError
from anybatch.state.blocks import BLOCK_BYTES, DTYPES

VERSION = 1
NAME = "manifest.json"

_MOST_BYTES = 256 << 20
"""Of a manifest: that of a million slices. More is not read."""

_MOST_DIMS = 64  # torch's own limit
_SEALED = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "manifest": (\{.*\})\}\n', re.DOTALL)
_SHOWN = 3  # faults in a message

Count = Annotated[int, Field(ge=0, lt=2**62)]
Checksum = Annotated[int, Field(ge=0, lt=2**32)]


class Record(BaseModel):
    """Read strictly: no field more or less, nothing converted."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, frozen=True)


class Slice(Record):
    """A part of a tensor, at one place of one file.

    Attributes:
        offsets: where the part begins in the tensor, by dim.
        sizes: its shape.
        file: number of the file, which is the rank that wrote it.
        start: its first byte there.
        checksums: CRC-32 of each block of it.
    """

    offsets: list[Count]
    sizes: list[Count]
    file: Count
    start: Count
    checksums: list[Checksum]


class TensorRecord(Record):
    """A tensor: its dtype by torch's name, its shape, its parts."""

    dtype: str
    shape: list[Count]
    slices: list[Slice]


class Manifest(Record):
    """All of a checkpoint but the bytes of its tensors.

    Attributes:
        version: of this form.
        step: of training.
        score: lower is better; None: not known.
        block_bytes: of a slice that share a checksum.
        files: bytes in each, by number.
        tensors: by name.
        facts: see `Content`.
    """

    version: Literal[1] = VERSION
    step: Count
    score: float | None = None
    block_bytes: Annotated[int, Field(ge=1 << 12, le=64 << 20, multiple_of=64)] = BLOCK_BYTES
    files: list[Count]
    tensors: dict[str, TensorRecord]
    facts: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(self.files)

    @model_validator(mode="after")
    def _fits_together(self) -> Manifest:
        places: list[list[tuple[int, int]]] = [[] for _ in self.files]
        for name, record in self.tensors.items():
            shown = repr(name[:100])
            if record.dtype not in DTYPES:
                raise ValueError(f"{shown} has an unknown dtype {record.dtype[:40]!r}")
            if len(record.shape) > _MOST_DIMS:
                raise ValueError(f"{shown} has {len(record.shape)} dims")
            itemsize = DTYPES[record.dtype].itemsize
            num_elements = math.prod(record.shape)
            if num_elements * itemsize > self.num_bytes:
                raise ValueError(f"{shown} is larger than all files together")
            for part in record.slices:
                if part.file >= len(self.files):
                    raise ValueError(
                        f"a slice of {shown} is in file {part.file}, which there is not"
                    )
                if not _inside(part, record.shape):
                    raise ValueError(f"a slice of {shown} is empty, or not within its shape")
                num_bytes = math.prod(part.sizes) * itemsize
                if len(part.checksums) != -(-num_bytes // self.block_bytes):
                    raise ValueError(f"a slice of {shown} has {len(part.checksums)} checksums")
                places[part.file].append((part.start, part.start + num_bytes))
            if sum(math.prod(part.sizes) for part in record.slices) != num_elements:
                raise ValueError(f"the slices of {shown} are not the whole of it")
        for number, (num_bytes, taken) in enumerate(zip(self.files, places, strict=True)):
            end = 0
            for start, stop in sorted(taken):
                if start != end:
                    raise ValueError(f"in file {number} slices overlap, or leave gaps")
                end = stop
            if end != num_bytes:
                raise ValueError(
                    f"file {number} is said to have {num_bytes} bytes, its slices {end}"
                )
        return self

    def to_bytes(self) -> bytes:
        """As it is written."""
        body = json.dumps(self.model_dump(mode="python")).encode()
        digest = hashlib.sha256(body).hexdigest().encode()
        return b'{"sha256": "' + digest + b'", "manifest": ' + body + b"}\n"

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """Raises `InputError` if it is damaged, or is none."""
        if not text:
            raise InputError(f"{NAME} is empty")
        match = _SEALED.fullmatch(text)
        if match is None or hashlib.sha256(match[2]).hexdigest().encode() != match[1]:
            raise InputError(f"{NAME} is damaged, or was changed after it was written")
        try:
            return cls.model_validate(json.loads(match[2]))
        except ValidationError as error:
            faults = [_fault(item["loc"], item["msg"]) for item in error.errors()[:_SHOWN]]
            raise InputError(f"{NAME} is not one of a checkpoint: {'; '.join(faults)}") from None
        except (ValueError, RecursionError) as error:
            reason = str(error).splitlines()[0][:200]
            raise InputError(f"{NAME} is not one of a checkpoint: {reason}") from None


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`. Raises `InputError` if there is none that holds."""
    return Manifest.from_bytes(read_small(folder / NAME, _MOST_BYTES))


def read_small(path: Path, most_bytes: int) -> bytes:
    """All of a file. Raises `InputError` if it is not there, is no plain file, or is longer than
    `most_bytes`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise InputError(f"{path.name} is no plain file")
            if found.st_size > most_bytes:
                raise InputError(f"{path.name} has {found.st_size:,} bytes, which is absurd")
            return file.read(found.st_size)
    except FileNotFoundError:
        raise InputError(f"{path.name} is missing") from None
    except OSError as error:
        raise InputError(f"{path.name} cannot be read ({error.strerror})") from None


def data_name(number: int) -> str:
    """Name of the file of tensors that rank `number` wrote."""
    return f"rank-{number}.data"


def _inside(part: Slice, shape: Sequence[int]) -> bool:
    return (
        len(part.offsets) == len(part.sizes) == len(shape)
        and all(part.sizes)
        and all(
            offset + size <= whole
            for offset, size, whole in zip(part.offsets, part.sizes, shape, strict=True)
        )
    )


def _fault(place: Sequence[int | str], message: str) -> str:
    where = ".".join(str(part)[:60] for part in place)
    what = message.removeprefix("Value error, ")
    return f"{where}: {what}" if where else what
