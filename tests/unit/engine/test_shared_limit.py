"""One value that several hold at once, and the limits of CUDA's allocator, which do."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from anybatch.engine import limit
from anybatch.engine.shared_limit import SharedLimit
from anybatch.errors import InputError

ORIGINAL = -1.0  # as of a limit that is none


class Holder:
    """Anyone."""


class Place:
    """Where the value is kept."""

    def __init__(self):
        self.value = ORIGINAL
        self.strictest = SharedLimit(
            lambda: self.value, lambda value: setattr(self, "value", value)
        )


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_least_of_those_that_are_left_holds_and_the_original_after_the_last(order):
    place, holders, values = Place(), [Holder() for _ in range(3)], [3.0, 1.0, 2.0]
    for holder, value in zip(holders, values, strict=True):
        place.strictest.hold(holder, value)
    assert place.value == 1.0
    for number, one in enumerate(order):
        place.strictest.give_up(holders[one])
        rest = [values[i] for i in order[number + 1 :]]
        assert place.value == min(rest, default=ORIGINAL)
    assert place.strictest.before is None


def test_who_gives_up_twice_or_never_held_takes_nothing_from_others():
    place, one, other = Place(), Holder(), Holder()
    place.strictest.give_up(one)
    assert place.value == ORIGINAL
    place.strictest.hold(other, 2.0)
    place.strictest.give_up(one)
    place.strictest.give_up(one)
    assert place.value == 2.0


def test_what_is_there_instead_stays_until_its_end_whoever_comes_and_goes():
    place, one, other = Place(), Holder(), Holder()
    place.strictest.hold(one, 2.0)
    with place.strictest.instead(9.0):
        assert place.value == 9.0
        place.strictest.hold(other, 1.0)
        assert place.value == 9.0
        with place.strictest.instead(ORIGINAL):
            assert place.value == ORIGINAL
        assert place.value == 9.0
        place.strictest.give_up(one)
    assert place.value == 1.0
    with place.strictest.instead(9.0):
        place.strictest.give_up(other)
        assert place.value == ORIGINAL
    assert place.value == ORIGINAL


def test_a_holder_that_is_dropped_holds_nothing():
    place, one, dropped = Place(), Holder(), Holder()
    place.strictest.hold(one, 2.0)
    place.strictest.hold(dropped, 1.0)
    del dropped
    place.strictest.hold(one, 3.0)
    assert place.value == 3.0


def test_budgets_of_one_cuda_device_know_of_each_other_and_of_no_other_device(monkeypatch):
    fractions = {0: 0.9, 1: 1.0}  # the first one as the script has set it
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: (0, 1000))
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda index: fractions[index])
    monkeypatch.setattr(
        cuda,
        "set_per_process_memory_fraction",
        lambda value, index: fractions.update({index: value}),
    )
    held = SimpleNamespace(beside_bytes=100, used_bytes=lambda: 250)
    monkeypatch.setattr(limit, "CudaMeter", lambda device: held)
    names = {"cuda": 500, "cuda:0": 300, "cuda:1": 700}
    wide, strict, other = (limit.CudaLimit(torch.device(n), b) for n, b in names.items())
    for one in (wide, strict, other):
        one.enter()
    assert fractions == {0: 0.2, 1: 0.6}
    strict.leave()
    assert fractions == {0: 0.4, 1: 0.6}
    wide.leave()
    other.leave()
    assert fractions == {0: 0.9, 1: 1.0}
    with pytest.raises(InputError, match=r"holds 250 B of cuda:1 already.* the budget is 200 B"):
        limit.CudaLimit(torch.device("cuda:1"), 200).enter()
    assert fractions == {0: 0.9, 1: 1.0}
