"""The number of machines, as it is written."""

from __future__ import annotations

import os
from typing import Any

import pytest

from anybatch.errors import InputError
from anybatch.launch import call, parse_nodes


@pytest.mark.parametrize(("text", "nodes"), [("1", 1), ("4", 4), ("2:4", (2, 4)), ("3:3", (3, 3))])
def test_one_number_or_the_least_and_the_most(text: str, nodes: int | tuple[int, int]):
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "two", "1:2:3", ":2", "2:", "-1", "1.5"])
def test_what_is_no_number_of_machines_is_named(text: str):
    with pytest.raises(InputError, match=f"number of machines is '{text}'"):
        parse_nodes(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 0}, "nodes is 0"),
        ({"nodes": (2, 1)}, r"nodes is \(2, 1\)"),
        ({"nodes": (0, 2)}, r"nodes is \(0, 2\)"),
        ({"nodes": (1, 2)}, "there is no rendezvous"),
        ({"restarts": -1}, "restarts is -1"),
        ({"ranks": 1_000_000}, "ranks is 1,000,000, .* are free: start at most"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_named(options: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words):
        call(os.getpid, **{"ranks": 1, **options})
