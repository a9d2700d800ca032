"""Reader of IDX, the file format of MNIST. Files are read from a local folder, never downloaded.

The format (http://yann.lecun.com/exdb/mnist, "The IDX file format"), big-endian throughout:

    offset 0       two zero bytes
    offset 2       type of the values:  08 ubyte  09 byte  0B short  0C int  0D float  0E double
    offset 3       D, the number of dimensions
    offset 4       D sizes, four bytes each
    offset 4+4D    the values, last dimension fastest
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anybatch.errors import InputError

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_SPLITS = {"train": ("train",), "test": ("t10k", "test")}
_KINDS = {"images": ("idx3-ubyte", 3), "labels": ("idx1-ubyte", 1)}


def read_idx(path: Path) -> Tensor:
    """Reads the array in an IDX file, with its shape and type, onto the CPU. Gzip is detected from the
    content.

    Raises `InputError` with the file, the offset (in uncompressed bytes) and the fault.
    """
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path} is an unreadable gzip file ({error}): fetch it again.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): give an IDX file.") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES or content[3] == 0:
        raise InputError(
            f"{path} is not an IDX file: at byte offset 0 it has {content[:4].hex(' ').upper()!r},"
            " where two zero bytes, a type of value (08, 09, 0B, 0C, 0D or 0E) and the number of"
            " dimensions (at least 1) belong; give a file in the format of MNIST."
        )
    dtype, start = np.dtype(_TYPES[content[2]]), 4 + 4 * content[3]
    sizes = struct.unpack_from(f">{content[3]}I", content, 4) if len(content) >= start else ()
    whole = start + math.prod(sizes) * dtype.itemsize if sizes else start
    if len(content) != whole or not sizes:
        is_short = len(content) < whole
        raise InputError(
            f"{path} is {'truncated' if is_short else 'too long'}: its head of {content[3]} dimensions,"
            f" {' x '.join(map(str, sizes)) or 'cut off'}, ends at offset {start}, and its values at"
            f" {whole}, but it has {len(content)} bytes; fetch it again."
        )
    try:
        values = np.frombuffer(content, dtype, offset=start).reshape(sizes)
    except ValueError as error:  # too many dimensions, or too large empty ones, for numpy
        raise InputError(f"{path} has an array that cannot be held: {error}.") from error
    return torch.from_numpy(values.astype(dtype.newbyteorder("="), copy=True))


class Folder(NamedTuple):
    """The four arrays of a data set in MNIST's layout: images (N, H, W) and labels (N)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_folder(path: str | Path) -> Folder:
    """Loads training and test images and labels from a folder with MNIST's file names, such as
    `train-images-idx3-ubyte` and `t10k-labels.idx1-ubyte.gz`.

    Raises `InputError` if files are missing (names all of them), arrays are empty or have the wrong
    number of dimensions, or the numbers of images and labels differ.
    """
    folder = Path(path)
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise InputError(
            f"the data folder {str(folder)!r} {kind}: give a folder with the IDX files of MNIST."
        )
    arrays: list[Tensor] = []
    missing: list[str] = []
    for split in _SPLITS:
        for kind, (ending, num_dims) in _KINDS.items():
            file = _file(folder, split, kind, ending)
            if file is None:
                missing.append(f"{split} {kind} ({_SPLITS[split][0]}-{kind}-{ending})")
                continue
            array = read_idx(file)
            if array.ndim != num_dims or array.numel() == 0:
                raise InputError(
                    f"{file} holds an array of sizes {tuple(array.shape)}: {split} {kind} need"
                    f" {num_dims} dimension{'s' * (num_dims > 1)}, none of them empty."
                )
            if kind == "labels" and not missing and len(arrays[-1]) != len(array):
                raise InputError(
                    f"{str(folder)!r} has {len(arrays[-1])} {split} images, but {file} has"
                    f" {len(array)} labels: give files that belong together."
                )
            arrays.append(array)
    if missing:
        raise InputError(
            f"the data folder {str(folder)!r} lacks the {', the '.join(missing)}: put the files"
            " there under these names, gzipped (.gz) or not; nothing is downloaded."
        )
    return Folder(*arrays)


def _file(folder: Path, split: str, kind: str, ending: str) -> Path | None:
    names = (
        folder / f"{prefix}-{kind}{separator}{ending}{suffix}"
        for prefix in _SPLITS[split]
        for separator in "-."
        for suffix in ("", ".gz")
    )
    return next((file for file in names if file.is_file()), None)
