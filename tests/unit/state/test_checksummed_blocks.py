"""Bytes of tensors: every dtype and layout there and back, in blocks of any size, whole or in part."""

from __future__ import annotations

import math
import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from anybatch.errors import InputError
from anybatch.state import checksummed_blocks as blocks
from anybatch.state.checksummed_blocks import DTYPES, DataFile, read_box, staged, write_tensor


def written(tensor, path):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        return write_tensor(descriptor, tensor)
    finally:
        os.close(descriptor)


def read(path, tensor, checksums, box=None, target=None):
    file = DataFile(path, tensor.numel() * tensor.element_size())
    box = tuple(slice(0, size) for size in tensor.shape) if box is None else box
    target = torch.empty(tensor.shape, dtype=tensor.dtype) if target is None else target
    try:
        read_box(file, 0, tensor.shape, tensor.dtype, blocks.BLOCK_BYTES, checksums, box, target)
    finally:
        file.close()
    return target


def bits(tensor):
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).tolist()


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype(tmp_path, small_blocks, name):
    dtype = DTYPES[name]
    raw = torch.arange(7 * 6 * dtype.itemsize) % (2 if dtype is torch.bool else 251)
    tensor = raw.to(torch.uint8).view(dtype).view(7, 6)
    checksums = written(tensor, tmp_path / "x")
    assert bits(read(tmp_path / "x", tensor, checksums)) == bits(tensor)
    assert bits(staged(tensor)) == bits(tensor)


LAYOUTS = {
    "0-dim": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.randn(9, 7, 5).transpose(0, 2),
    "every other": torch.randn(40, 6)[::2, ::3],
    "expanded": torch.randn(1, 5).expand(30, 5),
    "channels last": torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "conjugate": torch.randn(6, 7, dtype=torch.complex64).conj(),
    "negative": torch.randn(6, 7, dtype=torch.complex64).conj().imag,
    "leaf": torch.nn.Parameter(torch.randn(6, 7)),
}


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_every_layout(tmp_path, small_blocks, name):
    tensor = LAYOUTS[name].detach()
    checksums = written(tensor, tmp_path / "x")
    assert (tmp_path / "x").stat().st_size == tensor.numel() * tensor.element_size()
    assert torch.equal(read(tmp_path / "x", tensor, checksums), tensor)
    target = torch.empty_like(tensor.resolve_conj().resolve_neg().clone())
    assert torch.equal(read(tmp_path / "x", tensor, checksums, target=target), tensor)
    assert torch.equal(staged(tensor), tensor)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_a_part_is_read_into_whatever_layout(tmp_path, shape, data):
    tensor = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    before, blocks.BLOCK_BYTES = blocks.BLOCK_BYTES, data.draw(st.sampled_from([4, 8, 20, 64]))
    try:
        checksums = written(tensor, tmp_path / "x")
        box = []
        for size in shape:
            start = data.draw(st.integers(0, size - 1))
            box.append(slice(start, data.draw(st.integers(start + 1, size))))
        wanted = tensor[tuple(box)]
        order = data.draw(st.permutations(range(len(shape))))
        turned = torch.full([wanted.shape[dim] for dim in order], -1, dtype=torch.int32)
        target = turned.permute([order.index(dim) for dim in range(len(shape))])
        read(tmp_path / "x", tensor, checksums, tuple(box), target)
    finally:
        blocks.BLOCK_BYTES = before
    assert torch.equal(target, wanted)


def test_blocks_without_anything_wanted_are_not_read(tmp_path, small_blocks):
    tensor = torch.arange(64.0).view(16, 4)
    checksums = written(tensor, tmp_path / "x")
    with (tmp_path / "x").open("r+b") as file:
        file.write(b"\xff" * 64)  # rows 0 to 3
    target = torch.zeros(5, 4)
    read(tmp_path / "x", tensor, checksums, (slice(4, 9), slice(0, 4)), target)
    assert torch.equal(target, tensor[4:9])
    with pytest.raises(InputError, match=r"x is damaged: its bytes 0 to 64 are not"):
        read(tmp_path / "x", tensor, checksums, (slice(3, 9), slice(0, 4)), torch.zeros(6, 4))


def test_numbers_are_converted_to_the_dtype_of_the_target(tmp_path, small_blocks):
    tensor = torch.randn(30, 3)
    checksums = written(tensor, tmp_path / "x")
    target = torch.empty(30, 3, dtype=torch.bfloat16)
    assert torch.equal(read(tmp_path / "x", tensor, checksums, target=target), tensor.bfloat16())


@given(st.integers(0, 999))
def test_any_flipped_bit_is_found(tmp_path, bit):
    tensor = torch.arange(125, dtype=torch.uint8)
    checksums = written(tensor, tmp_path / "x")
    content = bytearray((tmp_path / "x").read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(InputError, match="x is damaged"):
        read(tmp_path / "x", tensor, checksums)


def test_what_is_no_file_of_that_length_is_refused(tmp_path):
    (tmp_path / "short").write_bytes(b"12")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "short")
    os.mkfifo(tmp_path / "pipe")
    for name, words in {
        "short": "short has 2 bytes where 3 were written",
        "folder": "no plain file",
        "link": "link cannot be read",
        "pipe": "pipe is no plain file",
        "none": r"none cannot be read \(No such file",
    }.items():
        with pytest.raises(InputError, match=words):
            DataFile(tmp_path / name, 3)


@pytest.mark.gpu
def test_gpu_tensors_are_staged_and_written(tmp_path, small_blocks):
    tensor = torch.randn(9, 7, device="cuda").t()
    copy = staged(tensor)
    torch.cuda.synchronize()
    assert copy.is_pinned()
    assert torch.equal(copy, tensor.cpu())
    checksums = written(tensor, tmp_path / "x")
    target = torch.empty(7, 9, device="cuda")
    assert torch.equal(read(tmp_path / "x", tensor, checksums, target=target), tensor)
