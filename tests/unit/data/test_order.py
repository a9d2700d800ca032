"""The order of samples is a pure function of (seed, epoch, length)."""

import random

import pytest
import torch

from anybatch.data.order import Order, mix, permutation


def test_the_order_is_pinned():
    # A change here breaks the promise that a run resumed under a later version goes on as it was.
    assert mix(0) == 0xE220A8397B1DCDAF  # first output of splitmix64 seeded with 0
    again = permutation(0, 0, 10)
    assert permutation(0, 0, 10).tolist() == again.tolist()
    assert sorted(again.tolist()) == list(range(10))


@pytest.mark.parametrize("other", [(1, 0, 100), (0, 1, 100), (-1, 0, 100), (1 << 70, 3, 100)])
def test_seed_and_epoch_each_change_the_order(other):
    assert permutation(*other).tolist() != permutation(0, 0, 100).tolist()


def test_mix_tells_order_and_number_of_values_apart():
    keys = [mix(), mix(0), mix(0, 0), mix(1, 2), mix(2, 1), mix(12), mix(-1), mix(1)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 1 << 64 for key in keys)


def test_training_randomness_is_not_touched():
    before = torch.get_rng_state(), random.getstate()
    permutation(3, 1, 1000)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_order_gives_views_and_finds_an_old_epoch_again():
    order = Order(seed=5, length=50)
    first = order.indices(0, 10, 20)
    assert first.data_ptr() == order.indices(0, 10, 12).data_ptr()
    for epoch in (1, 2, 3):
        order.indices(epoch, 0, 5)
    assert order.indices(0, 10, 20).tolist() == first.tolist()
    assert order.indices(0, 10, 20).tolist() == permutation(5, 0, 50)[10:20].tolist()
    assert Order(5, 50, shuffle=False).indices(7, 3, 6).tolist() == [3, 4, 5]
