"""The alarm by which a rank that leaves a pass wakes those that wait for it on their devices."""

from __future__ import annotations

import time

import torch.distributed as dist

from anybatch.parallel.wire import Alarm


class Group:
    """A group whose end is noted."""

    def __init__(self, group):
        self._group = group
        self.num_aborts = 0

    def __hash__(self):
        return hash(self._group)

    def __eq__(self, other):
        return self._group == other

    def abort(self):
        self.num_aborts += 1


def rang(rank, size, rings):
    """What the alarms of two groups told on this rank, when `rings` had rung the first."""
    groups = [Group(dist.new_group(list(range(size)))) for _ in range(2)]
    first, second = (Alarm(group) for group in groups)
    dist.barrier()
    before = first.has_rung
    if rank == rings:
        first.ring()
    until = time.monotonic() + 30
    while not groups[0].num_aborts and time.monotonic() < until:
        time.sleep(0.01)
    dist.barrier()
    found = before, first.has_rung, second.has_rung, [group.num_aborts for group in groups]
    for alarm in (first, second):
        alarm.end()
    return found, [group.num_aborts for group in groups]


def test_one_rank_aborts_the_group_on_all_and_no_other_group(crew):
    for rings in (0, 1):
        assert crew(3, rang, rings) == [((False, True, False, [1, 0]), [1, 1])] * 3
