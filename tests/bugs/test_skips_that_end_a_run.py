"""A run that ended since too much was bad saved nothing.

Symptom: with bad_data="skip", a run whose data were bad in ten steps in a row, or in more than half
of an epoch, lost everything since its last checkpoint.

Mechanism: what is left out is the same on all ranks, so they meet that error together and can save; but
only errors from within a step were marked as such, not those that come when it is counted.
"""

from __future__ import annotations

import pytest
from tests.equivalence.reference import plan_for
from tests.faults.bad_data import NAN, RAISES, Faulty, FaultyStream, task_of

import anybatch as ab
from anybatch.errors import DataError, LossError
from anybatch.events import CheckpointSaved
from anybatch.runs.saving import Every, kept

UNREADABLE = dict.fromkeys(range(13, 36), RAISES)
LAST = dict.fromkeys(range(36, 40), NAN)  # of a stream: where it ends cannot be told from an error

ENDS = {
    "in a row": (Faulty(400, dict.fromkeys(range(24, 144), RAISES)), LossError, 11),
    "half an epoch, after a step": (FaultyStream(40, UNREADABLE), DataError, 4),
    "half an epoch, after none": (FaultyStream(40, UNREADABLE | LAST), DataError, 4),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_was_learned_before_is_saved(case, tmp_path):
    data, kind, at = ENDS[case]
    task = task_of(data, shuffle=False, epochs=1)
    events = []
    with ab.Session(task, plan_for(task, 12), [events.append], checkpoints=tmp_path) as session:
        with pytest.raises(kind), kept(session, Every()) as steps:
            list(steps)
        assert session.failed_together
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [at]
