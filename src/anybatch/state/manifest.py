"""The manifest of a checkpoint: the location of its data, as JSON, used only after it has been checked.

    {"sha256": "...", "manifest": {"version": 1, "step": 120, "files": [...], "tensors": {...}, ...}}

torch's own checkpoints keep this in a pickle, which can run arbitrary code when it is read. A manifest
holds numbers and names and no paths (files are numbered), and its sizes are compared with those of the
files before anything is allocated.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from anybatch.errors import InputError
from anybatch.state.checksummed_blocks import BLOCK_BYTES, DTYPES, open_plain

VERSION = 1
NAME = "manifest.json"

_MOST_BYTES = 256 << 20
"""Maximum size of a manifest: that of a million slices. Larger files are not read."""

_MOST_DIMS = 64  # torch's own limit
_SEALED = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "manifest": (\{.*\})\}\n', re.DOTALL)
_SHOWN = 3  # faults in a message

Count = Annotated[int, Field(ge=0, lt=2**62)]
Checksum = Annotated[int, Field(ge=0, lt=2**32)]


class Record(BaseModel):
    """Base class of records, validated strictly: no unknown or missing fields, no conversions."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, frozen=True)


class Slice(Record):
    """A part of a tensor, stored at one location of one file.

    Attributes:
        offsets: start of the part in the tensor, by dim.
        sizes: its shape.
        file: number of the file, which is the rank that wrote it.
        start: position of its first byte in the file.
        checksums: CRC-32 of each of its blocks.
    """

    offsets: list[Count]
    sizes: list[Count]
    file: Count
    start: Count
    checksums: list[Checksum]


class TensorRecord(Record):
    """A tensor: torch's name of its dtype, its shape, its slices."""

    dtype: str
    shape: list[Count]
    slices: list[Slice]


class Manifest(Record):
    """Everything in a checkpoint except the bytes of its tensors.

    Attributes:
        version: version of the format.
        step: step of training.
        score: lower is better; None: not known.
        block_bytes: number of bytes of a slice that share a checksum.
        files: size of each file in bytes, by number.
        tensors: records of the tensors, by name.
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
        """Size of all tensors in bytes."""
        return sum(self.files)

    @model_validator(mode="after")
    def _fits_together(self) -> Manifest:
        places: list[list[tuple[int, int]]] = [[] for _ in self.files]
        for name, record in self.tensors.items():
            if not self._holds(record, places):
                raise ValueError(f"{name[:100]!r} is not a tensor that the files hold")
        for number, (num_bytes, taken) in enumerate(zip(self.files, places, strict=True)):
            spans = sorted(taken)
            ends = [0, *(stop for _, stop in spans)]
            if ends != [*(start for start, _ in spans), num_bytes]:
                raise ValueError(f"in file {number} slices overlap, or leave gaps")
        return self

    def _holds(self, record: TensorRecord, places: list[list[tuple[int, int]]]) -> bool:
        """Returns whether the slices of a tensor make up the whole of it. Adds their places in each
        file to `places`."""
        dtype = DTYPES.get(record.dtype)
        if dtype is None or len(record.shape) > _MOST_DIMS:
            return False
        for part in record.slices:
            num_bytes = math.prod(part.sizes) * dtype.itemsize
            num_blocks = -(-num_bytes // self.block_bytes)
            is_within = part.file < len(self.files) and _inside(part, record.shape)
            if not is_within or len(part.checksums) != num_blocks:
                return False
            places[part.file].append((part.start, part.start + num_bytes))
        return sum(math.prod(part.sizes) for part in record.slices) == math.prod(record.shape)

    def to_bytes(self) -> bytes:
        """Returns the manifest as it is written to its file."""
        body = json.dumps(self.model_dump(mode="python")).encode()
        digest = hashlib.sha256(body).hexdigest().encode()
        return b'{"sha256": "' + digest + b'", "manifest": ' + body + b"}\n"

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """Parses and checks a manifest. Raises `InputError` if it is damaged, or is not a manifest."""
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
    """Reads the manifest in `folder`. Raises `InputError` if there is no valid one."""
    return Manifest.from_bytes(read_small(folder / NAME, _MOST_BYTES))


def read_small(path: Path, most_bytes: int) -> bytes:
    """Reads a whole file. Raises `InputError` if it does not exist, is not a regular file, or is longer
    than `most_bytes`."""
    if not os.path.lexists(path):
        raise InputError(f"{path.name} is missing")
    descriptor, num_bytes = open_plain(path)
    with os.fdopen(descriptor, "rb") as file:
        if num_bytes > most_bytes:
            raise InputError(f"{path.name} has {num_bytes:,} bytes, which is absurd")
        try:
            return file.read(num_bytes)
        except OSError as error:
            raise InputError(f"{path.name} cannot be read ({error.strerror})") from None


def data_name(number: int) -> str:
    """Returns the name of the file of tensors that rank `number` writes."""
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
