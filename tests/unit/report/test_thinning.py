"""Of a long run not every step is logged, and its curves stay right."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.unit.report.fake_run import make_end, make_evaluation, make_plan, make_start, make_step

from anybatch.events import Event, StepDone
from anybatch.report import RunFolder, read
from anybatch.report.folder import ALL_LOGGED, Thinning, is_logged
from anybatch.report.record import Record


def test_a_million_steps_are_few_lines():
    logged = [step for step in range(1, 1_000_001) if is_logged(step)]
    assert logged[:ALL_LOGGED] == list(range(1, ALL_LOGGED + 1))
    assert len(logged) < 80_000
    # Steps 1, 5, 9, ... are those whose gradient noise is measured late in a run.
    measured = [step for step in logged if (step - 1) % 4 == 0]
    assert len([step for step in logged if step > 2 * ALL_LOGGED]) == len(
        [step for step in measured if step > 2 * ALL_LOGGED]
    )
    assert max(b - a for a, b in pairwise(logged)) <= 64


def logged(events: list[Event]) -> list[Event]:
    found: list[Event] = []
    sink = Thinning(found.append)
    for event in events:
        sink(event)
    return found


def steps_of(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, StepDone)]


FIRST = 16 * ALL_LOGGED + 1  # from here on one in 32 is logged


def test_the_last_step_before_another_event_is_logged():
    steps = [make_step(FIRST + i, loss=1.0) for i in range(100)]
    found = logged([*steps[:50], make_evaluation(FIRST + 49), *steps[50:], make_end()])
    assert steps_of(found) == [FIRST + i for i in (0, 32, 49, 64, 96, 99)]
    assert [event.kind for event in found].index("evaluated") == 3


@pytest.mark.parametrize("loss", [9.0, math.nan, math.inf])
def test_a_spike_is_logged(loss: float):
    steps = [make_step(FIRST + i, loss=loss if i == 40 else 1.0) for i in range(97)]
    assert steps_of(logged([*steps])) == [FIRST + i for i in (0, 32, 40, 64, 96)]


def test_steps_that_are_repeated_after_a_resumption_replace_those_before():
    steps = [make_step(FIRST + i, loss=2.0) for i in range(70)]
    again = [make_step(FIRST + i, loss=1.0) for i in range(40, 97)]
    found = logged([*steps, make_start(), *again, make_end()])
    record = Record.of(found)
    assert record.column("step").tolist() == [FIRST + i for i in (0, 32, 64, 96)]
    assert record.column("loss").tolist() == [2.0, 2.0, 1.0, 1.0]


def test_in_the_folder_of_a_run(tmp_path: Path):
    with RunFolder(tmp_path, make_plan()) as sink:
        sink(make_start())
        for i in range(200):
            sink(make_step(FIRST + i, loss=5.0 - i / 100))
        sink(make_end(steps=FIRST + 199))
    record = Record.of(read(tmp_path / "events.jsonl"))
    assert record.num_steps == 8
    line = 5.0 - (record.column("step") - FIRST) / 100
    assert np.allclose(record.column("loss"), line)
