"""The parts of a step add up, and each second is in the right one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.rank.record import parts_of, predicted_parts


def test_each_second_of_a_step_is_in_one_part():
    # Rank 0 reads for 1 s; its passes take 4 s, of which it waits 1 s; rank 1 takes 6 s; the exchange
    # ends 2 s after that, and the update takes 0.5 s.
    parts = parts_of(9.5, 8.0, (4.0, 6.0), waited_seconds=1.0, reading_seconds=1.0)
    assert parts == {
        "computing": 4.0,
        "slower ranks": 1.0,
        "exchange": 2.0,
        "update": 0.5,
        "samples": 2.0,
    }
    assert sum(parts.values()) == pytest.approx(9.5)


@given(
    rank_seconds=st.lists(st.floats(0.01, 10), min_size=1, max_size=5),
    rest=st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 5)),
    waited=st.floats(0, 0.01),
)
def test_the_parts_are_the_step(
    rank_seconds: list[float], rest: tuple[float, float, float], waited: float
):
    exchange, update, reading = rest
    agreed = max(rank_seconds) + exchange
    parts = parts_of(agreed + update + reading, agreed, rank_seconds, waited, reading)
    assert all(seconds >= -1e-12 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(agreed + update + reading)
    assert parts["exchange"] == pytest.approx(exchange, abs=1e-9)


def test_a_device_that_tells_the_time_of_the_step_before_makes_no_part_negative():
    parts = parts_of(1.0, 0.5, (2.0, 3.0), waited_seconds=0.0)
    assert min(parts.values()) == 0.0


def test_what_is_predicted_falls_into_the_same_parts():
    told = {"forward": 1.0, "backward": 2.0, "recompute": 0.5, "norms over ranks": 0.25}
    parts = predicted_parts({**told, "update": 0.125, "exchange of gradients": 4.0})
    assert parts == {"computing": 3.75, "exchange": 4.0, "update": 0.125}
