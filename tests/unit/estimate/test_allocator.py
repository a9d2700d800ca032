"""Allocators replayed on timelines drawn by hand.

A timeline is a list of (bytes, born, died): alive from the moment `born` to the moment `died`, both
included.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.estimate.allocator import PAGE, CudaCache, GlibcHeap
from anybatch.estimate.trace import COPIED, Block, Timeline

MAPPED_FROM = 128 << 10
MIB = 1 << 20
HEADER = 64 + 16  # torch's alignment, malloc's own words

Life = tuple[int, int, int | None]


def timeline(*lives: Life, scratch: dict[int, int] | None = None) -> Timeline:
    blocks = [Block(size, born, "compute", died) for size, born, died in lives]
    last = max([born for _, born, _ in lives] + [died or 0 for _, _, died in lives])
    return Timeline(blocks=blocks, scratch=scratch or {}, num_moments=last + 1)


def heap(*lives: Life, trim: int = MAPPED_FROM, **more: dict[int, int]) -> int:
    return GlibcHeap(MAPPED_FROM, trim).replay(timeline(*lives, **more)).peak_bytes


def on_heap(size: int) -> int:
    return -(-(size + HEADER) // 16) * 16


def cuda(*lives: Life, **options: Any) -> int:
    return CudaCache(**options).replay(timeline(*lives)).peak_bytes


# ------------------------------------------------------------------------------------------ glibc


@pytest.mark.parametrize("size", [1, 15, 16, 17, 100, 4096, MAPPED_FROM - 1])
def test_a_small_block_is_rounded_to_sixteen_bytes(size: int):
    assert heap((size, 0, 1)) == on_heap(size)


@pytest.mark.parametrize("size", [MAPPED_FROM, MAPPED_FROM + 1, 1 << 20, (1 << 20) - HEADER])
def test_a_large_block_is_mapped_in_whole_pages(size: int):
    taken = heap((size, 0, 1))
    assert taken % PAGE == 0
    assert size + HEADER <= taken < size + HEADER + PAGE


def test_an_empty_block_takes_nothing():
    assert heap((0, 0, 1)) == 0


def test_blocks_that_live_together_add_up_and_those_in_turn_do_not():
    assert heap((1000, 0, 3), (2000, 1, 3)) == on_heap(1000) + on_heap(2000)
    assert heap((1000, 0, 1), (1000, 2, 3), (1000, 4, 5)) == on_heap(1000)


def test_the_block_that_is_born_while_another_dies_stands_beside_it():
    # A block is alive while its last operation runs: argument and result are there at once.
    assert heap((1000, 0, 2), (1000, 2, 3)) == 2 * on_heap(1000)


def test_a_hole_is_used_again_by_a_block_that_fits():
    lives = [(4000, 0, 1), (100, 0, None), (3000, 2, None)]
    assert heap(*lives) == on_heap(4000) + on_heap(100)


def test_a_hole_that_is_too_small_stays_a_hole():
    lives = [(4000, 0, 1), (100, 0, None), (5000, 2, None)]
    assert heap(*lives) == on_heap(4000) + on_heap(100) + on_heap(5000)


def test_the_smallest_hole_that_fits_is_taken():
    # Holes of 8000 and of 4000 bytes; 4000 goes into the small one, so 8000 still fits the other.
    lives = [
        (8000, 0, 1),
        (100, 0, None),
        (4000, 0, 1),
        (100, 0, None),
        (4000, 2, None),
        (8000, 3, None),
    ]
    assert heap(*lives) == on_heap(8000) + on_heap(4000) + 2 * on_heap(100)


def test_a_large_block_takes_a_hole_if_there_is_one_and_leaves_the_heap_as_long():
    large = MAPPED_FROM + 1000
    lives = [(100_000, 0, 1), (100_000, 0, 1), (100, 0, None), (large, 2, 3)]
    assert heap(*lives) == 2 * on_heap(100_000) + on_heap(100)
    without = [(100, 0, None), (large, 2, 3)]
    assert heap(*without) == on_heap(100) + heap((large, 0, 1))


def test_the_longest_that_the_heap_was_is_told():
    taken = GlibcHeap(MAPPED_FROM, MAPPED_FROM).replay(
        timeline((MAPPED_FROM, 0, 1), (5000, 2, 3), (2000, 2, None))
    )
    assert taken.heap_bytes == on_heap(5000) + on_heap(2000)


def test_large_blocks_that_lie_in_the_heap_are_told():
    large, longer = MAPPED_FROM + 1000, 2 * MAPPED_FROM
    lives = [(100_000, 0, 1), (100_000, 0, 1), (100, 0, None), (large, 2, 3), (longer, 2, 3)]
    taken = GlibcHeap(MAPPED_FROM, MAPPED_FROM).replay(timeline(*lives, (large, 4, 5)))
    assert taken.large_in_heap_bytes == large  # one after the other, in the one hole
    apart = GlibcHeap(MAPPED_FROM, MAPPED_FROM).replay(timeline((100, 0, None), (large, 2, 3)))
    assert apart.large_in_heap_bytes == 0


def test_neighbouring_holes_are_joined():
    lives = [(4000, 0, 1), (4000, 0, 2), (100, 0, None), (8000, 3, None)]
    assert heap(*lives) == 2 * on_heap(4000) + on_heap(100)


def test_the_last_hole_grows_at_the_top():
    # The block at the top dies (too small to be given back), and a larger one begins where it began.
    lives = [(100, 0, None), (4000, 0, 1), (9000, 2, None)]
    assert heap(*lives) == on_heap(100) + on_heap(9000)


def test_the_top_is_given_back_beyond_the_threshold():
    lives = [(60_000, 0, 1), (60_000, 0, 1), (60_000, 0, 1), (1 << 20, 3, 4)]
    mapped = heap((1 << 20, 0, 1))
    assert heap(*lives) == max(mapped, 3 * on_heap(60_000))
    assert heap(*lives, trim=1 << 30) == mapped + 3 * on_heap(60_000)


def test_scratch_counts_at_its_moment_only():
    assert heap((1000, 0, 5), scratch={3: 500}) == on_heap(1000) + 500
    lives = [(1000, 0, 5), (2000, 4, 5)]
    assert heap(*lives, scratch={2: 500}) == on_heap(1000) + on_heap(2000)


def test_the_peak_is_found_where_it_is_and_its_overhead_told():
    taken = GlibcHeap(MAPPED_FROM, MAPPED_FROM).replay(
        timeline((1000, 0, 9), (5000, 3, 4), (2000, 6, 7))
    )
    assert taken.moment == 3
    assert taken.overhead_bytes == taken.peak_bytes - 6000


# ------------------------------------------------------------------------------------------- CUDA
#
# Worked out by hand from the documented rules; MiB and KiB as in torch's source.


def test_small_blocks_share_segments_of_two_mebibytes():
    assert cuda((1, 0, 1)) == 2 << 20
    assert cuda(*[(512, 0, 1)] * 4096) == 2 << 20
    assert cuda(*[(513, 0, 1)] * 4096) == 4 << 20


def test_a_block_of_one_mebibyte_is_small_and_one_byte_more_is_not():
    assert cuda((MIB, 0, 1)) == 2 * MIB
    assert cuda((MIB + 1, 0, 1)) == 20 * MIB


def test_middle_blocks_share_segments_of_twenty_mebibytes():
    assert cuda(*[(5 * MIB, 0, 1)] * 4) == 20 * MIB
    assert cuda(*[(5 * MIB, 0, 1)] * 5) == 40 * MIB


def test_a_large_block_has_a_segment_of_its_own_in_steps_of_two_mebibytes():
    assert cuda((10 * MIB, 0, 1)) == 10 * MIB
    assert cuda((10 * MIB + 1, 0, 1)) == 12 * MIB


def test_a_rest_of_one_mebibyte_is_not_split_off_and_a_larger_one_is():
    # A segment of 12 MiB, free again. 11 MiB leave 1 MiB, which stays with the block: the next 2 MiB
    # need a segment. 9 MiB leave 3 MiB, which are split off and hold them.
    first = (12 * MIB, 0, 1)
    assert cuda(first, (11 * MIB, 2, 9), (2 * MIB, 3, 9)) == 12 * MIB + 20 * MIB
    assert cuda(first, (9 * MIB, 2, 9), (2 * MIB, 3, 9)) == 12 * MIB


def test_the_smallest_free_block_that_fits_is_taken():
    # Free: 30 and 12 MiB. 12 MiB go into the 12, so 30 still fit the other one.
    lives = [(30 * MIB, 0, 1), (12 * MIB, 0, 1), (12 * MIB, 2, 9), (30 * MIB, 3, 9)]
    assert cuda(*lives) == 42 * MIB


def test_neighbours_of_one_segment_are_joined_and_those_of_two_are_not():
    # Two of 10 MiB split from one segment of 20 join to 20; two segments of 10 MiB never do.
    joined = [(20 * MIB, 0, 1), (10 * MIB, 2, 4), (10 * MIB, 3, 4), (20 * MIB, 5, 9)]
    assert cuda(*joined) == 20 * MIB
    apart = [(10 * MIB, 0, 1), (10 * MIB, 0, 1), (20 * MIB, 5, 9)]
    assert cuda(*apart) == 40 * MIB


def test_expandable_segments_join_what_lies_side_by_side():
    lives = [(10 * MIB, 0, 1), (10 * MIB, 0, 1), (20 * MIB, 5, 9), (24 * MIB, 11, 12)]
    # 20 MiB at first; the 24 grow the same segment by a step of 20.
    assert cuda(*lives, expandable=True) == 40 * MIB
    assert cuda(*lives) == 10 * MIB + 10 * MIB + 20 * MIB + 24 * MIB


def test_blocks_beyond_the_largest_split_are_kept_whole():
    lives = [(100 * MIB, 0, 1), (30 * MIB, 2, 9)]
    assert cuda(*lives) == 100 * MIB
    assert cuda(*lives, max_split_bytes=64 * MIB) == 130 * MIB
    # A request beyond it may take one that is less than 20 MiB larger, and only such a one.
    assert cuda((100 * MIB, 0, 1), (90 * MIB, 2, 9), max_split_bytes=64 * MIB) == 100 * MIB
    assert cuda((100 * MIB, 0, 1), (80 * MIB, 2, 9), max_split_bytes=64 * MIB) == 180 * MIB


def test_what_the_cache_has_taken_it_keeps_until_the_limit_is_met():
    lives = [(12 * MIB, 0, 1), (30 * MIB, 3, 4), (40 * MIB, 6, 7)]
    assert cuda(*lives) == 82 * MIB
    assert cuda(*lives, limit_bytes=60 * MIB) == 42 * MIB
    # A segment of which a part is taken is not given back.
    held = [(40 * MIB, 0, 1), (2 * MIB, 2, 9), (50 * MIB, 3, 9)]
    assert cuda(*held, limit_bytes=60 * MIB) == 90 * MIB


def test_allocated_counts_rounded_blocks_and_reserved_counts_segments():
    taken = CudaCache().replay(timeline((513, 0, 2), (3 * MIB, 1, 2)))
    assert taken.allocated_bytes == 1024 + 3 * MIB
    assert taken.peak_bytes == 22 * MIB
    assert taken.moment == 1
    assert taken.overhead_bytes == 22 * MIB - 513 - 3 * MIB
    assert taken.curve == (2 * MIB, 22 * MIB, 22 * MIB, 22 * MIB, 22 * MIB)


def test_a_segment_that_is_taken_when_little_is_in_use_moves_no_moment():
    lives = [(30 * MIB, 1, 3), (40 * MIB, 2, 3)]
    before = CudaCache().replay(timeline(*lives))
    after = CudaCache().replay(timeline(*lives, (512, 8, 9)))  # small: a segment of 2 MiB more
    assert after.peak_bytes == before.peak_bytes + 2 * MIB
    assert (after.moment, after.allocated_bytes) == (before.moment, before.allocated_bytes)
    assert before.moment == 2
    assert after.overhead_bytes == before.overhead_bytes + 2 * MIB == 2 * MIB


def test_what_a_heap_has_allocated_is_told_without_its_holes():
    taken = GlibcHeap(MAPPED_FROM, MAPPED_FROM).replay(
        timeline((4000, 0, 1), (100, 0, None), (5000, 2, None), (MAPPED_FROM, 3, 3))
    )
    mapped = -(-(MAPPED_FROM + HEADER) // PAGE) * PAGE
    assert taken.allocated_bytes == on_heap(100) + on_heap(5000) + mapped
    assert taken.peak_bytes == taken.allocated_bytes + on_heap(4000)
    assert taken.requested_bytes == 100 + 5000 + MAPPED_FROM


def test_batches_come_from_the_memory_of_the_stream_that_copies_them():
    lives = timeline((30 * MIB, 0, 1), (30 * MIB, 2, 3))
    assert CudaCache().replay(lives).peak_bytes == 30 * MIB
    lives.blocks[1].phase = COPIED
    assert CudaCache().replay(lives).peak_bytes == 60 * MIB


def test_what_nobody_uses_is_given_back_where_a_timeline_says_so():
    lives = timeline((30 * MIB, 0, 1), (40 * MIB, 3, 4))
    assert CudaCache().replay(lives).peak_bytes == 70 * MIB
    lives.released = 2
    assert CudaCache().replay(lives).peak_bytes == 40 * MIB


SIZE = st.integers(1, 40 * MIB)
LIFE = st.tuples(SIZE, st.integers(2, 30), st.integers(0, 8))


@given(states=st.lists(SIZE, max_size=4), lives=st.lists(LIFE, min_size=1, max_size=30))
def test_the_step_after_that_comes_once_more(states: list[int], lives: list[tuple[int, int, int]]):
    stay = [(size, 0, None) for size in states]
    step = [(size, born, min(born + length, 30)) for size, born, length in lives]
    once = timeline(*stay, *step)
    once.released, once.num_moments = 1, 31
    twice = timeline(*stay, *step, *((size, born + 30, died + 30) for size, born, died in step))
    wanted = CudaCache().replay(twice)
    taken = CudaCache().replay(once)
    assert taken.peak_bytes == wanted.peak_bytes
    assert taken.allocated_bytes == wanted.allocated_bytes
    assert taken.moment <= 31


def test_scratch_is_a_block_of_its_own():
    lives = timeline((4 * MIB, 0, 2), scratch={1: 17 * MIB})
    taken = CudaCache().replay(lives)
    assert taken.peak_bytes == (20 + 18) * MIB  # a segment of 20, and one in multiples of 2
    assert taken.allocated_bytes == 21 * MIB + MIB  # what is left of 18 is not worth splitting off
