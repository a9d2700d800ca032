"""Every nesting a collate function may return: its size, its pieces; and bad batches."""

import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import default_collate

from anybatch.data import resized
from anybatch.data.batch_slices import batch_size, slice_batch, split, to_device
from anybatch.errors import DataError

Pair = namedtuple("Pair", ["x", "name"])
X = torch.arange(12.0).view(4, 3)
Y = torch.arange(4)


class Encoding(UserDict):
    """As transformers' BatchEncoding: a UserDict with an attribute of its own."""

    def __init__(self, data=None, origin=None):
        super().__init__(data)
        self.origin = origin


@dataclass(frozen=True)
class Graph:
    nodes: torch.Tensor
    scale: float = 1.0
    doubled: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "doubled", self.nodes * 2)


IMAGES = tuple(torch.rand(3, 5, 6 + i) for i in range(4))  # channels first: first sizes agree
TARGETS = tuple({"boxes": torch.rand(i, 4), "label": i} for i in range(4))

SIZED = [
    (X, 4),
    (X.numpy(), 4),
    ([X, Y], 4),
    ((X, Y), 4),
    ([X], 4),
    ({"x": X, "y": Y}, 4),
    ({"x": X, "len": 7, "name": "a", "none": None, "f": len, "zero": torch.tensor(3)}, 4),
    (Pair(X, ("a", "b", "c", "d")), 4),
    (Graph(X), 4),
    (Encoding({"x": X}), 4),
    ([[X, Y], {"a": X}], 4),
    ([X, ("a", "b", "c", "d")], 4),
    ([torch.rand(5), torch.rand(7), torch.rand(3)], 3),  # sequences of unequal length
    ([torch.rand(5, 2), None, torch.rand(7, 2)], 3),
    ([torch.tensor(1), torch.tensor(2)], 2),
    (list(TARGETS), 4),
    (["a", "b"], 2),
    ([1, 2, 3], 3),
    ((IMAGES, TARGETS), 4),
    ([list(IMAGES), list(TARGETS)], 4),
    ({"images": IMAGES, "y": Y}, 4),
    ([(torch.rand(3, 8, 8), 1), (torch.rand(3, 8, 8), 0)], 2),  # collate=list
    ([[1, 2, 3], [4, 5]], 2),
    ({"tokens": [[1, 2, 3], [4, 5, 6]], "y": torch.rand(2)}, 2),
    (default_collate([((X, Y), "a", {"k": 1.0})] * 5), 5),
    (torch.rand(0, 3), 0),
    ([torch.rand(0, 3), torch.rand(0)], 0),
]


@pytest.mark.parametrize(("batch", "size"), SIZED)
def test_size(batch, size):
    assert batch_size(batch) == size


@pytest.mark.parametrize(("batch", "size"), [pair for pair in SIZED if pair[1] >= 2])
def test_pieces_have_their_size_and_type(batch, size):
    head, tail = split(batch, [size - 1, 1])
    assert type(head) is type(batch)
    assert type(tail) is type(batch)
    assert repr(slice_batch(batch, 0, size - 1)) == repr(head)
    assert split(batch, [size])[0] is batch


def test_tensors_are_cut_as_views_and_the_rest_is_passed_along():
    batch = {"x": X, "a": X.numpy(), "n": 3, "f": len, "zero": torch.tensor(3), "s": list("abcd")}
    piece = slice_batch(batch, 1, 3)
    assert piece["x"].data_ptr() == X[1].data_ptr()
    assert np.shares_memory(piece["a"], X.numpy())
    assert piece["zero"] is batch["zero"]
    assert (piece["n"], piece["f"], piece["s"]) == (3, len, ["b", "c"])


def test_containers_keep_their_type_and_what_else_they_carry():
    piece = slice_batch(Encoding({"x": X}, origin="tokenizer"), 1, 3)
    assert isinstance(piece, Encoding)
    assert piece.origin == "tokenizer"
    assert len(piece["x"]) == 2
    default = slice_batch(defaultdict(list, x=X), 0, 2)
    assert default.default_factory is list
    assert isinstance(slice_batch(OrderedDict(x=X), 0, 2), OrderedDict)
    assert isinstance(slice_batch(types.MappingProxyType({"x": X}), 0, 2), types.MappingProxyType)
    assert slice_batch(Pair(X, "all"), 0, 2).name == "all"
    graph = slice_batch(Graph(X, 0.5), 0, 2)
    assert graph.scale == 0.5
    assert torch.equal(graph.doubled, X[:2] * 2)


def test_detection_keeps_images_and_targets_together():
    images, targets = slice_batch((IMAGES, TARGETS), 1, 3)
    assert images == IMAGES[1:3]
    assert targets == TARGETS[1:3]


def test_as_many_images_as_channels_are_samples_beside_their_targets():
    batch = IMAGES[:3], TARGETS[:3]
    assert slice_batch(batch, 1, 2) == (IMAGES[1:2], TARGETS[1:2])
    assert split(batch, [2, 1])[1] == (IMAGES[2:3], TARGETS[2:3])
    assert [image.shape for image in resized(batch, 4)[0]] == [
        image.shape for image in (*IMAGES[:3], IMAGES[0])
    ]
    both = TARGETS[:2], TARGETS[2:]  # before and after, say
    assert slice_batch(both, 1, 2) == (TARGETS[1:2], TARGETS[3:])
    inputs = [X[:3], X[:3]], Y[:3]  # nothing says that these are samples
    assert [len(part) for part in slice_batch(inputs, 1, 2)[0]] == [1, 1]


def test_images_are_counted_by_their_targets_though_each_of_these_has_as_many_boxes_as_channels():
    targets = tuple({"boxes": torch.rand(3, 4), "labels": torch.arange(3)} for _ in range(2))
    batch = IMAGES[:2], targets
    assert batch_size(batch) == 2
    assert resized(batch, 5)[0][4].shape == IMAGES[0].shape


class Loss:
    pass


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": X, "labels": Y[:3]}, [r"batch\['x'\] has 4", r"batch\['labels'\] has 3", "dim 0"]),
        ((X, Y[:3]), [r"batch\[0\] has 4", r"batch\[1\] has 3"]),
        (Pair(X, ["a", "b"]), [r"batch\.x has 4", r"batch\.name has 2"]),
        ([X, {"k": {"m": Y[:2]}}], [r"batch\[1\]\['k'\]\['m'\] has 2"]),
        (None, ["NoneType", "no tensor"]),
        (5, ["int"]),
        ("text", ["str"]),
        ({}, ["dict"]),
        ([], ["list"]),
        (torch.tensor(1.0), ["Tensor"]),
        ({"n": 3, "zero": torch.tensor(1)}, ["dict"]),
        (Loss(), ["Loss", "return tensors from collate"]),
    ],
)
def test_bad_batches(batch, says):
    for text in says:
        with pytest.raises(DataError, match=text):
            batch_size(batch)
    with pytest.raises(DataError):
        split(batch, [1, 1])


def test_sizes_must_add_up():
    with pytest.raises(DataError, match=r"4 samples.*\[2, 1\], 3 in all"):
        split(X, [2, 1])


def test_the_known_size_settles_what_cannot_be_told():
    # Two tensors of first size 3: a structure of size 3, unless two samples are asked for.
    images = [torch.rand(3, 5, 5), torch.rand(3, 6, 6)]
    assert batch_size(images) == 3
    assert split(images, [1, 1]) == [images[:1], images[1:]]


class Movable:
    moved: Any = None

    def to(self, device):
        self.moved = device
        return self


def test_to_device_moves_what_can_move_and_returns_the_batch_where_nothing_does():
    batch = {"x": X, "rest": [Y, "a", (None, X.numpy())]}
    assert to_device(batch, "cpu") is batch
    moved = to_device(batch, "meta")
    assert moved["x"].is_meta
    assert moved["rest"][0].is_meta
    assert moved["rest"][2] is batch["rest"][2]
    assert not batch["x"].is_meta
    thing = Movable()
    to_device([thing], "cpu")
    assert thing.moved == torch.device("cpu")


def test_resized_batches_keep_their_form():
    batch = {"x": X, "a": X.numpy(), "names": ["a", "b", "c", "d"], "n": 4, "targets": TARGETS}
    large = resized(batch, 9)
    assert batch_size(large) == 9
    assert large["x"].shape == (9, 3)
    assert large["names"][7:] == ["d", "a"]
    assert large["n"] == 4


def test_rows_of_sparse_tensors():
    dense = torch.randn(12, 5, 2, generator=torch.Generator().manual_seed(0)).relu()
    flat = dense[..., 0].clone()
    flat[3:5] = 0  # rows without elements
    coo = flat.to_sparse()
    turned = torch.sparse_coo_tensor(coo.indices().flip(1), coo.values().flip(0), flat.shape)
    for whole, sparse in (
        (flat, coo),
        (flat, turned),  # not coalesced
        (flat, flat.to_sparse_csr()),
        (flat, flat.to_sparse_csc()),
        (dense, dense.to_sparse()),
        (dense, dense.to_sparse(1)),  # rows are dense
    ):
        pieces = split((sparse, Y.repeat(3)), [1, 3, 1, 7])
        for (piece, _), wanted in zip(pieces, whole.split([1, 3, 1, 7]), strict=True):
            assert piece.layout is sparse.layout
            assert torch.equal(piece.to_dense(), wanted)


@pytest.mark.parametrize("in_order", [False, True])
def test_rows_of_packed_sequences(in_order):
    lengths = torch.tensor([7, 6, 6, 3, 1] if in_order else [3, 6, 1, 7, 6])
    padded = torch.randn(5, 7, 2, generator=torch.Generator().manual_seed(0))
    packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=in_order)
    torch.manual_seed(0)
    gru = torch.nn.GRU(2, 3)
    whole = gru(packed)[1]
    for piece, some in zip(split(packed, [1, 3, 1]), whole.split([1, 3, 1], 1), strict=True):
        torch.testing.assert_close(gru(piece)[1], some)
    again, found = pad_packed_sequence(split(packed, [1, 4])[1], batch_first=True)
    assert found.tolist() == lengths[1:].tolist()
    for row, wanted, length in zip(again, padded[1:], found, strict=True):
        assert torch.equal(row[:length], wanted[:length])


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_rows_of_nested_tensors(layout):
    rows = [torch.randn(length, 2) for length in (3, 1, 4, 2)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    pieces = split((nested, nested * 2), [1, 3])
    for (once, twice), wanted in zip(pieces, (rows[:1], rows[1:]), strict=True):
        total = once + twice  # their offsets are the same, as those of the whole batch are
        for row, one in zip(total.unbind(), wanted, strict=True):
            torch.testing.assert_close(row, one * 3)
