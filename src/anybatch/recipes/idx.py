"""Reader of IDX, the file format of MNIST, as far as MNIST uses it. Files are read from a local folder,
never downloaded.

The format (http://yann.lecun.com/exdb/mnist, "The IDX file format"), big-endian throughout:

    offset 0       00 00 08: two zero bytes, and the type of the values, unsigned bytes
    offset 3       D, the number of dimensions
    offset 4       D sizes, four bytes each
    offset 4+4D    the values, last dimension fastest
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anybatch.errors import InputError

_SPLITS = {"train": ("train",), "test": ("t10k", "test")}
_KINDS = {"images": ("idx3-ubyte", 3), "labels": ("idx1-ubyte", 1)}


def read_idx(path: Path) -> Tensor:
    """Reads the array of unsigned bytes in an IDX file onto the CPU. Gzip is detected from the content.

    Raises `InputError` with the file and the fault.
    """
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        if content[:3] != b"\0\0\x08":
            raise ValueError(f"it begins with {content[:3].hex(' ')!r}, and not with '00 00 08'")
        sizes = struct.unpack_from(f">{content[3]}I", content, 4)
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)
    except (ValueError, IndexError, struct.error, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path} is not a whole IDX file of unsigned bytes ({error}): fetch it again, or give a"
            " file in the format of MNIST."
        ) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): give an IDX file.") from error
    return torch.from_numpy(values.copy())


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
