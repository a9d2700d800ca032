"""What fails when the ranks have agreed on a step ends the rank, and nobody waits: the run goes on from
its last checkpoint."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from tests.equivalence.reference import plan_for
from tests.faults.after_the_vote import SAVED, STEP, task_of, train

import anybatch as ab
from anybatch.errors import RankLost
from anybatch.launch import call

pytestmark = pytest.mark.faults


def test_the_error_tells_where_and_what_helps():
    task = task_of(refuses=True)
    with ab.Session(task, plan_for(task, 4)) as session:
        steps = session.steps()
        for _ in range(STEP - 1):
            next(steps)
        with pytest.raises(RankLost, match=rf"in the update of step {STEP}, .*last checkpoint"):
            next(steps)


@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_an_update_that_an_error_has_cut_short_is_not_saved(tmp_path: Path, hook: str):
    """The hook may have failed on this rank alone, so the others are not asked to save either."""

    def optimizer(params):
        made, updates = torch.optim.SGD(params, lr=0.1, momentum=0.9), count(1)

        def fail(*_):
            if next(updates) == STEP and fails:
                raise ValueError("in a hook")

        getattr(made, hook)(fail)
        return made

    task = replace(task_of(refuses=False), optimizer=optimizer)
    options = {"plan": plan_for(task, 4), "progress": False}
    fails = True
    with pytest.raises(ValueError, match="in a hook"):
        ab.train(task, out=tmp_path / "run", checkpoint_every=SAVED, **options)
    fails = False
    resumed = ab.train(task, out=tmp_path / "run", resume=True, **options)
    expected = ab.train(task, **options)
    assert resumed.ended.steps == expected.ended.steps
    for one, other in zip(resumed.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.nightly
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_the_run_goes_on_from_its_checkpoint(tmp_path: Path, bad_rank: int):
    found = call(train, str(tmp_path), bad_rank, ranks=2, restarts=1, grace_seconds=5)
    task = task_of(refuses=False)
    with ab.Session(task, plan_for(task, 8)) as session:
        list(session.steps())
        expected = torch.cat([param.detach().flatten() for param in session.model.parameters()])
    for attempt, done, weights in found:
        assert attempt == 1
        assert done == list(range(SAVED + 1, 7))
        torch.testing.assert_close(weights, expected)
