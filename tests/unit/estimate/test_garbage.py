"""While plans are made, full collections wait, in whatever order threads come and go."""

from __future__ import annotations

import gc

import pytest

from anybatch.estimate import few_collections


def test_full_collections_wait_until_the_last_one_is_done():
    before = gc.get_threshold()
    first, second = few_collections(), few_collections()
    with first:
        second.__enter__()
    assert gc.get_threshold()[:2] == before[:2]  # circles of young objects go as ever
    assert gc.get_threshold()[2] > 1_000_000
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_a_failure_puts_the_threshold_back():
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="no"), few_collections():
        raise ValueError("no")
    assert gc.get_threshold() == before
