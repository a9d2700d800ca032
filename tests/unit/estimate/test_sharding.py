"""The bytes of a sharded model, from the sizes of its blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.equivalence.decoder import Decoder
from torch import nn

from anybatch.estimate.family import Traced
from anybatch.estimate.peak import replayed
from anybatch.estimate.sharding import GATHERED, STATE, Division, Parts, parts_of
from anybatch.estimate.trace import Block, Operation, Timeline
from anybatch.machine import Machine
from anybatch.process.cuda_driver import TYPICAL_CONTEXT_BYTES

EVEN = Parts(root=0, blocks=(100,) * 6)
CPU = Machine.here(device="cpu").device
ABSENT = Machine.describe("900GiB").device
_trace = {"begin": 1, "num_micro_batches": 1, "modules": {}, "shapes": {}, "calls": {}}


def gathered(parts: Parts, ranks: int = 4, by_gloo: bool = True) -> int:
    return Division(parts, ranks, by_gloo).state(0)[GATHERED]


def test_what_is_kept_is_divided():
    for ranks in (1, 4):
        state = Division(EVEN, ranks, by_gloo=True).state(1200)
        assert [state[kind] for kind in STATE] == [600 // ranks, 600 // ranks, 1200 // ranks]


def test_the_peak_of_a_rank_is_that_of_its_part():
    """In the whole model the update takes most, on each of four ranks a pass does."""
    update, passes = Operation("add", "update", False, ""), Operation("mm", "compute", False, "a")
    blocks = [
        Block(600, 0, "build", kind="parameters"),
        Block(1200, 0, "build", kind="optimizer state"),
        Block(300, 1, "compute", 1),
        Block(600, 2, "update", 2),
    ]
    timeline = Timeline(blocks, {2: 40}, [passes, update], num_moments=2)
    traced = Traced(timeline, commit_bytes=(640, 640), end=2, **_trace)
    division = Division(EVEN, 4, by_gloo=True)
    part = replayed(traced, CPU, division)
    assert replayed(traced, CPU, None).taken.peak_bytes == 1800 + 640
    assert part.taken.curve == (0, 300, 150 + 10, 0)
    peak = part.peak({"libraries": 5}, CPU)
    assert peak.num_bytes == 300 + sum(division.state(1200).values()) + 5
    assert peak.by_kind == {**division.state(1200), "activations": 300, "libraries": 5}


def test_a_cache_releases_memory_at_the_limit_of_a_rank():
    """Blocks of 30 and 40 MiB, one after the other: both segments stay while the limit allows."""
    operations = [Operation("mm", "compute", False, "a")] * 2
    blocks = [Block(30 << 20, 1, "compute", 1), Block(40 << 20, 2, "compute", 2)]
    traced = Traced(Timeline(blocks, {}, operations, 2), commit_bytes=(0, 0), end=2, **_trace)
    division = Division(Parts(0, (4 << 20,) * 6), 4, by_gloo=False)
    kept, context = sum(division.state(0).values()), TYPICAL_CONTEXT_BYTES
    for room, reserved in ((70, 70), (69, 40)):
        device = replace(ABSENT, budget_bytes=kept + context + (room << 20))
        assert replayed(traced, device, division).taken.peak_bytes == reserved << 20


@pytest.mark.parametrize("by_gloo", [False, True])
def test_what_is_gathered_does_not_grow_with_the_number_of_blocks(by_gloo: bool):
    assert gathered(Parts(0, (100,) * 2), by_gloo=by_gloo) == 300
    for depth in (6, 60):
        assert gathered(Parts(0, (100,) * depth), by_gloo=by_gloo) == (300 if by_gloo else 400)


def test_gradients_added_up_after_the_last_pass_are_kept_whole():
    state = Division(EVEN, 4, by_gloo=True, reduce_at_last=True).state(1200)
    assert state["gradients"] == 600


def test_what_is_kept_on_the_host_only_crosses():
    here, there = (
        Division(EVEN, 4, by_gloo=False, offload=offload).state(1200) for offload in (False, True)
    )
    assert [there[kind] for kind in STATE] == [0, 0, 0]
    assert there[GATHERED] == here[GATHERED] + 2 * 100 // 4


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
