"""Allocators replayed on timelines drawn by hand.

A timeline is a list of (bytes, born, died): alive from the moment `born` to the moment `died`, both
included.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from anybatch.estimate.allocator import CudaCache, replay
from anybatch.estimate.trace import COPIED, Block, Timeline

MIB = 1 << 20

Life = tuple[int, int, int | None]


def timeline(*lives: Life, scratch: dict[int, int] | None = None) -> Timeline:
    blocks = [Block(size, born, "compute", died) for size, born, died in lives]
    last = max([born for _, born, _ in lives] + [died or 0 for _, _, died in lives])
    return Timeline(blocks=blocks, scratch=scratch or {}, num_moments=last + 1)


def cuda(*lives: Life, **options: Any) -> int:
    return replay(timeline(*lives), CudaCache(**options)).peak_bytes


# ------------------------------------------------------------------------------------------- host


def test_on_the_host_the_live_bytes_add_up():
    # Argument and result are there at once while an operation runs, at moment 4.
    taken = replay(timeline((1000, 0, None), (5000, 2, 4), (2000, 4, 5), (700, 6, 7)), None)
    assert taken.curve == (1000, 1000, 6000, 6000, 8000, 3000, 1700, 1700, 1000, 1000)
    assert taken.moment == 4
    assert taken.peak_bytes == taken.allocated_bytes == taken.requested_bytes == 8000
    assert taken.overhead_bytes == 0


def test_on_the_host_scratch_counts_at_its_moment_only():
    lives = [(1000, 0, 5), (2000, 4, 5)]
    assert replay(timeline(*lives, scratch={3: 500}), None).peak_bytes == 3000
    assert replay(timeline(*lives, scratch={3: 2500}), None).peak_bytes == 3500


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


def test_the_free_end_of_an_expandable_segment_grows_at_the_limit_too():
    lives = [(20 * MIB, 0, 1), (24 * MIB, 2, 3)]
    assert cuda(*lives, expandable=True, limit_bytes=30 * MIB) == 40 * MIB


def test_what_the_cache_has_taken_it_keeps_until_the_limit_is_met():
    lives = [(12 * MIB, 0, 1), (30 * MIB, 3, 4), (40 * MIB, 6, 7)]
    assert cuda(*lives) == 82 * MIB
    assert cuda(*lives, limit_bytes=60 * MIB) == 42 * MIB
    # A segment of which a part is taken is not given back.
    held = [(40 * MIB, 0, 1), (2 * MIB, 2, 9), (50 * MIB, 3, 9)]
    assert cuda(*held, limit_bytes=60 * MIB) == 90 * MIB


def test_allocated_counts_rounded_blocks_and_reserved_counts_segments():
    taken = replay(timeline((513, 0, 2), (3 * MIB, 1, 2)), CudaCache())
    assert taken.allocated_bytes == 1024 + 3 * MIB
    assert taken.peak_bytes == 22 * MIB
    assert taken.moment == 1
    assert taken.overhead_bytes == 22 * MIB - 513 - 3 * MIB
    assert taken.curve == (2 * MIB, 22 * MIB, 22 * MIB, 22 * MIB, 22 * MIB)


def test_a_segment_that_is_taken_when_little_is_in_use_moves_no_moment():
    lives = [(30 * MIB, 1, 3), (40 * MIB, 2, 3)]
    before = replay(timeline(*lives), CudaCache())
    after = replay(timeline(*lives, (512, 8, 9)), CudaCache())  # small: a segment of 2 MiB more
    assert after.peak_bytes == before.peak_bytes + 2 * MIB
    assert (after.moment, after.allocated_bytes) == (before.moment, before.allocated_bytes)
    assert before.moment == 2
    assert after.overhead_bytes == before.overhead_bytes + 2 * MIB == 2 * MIB


def test_batches_come_from_the_memory_of_the_stream_that_copies_them():
    lives = timeline((30 * MIB, 0, 1), (30 * MIB, 2, 3))
    assert replay(lives, CudaCache()).peak_bytes == 30 * MIB
    lives.blocks[1].phase = COPIED
    assert replay(lives, CudaCache()).peak_bytes == 60 * MIB


def test_what_nobody_uses_is_given_back_where_a_timeline_says_so():
    lives = timeline((30 * MIB, 0, 1), (40 * MIB, 3, 4))
    assert replay(lives, CudaCache()).peak_bytes == 70 * MIB
    lives.released = 2
    assert replay(lives, CudaCache()).peak_bytes == 40 * MIB


SIZE = st.integers(1, 40 * MIB)
LIFE = st.tuples(SIZE, st.integers(2, 30), st.integers(0, 8))


@given(states=st.lists(SIZE, max_size=4), lives=st.lists(LIFE, min_size=1, max_size=30))
def test_the_step_after_that_comes_once_more(states: list[int], lives: list[tuple[int, int, int]]):
    stay = [(size, 0, None) for size in states]
    step = [(size, born, min(born + length, 30)) for size, born, length in lives]
    once = timeline(*stay, *step)
    once.released, once.num_moments = 1, 31
    twice = timeline(*stay, *step, *((size, born + 30, died + 30) for size, born, died in step))
    wanted = replay(twice, CudaCache())
    taken = replay(once, CudaCache())
    assert taken.peak_bytes == wanted.peak_bytes
    assert taken.allocated_bytes == wanted.allocated_bytes
    assert taken.moment <= 31


def test_scratch_is_a_block_of_its_own():
    lives = timeline((4 * MIB, 0, 2), scratch={1: 17 * MIB})
    taken = replay(lives, CudaCache())
    assert taken.peak_bytes == (20 + 18) * MIB  # a segment of 20, and one in multiples of 2
    assert taken.allocated_bytes == 21 * MIB + MIB  # what is left of 18 is not worth splitting off
