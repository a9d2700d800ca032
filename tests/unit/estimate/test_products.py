"""What MKL keeps for products, against what was read off its books and off resident memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.estimate.products import Product, Products

KIB = 1 << 10
TOLERANCE = 100 * KIB

# (rows, depth, columns, right matrix turned) and the KiB that became resident: MKL 2024.2 on an
# AVX-512 processor with 2 MiB of second-level cache.
ON_TWO_THREADS = [
    ((1024, 256, 4096, True), 4888),  # columns packed once for both
    ((2048, 1024, 1024, False), 2712),
    ((4096, 512, 256, False), 1304),  # rows divided
    ((1536, 1024, 640, True), 3096),
    ((512, 512, 512, False), 632),  # a panel of columns at a time
    ((160, 1024, 2048, False), 648),  # columns divided
    ((448, 768, 768, False), 2328),
    ((64, 512, 4096, False), 1280),  # depth divided, with a result for each
    ((4096, 2048, 256, False), 6300),
    ((512, 4096, 4096, False), 21692),
    ((1024, 2048, 64, False), 1948),
    ((512, 4096, 16, True), 0),
    ((12, 1024, 2048, True), 0),
]
ON_ONE_THREAD = [
    ((1024, 256, 1024, False), 1420),
    ((384, 1024, 4096, False), 660),
    ((448, 1024, 4096, False), 6732),
    ((160, 1024, 1024, False), 0),
    ((160, 1024, 1024, True), 324),
    ((1024, 2048, 96, False), 0),
]


def deep(num_threads: int, *taken: Product) -> Products:
    return Products(taken, num_threads, packed_depth=384)


@pytest.mark.parametrize(("sizes", "resident"), ON_TWO_THREADS)
def test_two_threads_keep_what_was_measured(sizes: tuple[int, int, int, bool], resident: int):
    assert abs(deep(2, Product(*sizes)).kept_bytes - resident * KIB) <= TOLERANCE


@pytest.mark.parametrize(("sizes", "resident"), ON_ONE_THREAD)
def test_one_thread_keeps_what_was_measured(sizes: tuple[int, int, int, bool], resident: int):
    assert abs(deep(1, Product(*sizes)).kept_bytes - resident * KIB) <= TOLERANCE


def test_one_of_many_matrices_is_packed_by_one_thread_while_the_others_take_as_many():
    alone = deep(1, Product(512, 256, 1024)).kept_bytes
    whole = Product(512, 256, 1024, is_whole=True)
    assert deep(2, whole).kept_bytes == 2 * alone


def test_in_a_row_buffers_are_used_again_as_was_measured():
    rows = [
        ((512, 512, 2048), 2584),
        ((512, 2048, 512), 3160),
        ((512, 512, 512), 3160),
        ((1024, 1024, 4096), 9504),
        ((256, 8192, 4096), 12392),
    ]
    taken = [Product(*sizes) for sizes, _ in rows]
    for number, (_, resident) in enumerate(rows, start=1):
        kept = deep(2, *taken[:number]).kept_bytes
        assert kept == pytest.approx(resident * KIB, rel=0.1)


def test_products_of_another_batch_follow_their_own_thresholds():
    few, many = deep(2, Product(64, 256, 512, True)), deep(2, Product(128, 256, 512, True))
    told = few.between(many, 15)
    assert told.taken == (Product(1024, 256, 512, True),)
    assert told.kept_bytes == deep(2, Product(1024, 256, 512, True)).kept_bytes


def test_between_products_of_different_numbers_there_are_those_that_keep_more():
    one, two = deep(2, Product(1024, 256, 1024)), deep(2, Product(64, 64, 64), Product(64, 64, 64))
    assert one.between(two, 0.5) is two.between(one, 0.5) is one


def test_those_of_an_evaluation_come_behind_those_of_training():
    training, evaluation = Product(256, 256, 256), Product(4096, 1024, 1024)
    assert deep(2, training).before(deep(2, evaluation)) == deep(2, training, evaluation)


SIZES = st.integers(1, 5000)


@given(st.lists(st.builds(Product, SIZES, SIZES, SIZES, st.booleans()), max_size=12))
@pytest.mark.parametrize("packed_depth", [192, 384])
def test_more_products_keep_at_least_as_much_until_a_buffer_gives_way(
    packed_depth: int, taken: list[Product]
):
    kept = [
        Products(tuple(taken[:number]), 2, packed_depth).kept_bytes
        for number in range(min(len(taken), 3))  # of a sixth buffer, the first gives way
    ]
    assert kept == sorted(kept)
