"""Slurm's short forms."""

from __future__ import annotations

import pytest

from anybatch.errors import InputError
from anybatch.launch.hostlist import counts, hosts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("alone", ["alone"]),
        ("a,b.example.org", ["a", "b.example.org"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("node[01-02,07],gpu-a", ["node01", "node02", "node07", "gpu-a"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("x[3]-ib", ["x3-ib"]),
    ],
)
def test_host_lists_are_written_out_in_order(text: str, names: list[str]):
    assert hosts(text) == names


@pytest.mark.parametrize("text", ["", ",", "a,,b", "node[1-", "node[a-b]", "node]"])
def test_what_is_no_host_list_is_named(text: str):
    with pytest.raises(InputError, match="not a Slurm host list"):
        hosts(text)


@pytest.mark.parametrize(
    ("text", "numbers"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])]
)
def test_counts_per_node_are_written_out(text: str, numbers: list[int]):
    assert counts(text) == numbers


@pytest.mark.parametrize("text", ["", "two", "2(3)", "2(x3", "2,"])
def test_what_is_no_list_of_counts_is_named(text: str):
    with pytest.raises(InputError, match="not a Slurm list of counts"):
        counts(text)
