"""A signal to stop was lost if it came while a wish to save was made or taken back.

Symptom: a run that was sent SIGTERM went on to its end, now and then.

Mechanism: `session.wish &= ~Wish.SAVE` reads, then writes. A handler runs between any two instructions
of the main thread, so what it added to the wish in between was written over.
"""

from __future__ import annotations

import signal

import pytest
from tests.equivalence.reference import plan_for
from tests.equivalence.worlds import World, task_of

import anybatch as ab
from anybatch.errors import Stopped
from anybatch.runs.saving import Every, kept


@pytest.fixture(autouse=True)
def python_s_own_handler():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def test_a_signal_between_reading_and_writing_a_wish_is_heard(tmp_path, monkeypatch):
    wish = ab.Session.wish
    sent = []

    def read(session):
        found = wish.fget(session)
        if session.num_steps == 2 and not sent:
            sent.append(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        return found

    monkeypatch.setattr(ab.Session, "wish", property(read, wish.fset))
    task = task_of(World(steps=7, num_samples=64))
    with (
        ab.Session(task, plan_for(task, 4), checkpoints=tmp_path) as session,
        pytest.raises(Stopped, match="after step 3"),
        kept(session, Every(steps=2)) as steps,
    ):
        list(steps)
    assert sent
