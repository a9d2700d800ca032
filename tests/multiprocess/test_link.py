"""Ranks that plan together measure what joins them: none waits for one that is gone."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from tests.crew import Crew
from tests.equivalence.worlds import World, task_of

import anybatch as ab
from anybatch.errors import PeerLost, RankLost
from anybatch.machine import Machine
from anybatch.parallel import link as measuring
from anybatch.plans import Link
from anybatch.process.process_memory import status, trim
from anybatch.runs import planning

CPU = torch.device("cpu")
ENOUGH = 4 << 20
"""A quarter of the largest sum: allocators keep a little of what is freed."""


def as_planned(rank, size, knobs):
    return ab.plan(task_of(World()), **knobs)


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_get_one_plan_with_the_link_that_they_measured(crew, size):
    plans = crew(size, as_planned, {})
    assert all(plan == plans[0] for plan in plans)
    link = plans[0].link
    assert link is not None
    assert link.measured
    assert dict(plans[0].explain())["link"].startswith("measured when the ranks joined: ")


def over_links(rank, size, speeds):
    """The speeds in the plans of runs that measured these."""
    told = []
    with pytest.MonkeyPatch.context() as patch:
        for speed in speeds:
            link = Link(bytes_per_second=speed, hop_seconds=1e-4, measured=True)
            patch.setattr(planning, "_measured_link", lambda *_, link=link, **__: link)
            told.append(ab.plan(task_of(World())).link.bytes_per_second)
    return told


def test_a_plan_is_not_remembered_for_another_link(crew):
    assert crew(2, over_links, (1e9, 1.1e9, 1e5)) == [[1e9, 1e9, 1e5]] * 2


def by_own_clocks(rank, size, speeds):
    """Each rank measures by a clock of its own, on which a byte takes 1 / speeds[rank] seconds."""
    told: list[int] = []

    def seconds_of(flats, device):
        measuring._wait([dist.all_reduce(flat, async_op=True) for flat in flats], device)
        told.append(sum(flat.nbytes for flat in flats))
        return 1e-4 + told[-1] / speeds[rank]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_seconds_of", seconds_of)
        return measuring.measured_link(CPU), told


@pytest.mark.parametrize(
    ("slowest", "largest"), [(1e9, 1 << 24), (2.5e7, 1 << 22), (1e5, 1 << 14)], ids=str
)
def test_the_slowest_decides_and_what_would_take_too_long_is_left_out(crew, slowest, largest):
    (link, sums), *others = crew(3, by_own_clocks, (1e12, slowest, 1e11))
    assert all(other == (link, sums) for other in others)
    assert link.bytes_per_second == pytest.approx(4 / 3 * slowest, rel=0.01)
    assert max(sums) == largest
    # However slow, two sizes; and no more than the time for all, but for the last that is begun.
    taken = [1e-4 + size / slowest for size in sums]
    assert sum(taken) < 0.7


def fails_on_one(rank, size, how):
    real = measuring._seconds_of

    def seconds_of(flats, device):
        if rank == 1 and flats[0].nbytes > 1 << 16:
            if how == "dies":
                os._exit(9)
            if how == "memory":
                raise MemoryError("no room")
            raise ValueError("planted")
        return real(flats, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_seconds_of", seconds_of)
        try:
            ab.plan(task_of(World()))
        except Exception as error:
            return type(error), str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "memory", "raises"])
def test_a_rank_that_fails_in_it_leaves_no_other_waiting(crew, how):
    outcomes = crew.outcomes(3, fails_on_one, how)
    for error, told in (outcomes[0], outcomes[2]):
        assert error is None
        kind, sentence = told
        assert issubclass(kind, PeerLost)
        assert "while the exchange between ranks was measured" in sentence
    error, told = outcomes[1]
    if how == "dies":
        assert isinstance(error, (EOFError, OSError))
    elif how == "memory":
        assert told[0] is RankLost
    else:
        assert told == (ValueError, "planted")


def unmeasured(rank, size):
    """What must not measure, under a measurement that would be noticed."""

    def never(device):
        raise AssertionError("measured")

    task = task_of(World(steps=2))
    plan = ab.plan(task)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anybatch.runs.planning.measured_link", never)
        elsewhere = ab.plan(task, Machine.describe("8GiB"), ranks=2)
        result = ab.train(task, plan=plan, progress=False)
    return elsewhere, result.plan


@pytest.mark.slow
def test_neither_a_given_plan_nor_another_machine_is_measured_for(crew):
    for elsewhere, followed in crew(2, unmeasured):
        assert elsewhere.link is not None
        assert not elsewhere.link.measured
        assert followed.link is not None
        assert followed.link.measured


def kept(rank, size, held):
    """Bytes that this process has more of once the link is measured."""
    for _ in range(4):  # each of gloo's threads has its first work
        dist.all_reduce(torch.zeros(4))
    before = status("VmData")
    planning._measured_link(None, held=held)
    grown = ENOUGH
    give_up = time.monotonic() + 10
    while grown >= ENOUGH and time.monotonic() < give_up:  # gloo's threads let go a moment later
        trim()
        grown = status("VmData") - before
    return grown


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds processes to budgets")
def test_nothing_of_it_stays_in_a_process_that_is_to_be_held_to_a_budget():
    crew = Crew()  # heaps of other tests have room already
    try:
        grown = crew(2, kept, True)
    finally:
        crew.close()
    assert max(grown) < ENOUGH
