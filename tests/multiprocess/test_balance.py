"""Shares follow the speed of the ranks, by the clock that times their parts: for one it goes faster."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from tests.equivalence.reference import plan_for, train_plainly
from tests.equivalence.worlds import World, task_of
from tests.multiprocess.relaxed import deviation

import anybatch as ab
from anybatch.data import share
from anybatch.events import Rebalanced

WORLD = World(loss="weighted", optimizer="adamw", global_batch=24, num_samples=96, steps=24)


def slowed(rank, size, seconds, balance):
    """What this rank is left with when each of its samples takes so long by the clock."""
    task = task_of(WORLD)
    task = dataclasses.replace(task, valid=task.train, evaluate_every=100)
    plan = plan_for(task, 4, parallel="replicate", shares=(1.0,) * size, balance=balance)
    events, taken, now = [], [0], [0.0]

    def goes_on(module, args, output):
        taken[0] += len(output) if module.training else 0
        now[0] += seconds[rank] * len(output)

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    with (
        pytest.MonkeyPatch.context() as patch,
        ab.Session(task, plan, [events.append]) as session,
    ):
        patch.setattr("anybatch.engine.context.time", clock)
        session.model.body.register_forward_hook(goes_on)
        samples = []
        for _ in session.steps():
            samples.append(taken[0])
            taken[0] = 0
        evaluation = session.evaluate()
    state = {name: t.detach().clone() for name, t in session.model.state_dict().items()}
    return state, samples, events, evaluation


@pytest.mark.parametrize("seconds", [(0.001, 0.004), (0.001, 0.001, 0.004)], ids=["two", "three"])
def test_a_slow_rank_is_given_less_and_the_result_is_the_same(crew, seconds):
    size = len(seconds)
    ranks = crew(size, slowed, seconds, "measured")
    fixed = crew(size, slowed, seconds, "fixed")
    plain = train_plainly(task_of(WORLD)).model.state_dict()
    even = len(share(24, (1.0,) * size, 0))
    for (state, _, _, evaluation), (other, _, _, same) in zip(ranks, fixed, strict=True):
        assert deviation(state, plain) < 1e-6
        assert deviation(other, plain) < 1e-6
        assert evaluation.samples == same.samples == 96
        assert evaluation.loss == pytest.approx(same.loss, rel=1e-6)
        assert torch.equal(state["body.0.weight"], ranks[0][0]["body.0.weight"])
    for step in range(24):
        assert sum(samples[step] for _, samples, _, _ in ranks) == 24
    assert [samples[0] for _, samples, _, _ in ranks] == [even] * size
    last = [samples[-1] for _, samples, _, _ in ranks]
    assert last[-1] < 0.7 * even
    assert min(last[:-1]) > even
    told = [event for event in ranks[0][2] if isinstance(event, Rebalanced)]
    slowest = ranks[-1][1]
    assert told[0].step == next(number for number, taken in enumerate(slowest, 1) if taken != even)
    assert told[0].before == (1.0,) * size
    assert told[0].after[-1] < 0.6 * told[0].after[0]
    assert not [event for event in fixed[0][2] if isinstance(event, Rebalanced)]
