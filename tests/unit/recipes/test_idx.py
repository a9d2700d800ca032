"""IDX files: every type is read back exactly, every fault is named with its file and place."""

from __future__ import annotations

import gzip
import math
import struct

import numpy as np
import pytest
import torch

from anybatch.errors import InputError
from anybatch.recipes.idx import load_folder, read_idx


def to_idx(values):
    array = np.asarray(values).astype("u1")
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + (array.tobytes())
    )


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("shape", [(5,), (3, 2), (2, 3, 4), (0, 28, 28)], ids=str)
def test_an_array_is_read_back_exactly(tmp_path, shape, packed):
    values = (torch.arange(math.prod(shape)) * 37).to(torch.uint8).reshape(shape)
    content = to_idx(values.numpy())
    file = tmp_path / "some-file"  # packed or not is told by the content
    file.write_bytes(packed_up(content) if packed else content)

    read = read_idx(file)

    assert read.dtype == torch.uint8
    assert torch.equal(read, values)
    read += 1  # the tensor is its own, not a view of a read-only buffer


GOOD = to_idx([[1, 2, 3], [4, 5, 6]])


def packed_up(content):
    """gzip without the time of day, which would differ from process to process."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", ["begins with ''", "'00 00 08'"]),
        (b"<!DOCTYPE html>", ["begins with '3c 21 44'"]),
        (b"\0\0\x0d\x01" + GOOD[4:], ["begins with '00 00 0d'"]),
        (b"\0\0\x08", ["index out of range"]),
        (GOOD[:9], ["12 bytes"]),
        (GOOD[:-1], ["size 5 into shape (2,3)"]),
        (GOOD + b"ab", ["size 8 into shape (2,3)"]),
        (b"\0\0\x08\x02" + b"\xff" * 8 + b"\0", ["size 1 into shape"]),
        (b"\0\0\x08\xff" + b"\0\0\0\1" * 255 + b"\0", ["maximum supported dimension"]),
        (packed_up(GOOD)[:-9], ["end-of-stream"]),
        (packed_up(GOOD) + b"rest", ["Not a gzipped file"]),
        (b"\x1f\x8b" + GOOD, ["compression method"]),
        (packed_up(GOOD[:-1]), ["size 5 into shape (2,3)"]),
    ],
    ids=[
        "empty",
        "html",
        "another type",
        "cut off after the type",
        "sizes cut off",
        "one value short",
        "two bytes too many",
        "sizes beyond all memory",
        "255 dimensions",
        "gzip cut off",
        "gzip and more",
        "gzip's mark only",
        "gzip of a short file",
    ],
)
def test_a_broken_file_is_named_with_place_and_reason(tmp_path, content, said):
    file = tmp_path / "broken-idx3-ubyte"
    file.write_bytes(content)

    with pytest.raises(InputError) as caught:
        read_idx(file)

    for words in [f"{file} is not a whole IDX file of unsigned bytes (", *said]:
        assert words in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nowhere.*cannot be read.*No such file"):
        read_idx(tmp_path / "nowhere")


# ------------------------------------------------------------------------------------- the folder


def images(n):
    return to_idx(np.arange(n * 6).reshape(n, 2, 3))


def labels(n):
    return to_idx(np.arange(n) % 10)


DASHED = {
    "train-images-idx3-ubyte": images(4),
    "train-labels-idx1-ubyte": labels(4),
    "t10k-images-idx3-ubyte": images(2),
    "t10k-labels-idx1-ubyte": labels(2),
}


def write(folder, files):
    for name, content in files.items():
        packed = name.endswith(".gz")
        (folder / name).write_bytes(packed_up(content) if packed else content)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: f"{name}.gz",
        lambda name: name.replace("-idx", ".idx"),
        lambda name: name.replace("t10k", "test"),
    ],
)
def test_a_folder_is_read_under_the_usual_names(tmp_path, rename):
    write(tmp_path, {rename(name): content for name, content in DASHED.items()})

    arrays = load_folder(tmp_path)

    assert [tuple(a.shape) for a in arrays] == [(4, 2, 3), (4,), (2, 2, 3), (2,)]
    assert arrays.train_labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"train-labels-idx1-ubyte": None, "t10k-images-idx3-ubyte": None},
            [
                "lacks the train labels (train-labels-idx1-ubyte)",
                "the test images (t10k-images-idx3-ubyte)",
            ],
        ),
        ({"train-labels-idx1-ubyte": labels(3)}, ["4 train images", "3 labels", "train-labels"]),
        ({"t10k-labels-idx1-ubyte": images(2)}, ["t10k-labels", "(2, 2, 3)", "1 dimension,"]),
        ({"train-images-idx3-ubyte": labels(4)}, ["train-images", "(4,)", "3 dimensions"]),
        ({"t10k-images-idx3-ubyte": to_idx(np.zeros((0, 2, 3)))}, ["(0, 2, 3)", "none of them"]),
    ],
)
def test_a_folder_that_does_not_fit_together_is_refused(tmp_path, change, said):
    files = {**DASHED, **change}
    write(tmp_path, {name: content for name, content in files.items() if content is not None})

    with pytest.raises(InputError) as caught:
        load_folder(tmp_path)

    for words in said:
        assert words in str(caught.value)


def test_a_folder_that_is_none_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="does not exist"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is a file"):
        load_folder(tmp_path / "file")
