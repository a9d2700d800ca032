"""A manifest is believed only after it was checked; each edit here is sealed anew, as forgers do."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import pickle

import hypothesis.strategies as st
import pytest
from hypothesis import given

from anybatch.errors import InputError
from anybatch.state.manifest import Manifest, read_manifest

GOOD = {
    "version": 1,
    "step": 12,
    "score": 0.5,
    "block_bytes": 4096,
    "files": [24, 40],
    "tensors": {
        "x": {
            "dtype": "float32",
            "shape": [4, 3],
            "slices": [
                {"offsets": [0, 0], "sizes": [2, 3], "file": 0, "start": 0, "checksums": [1]},
                {"offsets": [2, 0], "sizes": [2, 3], "file": 1, "start": 0, "checksums": [2]},
            ],
        },
        "y": {
            "dtype": "float64",
            "shape": [2],
            "slices": [{"offsets": [0], "sizes": [2], "file": 1, "start": 24, "checksums": [3]}],
        },
        "z": {"dtype": "bool", "shape": [0, 3], "slices": []},
    },
    "facts": {"a": [1, 2.5, None, {"b": "c"}]},
}


def seal(body):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    return b'{"sha256": "' + digest + b'", "manifest": ' + text + b"}\n"


def edited(*changes):
    body = copy.deepcopy(GOOD)
    for path, value in changes:
        *way, last = path.split(".")
        place = body
        for key in way:
            place = place[int(key) if isinstance(place, list) else key]
        place[int(last) if isinstance(place, list) else last] = value
    return seal(body)


def test_there_and_back():
    manifest = Manifest.from_bytes(seal(GOOD))
    assert manifest.model_dump() == GOOD
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert json.loads(manifest.to_bytes())["manifest"] == GOOD


HELD = "'x' is not a tensor that the files hold"

EDITS = {
    "version": ([("version", 2)], "version: Input should be 1"),
    "negative step": ([("step", -1)], "step: "),
    "text for a number": ([("step", "12")], "step: "),
    "fraction for a number": ([("files.0", 24.0)], "files.0: "),
    "true for a number": ([("tensors.x.shape.0", True)], "shape.0: "),
    "another field": ([("path", "/etc/passwd")], "path: Extra inputs are not permitted"),
    "a path for a file": ([("tensors.x.slices.0.file", "../../secret")], "slices.0.file: "),
    "no such file": ([("tensors.x.slices.0.file", 2)], HELD),
    "negative file": ([("tensors.x.slices.0.file", -1)], "slices.0.file: "),
    "unknown dtype": ([("tensors.x.dtype", "object")], HELD),
    "attribute of torch": ([("tensors.x.dtype", "load")], HELD),
    "absurd shape": ([("tensors.x.shape", [2**40, 2**40])], HELD),
    "overflowing shape": ([("tensors.x.shape.0", 2**63)], "shape.0: "),
    "negative shape": ([("tensors.x.shape.0", -4)], "shape.0: "),
    "hundreds of dims": ([("tensors.x.shape", [1] * 500)], HELD),
    "not the whole": ([("tensors.x.shape", [5, 3])], HELD),
    "dims of a slice": ([("tensors.x.slices.0.sizes", [6])], HELD),
    "slice out of range": ([("tensors.x.slices.1.offsets", [3, 0])], HELD),
    "empty slice": ([("tensors.x.slices.1.sizes", [0, 3])], HELD),
    "bytes twice": ([("tensors.y.slices.0.start", 0)], "in file 1 slices overlap"),
    "bytes between": ([("files.1", 48), ("tensors.y.slices.0.start", 32)], "or leave gaps"),
    "beyond the end": ([("tensors.y.slices.0.start", 2**61)], "overlap, or leave gaps"),
    "longer file": ([("files.1", 2**50)], "in file 1 slices overlap, or leave gaps"),
    "too many checksums": ([("tensors.x.slices.0.checksums", [1, 2])], HELD),
    "no checksum": ([("tensors.x.slices.0.checksums", [])], HELD),
    "wide checksum": ([("tensors.x.slices.0.checksums", [2**32])], "checksums.0: "),
    "no blocks": ([("block_bytes", 0)], "block_bytes: "),
    "absurd blocks": ([("block_bytes", 2**40)], "block_bytes: "),
    "odd blocks": ([("block_bytes", 4097)], "block_bytes: "),
    "tensors of another type": ([("tensors", [1])], "tensors: "),
    "facts of another type": ([("facts", "x")], "facts: "),
}


@pytest.mark.parametrize("name", sorted(EDITS))
def test_an_edit_is_named_with_its_place(name):
    changes, words = EDITS[name]
    with pytest.raises(InputError) as told:
        Manifest.from_bytes(edited(*changes))
    assert words in str(told.value)
    assert "manifest.json is not one of a checkpoint" in str(told.value)
    assert len(str(told.value)) < 600


TEXTS = {
    "nothing": (b"", "is empty"),
    "half": (seal(GOOD)[:200], "is damaged"),
    "unsealed": (json.dumps(GOOD).encode(), "is damaged"),
    "edited": (seal(GOOD).replace(b'"step": 12', b'"step": 13'), "changed after it was written"),
    "pickle": (pickle.dumps(GOOD), "is damaged"),
    "not JSON": (seal(b"{1}"), "is not one of a checkpoint"),
    "deep": (seal(b'{"a": ' + b"[" * 100_000 + b"}"), "is not one of a checkpoint"),
    "long number": (seal(b'{"a": ' + b"9" * 10_000 + b"}"), "is not one of a checkpoint"),
    "not UTF-8": (seal(b'{"\xff": 1}'), "is not one of a checkpoint"),
}


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_what_is_no_manifest_is_an_error_in_a_sentence(name):
    text, words = TEXTS[name]
    with pytest.raises(InputError, match=words):
        Manifest.from_bytes(text)


@given(st.integers(0, 8 * len(seal(GOOD)) - 1))
def test_any_flipped_bit_is_found(bit):
    text = bytearray(seal(GOOD))
    text[bit // 8] ^= 1 << bit % 8
    with pytest.raises(InputError):
        Manifest.from_bytes(bytes(text))


@given(st.integers(0, len(seal(GOOD)) - 1))
def test_torn_anywhere_is_found(length):
    with pytest.raises(InputError):
        Manifest.from_bytes(seal(GOOD)[:length])


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3).flatmap(
        lambda shape: st.tuples(
            st.just(shape), *(st.sets(st.integers(1, 3), max_size=2) for _ in shape)
        )
    ),
    st.randoms(use_true_random=False),
)
def test_every_tiling_is_accepted_and_no_other(drawn, random):
    shape, *cuts = drawn
    tiles = [([], [])]
    for size, cut in zip(shape, cuts, strict=True):
        edges = [0, *sorted(one for one in cut if one < size), size]
        spans = list(itertools.pairwise(edges))
        tiles = [([*o, a], [*s, b - a]) for o, s in tiles for a, b in spans]
    random.shuffle(tiles)

    def manifest(tiles):
        slices, start = [], 0
        for offsets, sizes in tiles:
            num_bytes = 1
            for size in sizes:
                num_bytes *= size
            slices.append(
                {"offsets": offsets, "sizes": sizes, "file": 0, "start": start, "checksums": [0]}
            )
            start += num_bytes
        record = {"dtype": "uint8", "shape": shape, "slices": slices}
        return seal({**GOOD, "files": [start], "tensors": {"x": record}})

    Manifest.from_bytes(manifest(tiles))
    with pytest.raises(InputError):
        Manifest.from_bytes(manifest(tiles[1:] or [([0] * len(shape), [9] * len(shape))]))
    with pytest.raises(InputError):
        Manifest.from_bytes(manifest([*tiles, tiles[0]]))


def test_the_file_must_be_a_plain_one_of_sane_size(tmp_path):
    path = tmp_path / "manifest.json"
    with pytest.raises(InputError, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)
    path.symlink_to("/etc/hostname")
    with pytest.raises(InputError, match=r"manifest\.json cannot be read"):
        read_manifest(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InputError, match="no plain file"):
        read_manifest(tmp_path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match="which is absurd"):
        read_manifest(tmp_path)
