"""States of the optimizer that were to come back to the device, and found no room there, ended the run.

Symptom: a run that had moved them to host memory ended with the bare error of the allocator, some steps
later, when it tried the faster plan again.

Mechanism: plans are changed between two attempts, where nothing catches a lack of memory and no rank
hears of it from another; and a part of the states had moved, while all were taken to have.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.equivalence.reference import deviation, plan_for, train_plainly
from tests.equivalence.worlds import World, task_of

import anybatch as ab
from anybatch.compute import Replica
from anybatch.compute.optimizer_update import Updater
from anybatch.engine import ladder
from anybatch.errors import NoPlanFits
from anybatch.events import OutOfMemory, Replanned

KEEP = Updater.keep_states
EMPTY_LIKE = torch.empty_like


def plant(monkeypatch, where, times=1):
    """Have the second allocation of a move to `where` refused, so many times."""
    left, calls = [times], []

    def empty_like(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("you tried to allocate 5 bytes")
        return EMPTY_LIKE(*args, **options)

    def keep_states(self, to):
        if to == self.states_on or to != where or not left[0]:
            return KEEP(self, to)
        left[0] -= 1
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_like", empty_like)
            return KEEP(self, to)

    monkeypatch.setattr(Updater, "keep_states", keep_states)


@pytest.fixture
def scarce(monkeypatch):
    return partial(plant, monkeypatch)


def trained(monkeypatch, rungs=("host",), rank=0, ranks=1):
    """A task; its session, after 9 steps, of which the second runs out of memory at first, on rank 0;
    the events of recovery."""
    monkeypatch.setattr(ladder, "STEPS", 2)
    accumulate, passes = Replica.accumulate, []

    def failing(self, *args):
        passes.append(self)
        if len(passes) == 2 and rank == 0:
            raise MemoryError("you tried to allocate 7 bytes")
        return accumulate(self, *args)

    task = task_of(World(optimizer="adamw", steps=9))
    layout = {"parallel": "replicate", "shares": (1.0,) * ranks} if ranks > 1 else {}
    plan = plan_for(task, 16, **layout)
    choices = tuple(plan.choice.model_copy(update={"optimizer_states": where}) for where in rungs)
    events = []
    with monkeypatch.context() as patch:
        patch.setattr(Replica, "accumulate", failing)
        plan = plan.model_copy(update={"ladder": choices})
        with ab.Session(task, plan, [events.append]) as session:
            for _ in session.steps():
                pass
    return task, session, [e for e in events if isinstance(e, OutOfMemory | Replanned)]


def on_rank(rank, ranks):
    """Of a run whose last rank has no room once: what was told, where states are, and how far the
    weights are from those of the plain loop."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == ranks - 1:
            plant(patch, "device")
        task, session, events = trained(patch, rank=rank, ranks=ranks)
    told = [
        (event.step, event.rank, event.phase) if isinstance(event, OutOfMemory) else event.step
        for event in events
    ]
    far = deviation(session.model, train_plainly(task).model)
    return told, session.plan.choice.optimizer_states, far


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_faster_plan_is_left_again_by_all_ranks_and_tried_later(crew, ranks):
    found = crew(ranks, on_rank)
    assert found[0][0] == [(2, 0, "loading"), 2, 4, (4, ranks - 1, "update"), 4, 8]
    for _, states_on, far in found:
        assert states_on == "device"
        assert far < 1e-6


def test_states_for_which_the_host_has_no_room_stay_where_they_are(monkeypatch, scarce):
    scarce("host")
    task, session, events = trained(monkeypatch, rungs=("host", "device"))
    assert [type(event) for event in events[:4]] == [OutOfMemory, Replanned] * 2
    assert events[2].phase == "update"
    assert deviation(session.model, train_plainly(task).model) < 1e-6


def test_when_there_is_room_nowhere_it_is_said_so(monkeypatch, scarce):
    scarce("host", times=100)
    with pytest.raises(NoPlanFits, match="update"):
        trained(monkeypatch)


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_move_that_fails_leaves_all_states_where_they_were(scarce, where):
    param = torch.nn.Parameter(torch.ones(3))
    other = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([param, other])
    param.grad, other.grad = torch.ones(3), torch.ones(2)
    optimizer.step()
    updater = Updater(optimizer)
    before = "device" if where == "host" else "host"
    updater.keep_states(before)
    states = {id(value) for state in optimizer.state.values() for value in state.values()}
    scarce(where)
    with pytest.raises(MemoryError):
        updater.keep_states(where)
    assert updater.states_on == before
    assert states == {id(v) for state in optimizer.state.values() for v in state.values()}
    updater.keep_states(where)
    assert updater.states_on == where
