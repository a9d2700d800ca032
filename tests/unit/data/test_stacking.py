"""A batch that is stacked a few samples at a time is the one that `default_collate` makes of all."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from anybatch.data import Piece, map_leaves, open_fetch
from anybatch.data.stacking import AT_ONCE, Unlike, stacked


class Pair(NamedTuple):
    x: Tensor
    y: int


KINDS: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: torch.full((2, 3), float(i)),
    "number": lambda i: i,
    "array": lambda i: np.full((2, 1), i, dtype=np.int16),
    "scalar of numpy": lambda i: np.float32(i),
    "pair": lambda i: (torch.full((4,), i), float(i)),
    "named": lambda i: Pair(torch.full((4,), i), i),
    "nested": lambda i: {"a": [torch.ones(2) * i, {"b": i}], "c": torch.tensor(i % 2 == 0)},
    "half": lambda i: torch.full((3,), float(i), dtype=torch.bfloat16),
    "image": lambda i: torch.arange(12).view(1, 3, 2, 2)[0].mT + i,
    "empty": lambda i: torch.ones(0) * i,
}


class Made(Dataset):
    """Samples by a function; counts how many it was asked for."""

    def __init__(self, make: Callable[[int], Any], length: int = 4 * AT_ONCE) -> None:
        self.make, self.length, self.asked = make, length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return self.make(index)


class Together(Made):
    """Gives several samples in one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert len(indices) <= AT_ONCE
        return [self[i] for i in indices]


def assert_same(found: Any, expected: Any) -> None:
    leaves: list[list[Any]] = [[], []]
    for batch, kept in zip((found, expected), leaves, strict=True):
        map_leaves(batch, lambda leaf, kept=kept: kept.append(leaf))
    assert type(found) is type(expected)
    for one, other in zip(*leaves, strict=True):
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("num", [1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE - 1, 3 * AT_ONCE])
@pytest.mark.parametrize("kind", KINDS)
def test_stacking_is_collating_whatever_the_number(kind: str, num: int):
    samples = [KINDS[kind](i) for i in range(num)]
    assert_same(stacked(iter(samples), num), default_collate(samples))


@pytest.mark.parametrize("dataset", [Made, Together])
def test_a_fetch_asks_for_each_sample_once_and_holds_a_few(dataset: type[Made]):
    alive: set[int] = set()
    most = 0

    def make(index: int) -> Any:
        nonlocal most
        array = np.full(8, index)
        alive.add(index)
        most = max(most, len(alive))
        weakref.finalize(array, alive.discard, index)
        return array

    made = dataset(make)
    indices = torch.arange(3 * AT_ONCE + 5)
    batch = open_fetch(made, None, seed=0)([Piece(0, indices)])
    assert torch.equal(batch[:, 0], indices)
    assert made.asked == len(indices)
    assert most <= 2 * AT_ONCE


@pytest.mark.parametrize(
    "make",
    [
        lambda i: f"name {i}",
        lambda i: (torch.ones(2), f"name {i}"),
        lambda i: i if i < AT_ONCE else float(i),
    ],
)
def test_what_cannot_be_stacked_is_collated_at_once(make: Callable[[int], Any]):
    num = 2 * AT_ONCE
    samples = [make(i) for i in range(num)]
    with pytest.raises(Unlike):
        stacked(iter(samples), num)
    fetch = open_fetch(made := Made(make), None, seed=0)
    piece = Piece(0, torch.arange(num))
    expected = default_collate(samples)
    for _ in range(2):
        assert_same(fetch([piece]), expected)
        before, made.asked = made.asked, 0
    assert before == num  # found out once, not in every batch


def test_random_samples_are_those_of_their_seeds_stacked_or_not():
    def batch_of(num: int) -> Tensor:
        fetch = open_fetch(Made(lambda i: torch.rand(3)), None, seed=7)
        return fetch([Piece(1, torch.arange(num))])

    alone = batch_of(AT_ONCE)
    assert torch.equal(batch_of(3 * AT_ONCE)[:AT_ONCE], alone)
    assert len(batch_of(3 * AT_ONCE).unique()) > AT_ONCE


def test_a_sample_that_stops_the_iteration_is_no_shorter_batch():
    def make(index: int) -> Tensor:
        if index == AT_ONCE + 3:
            raise StopIteration
        return torch.ones(2)

    fetch = open_fetch(Made(make), None, seed=0)
    with pytest.raises(Exception, match=f"sample {AT_ONCE + 3} of Made .*StopIteration"):
        fetch([Piece(0, torch.arange(2 * AT_ONCE))])
