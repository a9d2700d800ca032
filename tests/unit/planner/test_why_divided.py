"""A model that is divided is told of with what saves most of the time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anybatch.estimate.seconds import StepSeconds
from anybatch.planner.make import _why_divided


def told(own: StepSeconds, other: StepSeconds | None) -> str:
    found: Any = SimpleNamespace(seconds=own, otherwise=other)
    return _why_divided(found)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (StepSeconds(1, 2, 0, 1, 1.5), "more memory is left for activations"),
        (StepSeconds(1, 2, 3, 0.25, 0.5), "each rank updates its part alone"),
        (StepSeconds(1, 2, 3, 0.9, 0.1), "crosses beside more of the computing"),
    ],
)
def test_what_saves_most_is_told(own: StepSeconds, why: str):
    sentence = told(own, StepSeconds(1, 2, 3, 1, 0.5))
    assert sentence.endswith(f"{why}.")
    assert f"{own.total:.1f} s per step instead of 7.5 s" in sentence


def test_a_model_that_fits_in_no_other_way_is_divided_for_that():
    assert "does not fit on each rank" in told(StepSeconds(1, 1, 0, 1, 1), None)
