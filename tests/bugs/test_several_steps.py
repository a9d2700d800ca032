"""Several `ab.Step`s at once, closed in any order.

Symptoms: of two budgets, closing the first step left the process without any, and closing the second
left the first one's limit on it for good. Mechanism: each saved the limit that it found, and put that
back.
"""

import gc
import mmap
import resource
import sys

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.engine.limit import ProcessLimit

MIB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is held by Linux only")


def limit():
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def step(memory=None):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Step(model, optimizer, lambda model, x: model(x).square().mean(), memory=memory)


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_budgets_of_two_steps_last_until_each_is_closed(order):
    before = limit()
    steps = [step("256MiB"), step("64MiB")]
    alone = []
    for one in steps:
        one(X)
        alone.append(limit())
    assert alone[1] < alone[0]
    for one in steps * 2:
        one(X)
        assert abs(limit() - alone[1]) < 4 * MIB  # the strictest, whoever's turn it is
    first, last = order
    steps[first].close()
    assert abs(limit() - alone[last]) < 8 * MIB
    steps[last](X)
    assert abs(limit() - alone[last]) < 8 * MIB
    steps[last].close()
    assert limit() == before


def test_a_step_without_a_budget_leaves_that_of_another():
    held, free = step("64MiB"), step()
    held(X)
    alone = limit()
    free(X)
    free.close()
    assert abs(limit() - alone) < 4 * MIB
    held.close()


def test_a_step_that_was_dropped_without_closing_it_holds_nothing():
    before = limit()
    dropped = step("32MiB")
    dropped(X)
    strict = limit()
    with step("256MiB") as other:
        other(X)
        assert abs(limit() - strict) < 4 * MIB
        del dropped
        gc.collect()
        other(X[:4])  # its first pass sets the limit anew
        assert limit() > strict + 128 * MIB
    assert limit() == before


def test_what_is_taken_while_one_budget_is_lifted_counts_for_neither():
    wide, strict = ProcessLimit(256 * MIB), ProcessLimit(64 * MIB)
    wide.enter()
    wide_alone = limit()
    strict.enter()
    both = limit()
    with wide.lifted(), strict.lifted():
        assert limit() > both + 128 * MIB
        held = mmap.mmap(-1, 128 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert abs(limit() - both - 128 * MIB) < 4 * MIB
    with strict.waived():
        assert limit() > both + 256 * MIB
    strict.leave()
    assert abs(limit() - wide_alone - 128 * MIB) < 4 * MIB
    wide.leave()
    held.close()
