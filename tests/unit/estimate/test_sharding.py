"""The bytes of a sharded model, from the order in which buffers are taken and freed."""

from __future__ import annotations

import pytest
from tests.equivalence.decoder import Decoder
from torch import nn

from anybatch.estimate.sharding import Parts, parts_of, sharded_bytes

EVEN = Parts(root=0, blocks=(100,) * 6)


def test_what_is_kept_is_divided():
    one, four = (sharded_bytes(EVEN, ranks, 1200) for ranks in (1, 4))
    assert (one.parameters, one.gradients, one.optimizer_state) == (600, 600, 1200)
    assert (four.parameters, four.gradients, four.optimizer_state) == (150, 150, 300)
    assert four.kept == 600
    assert four.peak == 600 + max(four.forward, four.backward)


@pytest.mark.parametrize(("copies", "forward", "backward"), [(0, 200, 300), (1, 300, 300)])
def test_what_is_gathered_does_not_grow_with_the_number_of_blocks(copies, forward, backward):
    for depth in (2, 6, 60):
        found = sharded_bytes(Parts(0, (100,) * depth), 4, 0, copies_by_network=copies)
        assert (found.forward, found.backward) == (forward, backward)


def test_gathering_ahead_takes_a_block_more():
    plain = sharded_bytes(EVEN, 4, 0)
    ahead = sharded_bytes(EVEN, 4, 0, prefetch=True)
    assert ahead.forward == plain.forward
    assert ahead.backward == plain.backward + 100


def test_gradients_added_up_after_the_last_pass_are_kept_whole():
    assert sharded_bytes(EVEN, 4, 0, reduce_at_last=True).gradients == 600


def test_one_large_block_decides():
    found = sharded_bytes(Parts(10, (1, 1, 500, 1)), 4, 0, copies_by_network=0)
    assert found.forward == 10 + 500 + 500
    assert found.backward == 2 * 10 + 500 + 500 + 1


def test_the_root_is_gathered_all_the_time():
    assert sharded_bytes(Parts(40, (100,) * 3), 2, 0).forward == 300 + 40
    assert sharded_bytes(Parts(40, ()), 2, 0).forward == 80


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
