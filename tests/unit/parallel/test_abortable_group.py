"""The alarm by which a rank that leaves a pass wakes those that wait for it on their devices."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from anybatch.parallel import abortable_group
from anybatch.parallel.abortable_group import _HEARD, Alarm


class Group:
    """A group whose end is noted, and how many ranks had heard the alarm by then."""

    def __init__(self, group):
        self._group = group
        self.num_aborts = 0
        self.num_heard = 0

    def __hash__(self):
        return hash(self._group)

    def __eq__(self, other):
        return self._group == other

    def size(self):
        return self._group.size()

    def abort(self):
        self.num_aborts += 1
        store = dist.distributed_c10d._get_process_group_store(self._group)
        self.num_heard = store.clone().add(_HEARD, 0)


def rang(rank, size, rings):
    """What the alarms of two groups told on this rank, when `rings` had rung the first."""
    abortable_group._EVERY_SECONDS = 0.1 + rank  # some hear later than others
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
    assert groups[0].num_heard == size  # over a network an abort would end who has not heard
    for alarm in (first, second):
        alarm.end()
    return found, [group.num_aborts for group in groups]


@pytest.mark.slow
def test_one_rank_aborts_the_group_on_all_and_no_other_group(crew):
    for rings in (0, 1):
        assert crew(3, rang, rings) == [((False, True, False, [1, 0]), [1, 1])] * 3
