"""Borrowed generators come back as they were, and a draw is seen."""

# ruff: noqa: NPY002 - the old generators are what is tested

import random

import numpy as np
import pytest
import torch

from anybatch.data.generators import Borrowed, restore, seed_by, snapshot


def draws():
    return random.random(), torch.rand(1).item(), np.random.rand(), np.random.randn()


@pytest.fixture(autouse=True)
def keep_generators():
    state = snapshot()
    yield
    restore(state)


@pytest.mark.parametrize("normals", [0, 1, 2])  # after one NumPy keeps the other of the pair
@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: torch.rand(1), np.random.rand, np.random.randn, lambda: seed_by(1)],
)
def test_a_draw_is_seen_and_undone(draw, normals):
    seed_by(7)
    np.random.randn(normals)
    before = snapshot()
    expected = draws()
    restore(before)
    with Borrowed() as generators:
        assert not generators.drawn()
        draw()
        assert generators.drawn()
    assert draws() == expected


def test_they_come_back_after_an_error():
    seed_by(7)
    expected = draws()
    seed_by(7)

    def fetch():
        with Borrowed():
            draws()
            raise KeyError

    with pytest.raises(KeyError):
        fetch()
    assert draws() == expected


def test_a_generator_that_is_not_the_usual_one():
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with Borrowed() as generators:
            assert not generators.drawn()
            np.random.rand()
            assert generators.drawn()
        assert np.random.rand() == np.random.Generator(np.random.PCG64(1)).random()
    finally:
        np.random.set_bit_generator(usual)
