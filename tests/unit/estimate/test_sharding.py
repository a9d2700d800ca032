"""The bytes of a sharded model, from the sizes of its blocks."""

from __future__ import annotations

import pytest
from tests.equivalence.decoder import Decoder
from torch import nn

from anybatch.estimate.sharding import GATHERED, Division, Parts, parts_of

EVEN = Parts(root=0, blocks=(100,) * 6)
STATE = {"parameters": 600, "gradients": 600, "optimizer state": 1200}


def gathered(parts: Parts, ranks: int = 4, by_gloo: bool = True) -> int:
    return Division(parts, ranks, by_gloo).divided(0, {})[1][GATHERED]


def test_what_is_kept_is_divided():
    for ranks in (1, 4):
        peak, kinds = Division(EVEN, ranks, by_gloo=True).divided(2400 + 7, {**STATE, "batch": 7})
        assert [kinds[kind] for kind in STATE] == [600 // ranks, 600 // ranks, 1200 // ranks]
        assert kinds["batch"] == 7
        assert peak == 2400 // ranks + kinds[GATHERED] + 7


@pytest.mark.parametrize("by_gloo", [False, True])
def test_what_is_gathered_does_not_grow_with_the_number_of_blocks(by_gloo: bool):
    assert gathered(Parts(0, (100,) * 2), by_gloo=by_gloo) == 300
    for depth in (6, 60):
        assert gathered(Parts(0, (100,) * depth), by_gloo=by_gloo) == (300 if by_gloo else 400)


def test_gradients_added_up_after_the_last_pass_are_kept_whole():
    _, kinds = Division(EVEN, 4, by_gloo=True, reduce_at_last=True).divided(2400, STATE)
    assert kinds["gradients"] == 600


def test_what_is_kept_on_the_host_only_crosses():
    here, there = (
        Division(EVEN, 4, by_gloo=False, offload=offload).divided(2400, STATE)
        for offload in (False, True)
    )
    assert [there[1][kind] for kind in STATE] == [0, 0, 0]
    assert there[0] == here[0] - 2400 // 4 + 2 * 100 // 4


def test_one_large_block_decides():
    assert gathered(Parts(10, (1, 1, 500, 1)), by_gloo=False) == 2 * 10 + 500 + 500 + 2


def test_the_root_is_gathered_all_the_time():
    assert gathered(Parts(40, (100,) * 3), 2) == 300 + 2 * 40
    assert gathered(Parts(40, ()), 2) == 80 + 20


def test_parts_of_a_model():
    model = Decoder(width=16, depth=3, words=23)
    parts = parts_of(model)
    block = sum(p.nbytes for p in model.layers[0].parameters())
    assert parts.blocks == (block,) * 3
    assert parts.whole == sum(p.nbytes for p in model.parameters())  # tied weights once


def test_a_block_that_shares_a_parameter_belongs_to_the_root():
    model = Decoder(depth=2)
    model.layers[0].out.bias = model.norm.bias
    assert len(parts_of(model).blocks) == 1


def test_a_model_without_blocks_is_all_root():
    assert parts_of(nn.Linear(4, 4)) == Parts(80, ())


def test_a_plain_sequence_is_gathered_layer_by_layer():
    parts = parts_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    assert parts == Parts(0, (80, 80))
