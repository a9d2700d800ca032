"""Memory that runs out in the first moment of a step, before any of its samples is asked for: what was
laid out for it is cut by a plan that is no longer followed, and buffers are still those that the step
before has left."""

import pytest
import torch
from tests.equivalence.reference import plan_for, train_plainly
from tests.equivalence.test_batch_norm import NORMS, Images
from tests.equivalence.test_batch_norm import task_of as images
from tests.equivalence.worlds import World, task_of

import anybatch as ab
from anybatch.events import Event, OutOfMemory, Replanned

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("micro_batch", [5, 8, 16])
@pytest.mark.parametrize("steps", [{2}, {1, 2, 4}])
@pytest.mark.parametrize("norms", [False, True])
def test_the_step_is_done_under_the_new_plan(norms, steps, micro_batch):
    if norms:
        task = images(lambda: Images(**NORMS["usual"]), ghost_batch=5, steps=5)
        micro_batch = max(10, micro_batch // 5 * 5)
    else:
        task = task_of(World(steps=5))
    failed = set()
    events: list[Event] = []
    with ab.Session(task, plan_for(task, micro_batch), [events.append]) as session:
        engine = session._engine
        begin = engine._group.begin

        def refuse():
            if engine._step in steps - failed:
                failed.add(engine._step)
                raise MemoryError("no room")
            begin()

        engine._group.begin = refuse
        losses = [step.loss for step in session.steps()]
        weights = session.model.state_dict()
    assert failed == steps
    assert [e.step for e in events if isinstance(e, OutOfMemory)] == sorted(steps)
    assert any(isinstance(event, Replanned) for event in events)
    plain = train_plainly(task)
    assert losses == pytest.approx(plain.losses, rel=1e-9)
    assert weights.keys() == plain.model.state_dict().keys()
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)
