"""IDX, the file format of MNIST: read from a folder that the user has, never downloaded.

Libraries that read MNIST want to download it; on a machine without a network, or for other data in
the same format (Fashion-MNIST, EMNIST, KMNIST, one's own), a reader is all that is needed. The
format (http://yann.lecun.com/exdb/mnist, "The IDX file format"), big-endian throughout:

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
_GZIP = b"\x1f\x8b"

# What the files of a folder may be called: `{split}-{kind}` with either separator, gzipped or not.
_SPLITS = {"train": ("train",), "test": ("t10k", "test")}
_ENDINGS = {"images": "idx3-ubyte", "labels": "idx1-ubyte"}


def read_idx(path: str | Path) -> Tensor:
    """The array in an IDX file, gzipped or not (told by its content, not by its name).

    Returns:
        A tensor of the file's sizes and type (uint8, int8, int16, int32, float32 or float64), in
        the byte order of this machine, on the CPU.

    Raises:
        InputError: naming the file, the offset and what is wrong there. Offsets in a gzipped file
            count uncompressed bytes.
    """
    content = _content(Path(path))
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES or content[3] == 0:
        raise InputError(
            f"{path} is not an IDX file: at byte offset 0 it has {_shown(content[:4])}, where two"
            " zero bytes, a type of value (08, 09, 0B, 0C, 0D or 0E) and the number of dimensions"
            " (at least 1) belong; give a file in the format of MNIST."
        )
    num_dims = content[3]
    start = 4 + 4 * num_dims
    _check_length(path, content[:start], start, at=4, what=f"the sizes of {num_dims} dimensions")

    sizes = struct.unpack_from(f">{num_dims}I", content, 4)
    dtype = np.dtype(_TYPES[content[2]])
    what = f"{' x '.join(map(str, sizes))} values of {dtype.itemsize} bytes"
    _check_length(path, content, start + math.prod(sizes) * dtype.itemsize, at=start, what=what)
    try:
        values = np.frombuffer(content, dtype, offset=start).reshape(sizes)
    except ValueError as error:  # more dimensions, or larger empty ones, than numpy can address
        raise InputError(
            f"{path} has an array that cannot be held, {what} at byte offset 4: {error}."
        ) from error
    return torch.from_numpy(values.astype(dtype.newbyteorder("="), copy=True))


class Folder(NamedTuple):
    """The four arrays of a data set in MNIST's layout: images (N, H, W), labels (N)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_folder(path: str | Path) -> Folder:
    """The train and test images and labels in a folder, under the names that MNIST's files have:
    `train-images-idx3-ubyte`, `t10k-labels.idx1-ubyte.gz` and so on.

    Raises:
        InputError: naming every file that is missing, and images and labels that do not belong
            together (N images, M labels; wrong number of dimensions; none at all).
    """
    folder = Path(path)
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise InputError(
            f"the data folder {str(folder)!r} {kind}: give a folder with the IDX files of MNIST."
        )
    names = {key: _names(*key) for key in _keys()}
    found = {key: _first_file(folder, names[key]) for key in names}
    missing = [f"{key[0]} {key[1]} ({names[key][0]})" for key in names if found[key] is None]
    if missing:
        raise InputError(
            f"the data folder {str(folder)!r} lacks the {', the '.join(missing)}: put the files"
            " there under these names, gzipped (.gz) or not; nothing is downloaded."
        )
    files = {key: file for key, file in found.items() if file is not None}
    arrays = {key: read_idx(file) for key, file in files.items()}
    for split in _SPLITS:
        _check_split(split, files, arrays)
    return Folder(*(arrays[key] for key in _keys()))


def _keys() -> list[tuple[str, str]]:
    return [(split, kind) for split in _SPLITS for kind in _ENDINGS]


def _names(split: str, kind: str) -> list[str]:
    return [
        f"{prefix}-{kind}{separator}{_ENDINGS[kind]}{suffix}"
        for prefix in _SPLITS[split]
        for separator in "-."
        for suffix in ("", ".gz")
    ]


def _first_file(folder: Path, names: list[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _check_split(
    split: str, files: dict[tuple[str, str], Path], arrays: dict[tuple[str, str], Tensor]
) -> None:
    for kind, num_dims in (("images", 3), ("labels", 1)):
        array = arrays[split, kind]
        if array.ndim != num_dims or array.numel() == 0:
            raise InputError(
                f"{files[split, kind]} holds an array of sizes {tuple(array.shape)}: {split} {kind}"
                f" need {num_dims} dimension{'s' * (num_dims > 1)}, none of them empty."
            )
    num_images, num_labels = len(arrays[split, "images"]), len(arrays[split, "labels"])
    if num_images != num_labels:
        raise InputError(
            f"{files[split, 'images']} has {num_images} images, but {files[split, 'labels']} has"
            f" {num_labels} labels: give files that belong together."
        )


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(_GZIP) else content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            f"{path} is an unreadable gzip file ({error}): fetch it again, or unpack it by other"
            " means."
        ) from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}): give an IDX file."
        ) from error


def _check_length(path: str | Path, content: bytes, expected: int, at: int, what: str) -> None:
    if len(content) < expected:
        raise InputError(
            f"{path} is truncated: {what} from byte offset {at} end at offset {expected}, so it"
            f" should have {expected} bytes, but it has {len(content)}; fetch it again."
        )
    if len(content) > expected:
        raise InputError(
            f"{path} has {len(content) - expected} trailing bytes: {what} from byte offset {at} end"
            f" at offset {expected}, but the file has {len(content)} bytes; fetch it again."
        )


def _shown(content: bytes) -> str:
    return content.hex(" ").upper() if content else "nothing (it is empty)"
