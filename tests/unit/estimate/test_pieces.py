"""What many ghost batches leave in the heap, from a trace of a few."""

from __future__ import annotations

import pytest

from anybatch.estimate.pieces import OBJECT_BYTES, OBJECTS, cut_finer, tensors
from anybatch.estimate.trace import Block, Operation, Timeline

MAPPED_FROM = 128 << 10
FORWARD = Operation("aten.native_batch_norm.default", "compute", False, "norm")
BACKWARD = Operation("aten.native_batch_norm_backward.default", "compute", True, "norm")
OTHER = Operation("aten.relu.default", "compute", False, "act")


def timeline(size: int, traced: int) -> Timeline:
    """A norm over `traced` pieces of `size` bytes, another operation, and the norm's backward."""
    operations = [FORWARD] * traced + [OTHER] + [BACKWARD] * traced
    blocks: list[Block] = []
    for moment, operation in enumerate(operations, start=1):
        blocks.append(Block(size, moment, "compute", moment + 1))
        if operation is not OTHER:
            blocks += [Block(32, moment, "compute", len(operations)) for _ in range(2)]
    return Timeline(blocks, {}, operations, len(operations))


def made_by(found: Timeline, operation: Operation) -> list[Block]:
    return [b for b in found.blocks if found.operations[b.born - 1] is operation]


@pytest.mark.parametrize(("traced", "real"), [(4, 17), (4, 5), (3, 3), (1, 8)])
def test_a_norm_has_as_many_results_statistics_and_objects_as_ghost_batches(traced: int, real: int):
    whole = timeline(8192, traced)
    found = cut_finer(whole, traced, real, MAPPED_FROM)
    blocks = made_by(found, FORWARD)
    objects = [b for b in blocks if b.kind == OBJECTS]
    statistics = [b for b in blocks if b.num_bytes == 32]
    results = [b for b in blocks if b not in objects and b not in statistics]
    assert [b.num_bytes for b in objects] == [OBJECT_BYTES] * real
    assert (len(results), len(statistics)) == (real, 2 * real)
    assert 8192 * traced <= sum(b.num_bytes for b in results) < 8192 * traced + real
    assert made_by(found, OTHER) == made_by(whole, OTHER)


def test_objects_live_as_long_as_what_backward_needs():
    found = cut_finer(timeline(8192, 4), 4, 16, MAPPED_FROM)
    end = found.num_moments
    assert {b.died for b in found.blocks if b.kind == OBJECTS} == {end}


def test_backward_is_divided_but_for_gradients():
    found = cut_finer(timeline(8192, 4), 4, 16, MAPPED_FROM)
    sizes = [b.num_bytes for b in made_by(found, BACKWARD)]
    assert sizes.count(2048) == 16
    assert sizes.count(32) == 8


def test_pieces_that_are_mapped_stay_whole():
    found = cut_finer(timeline(64 * MAPPED_FROM, 4), 4, 16, MAPPED_FROM)
    assert sum(b.num_bytes == 64 * MAPPED_FROM for b in made_by(found, FORWARD)) == 4
    assert sum(b.kind == OBJECTS for b in found.blocks) == 16


def test_one_ghost_batch_changes_nothing():
    whole = timeline(8192, 1)
    assert cut_finer(whole, 1, 1, MAPPED_FROM) is whole


def test_blocks_are_told_apart_by_identity():
    # The allocators know a block by its object.
    found = cut_finer(timeline(8192, 4), 4, 17, MAPPED_FROM)
    assert len({id(b) for b in found.blocks}) == len(found.blocks)


def test_tensors_are_all_but_objects():
    found = tensors(cut_finer(timeline(8192, 4), 4, 17, MAPPED_FROM))
    assert not any(b.kind == OBJECTS for b in found.blocks)
    assert len(found.blocks) == 17 * 3 + 1 + 17 + 8
