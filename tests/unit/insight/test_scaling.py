"""What limits a step of several ranks is named, with its share and what would help."""

from __future__ import annotations

import pytest

from anybatch.insight.scaling import what_limits


def step(**parts: float) -> dict[str, float]:
    named = {name.replace("_", " "): seconds for name, seconds in parts.items()}
    none = dict.fromkeys(("computing", "slower ranks", "exchange", "update", "samples"), 0.0)
    return none | named


@pytest.mark.parametrize(
    ("parts", "named", "remedy"),
    [
        (step(computing=0.9, exchange=0.1), "computing, 90%", "more devices"),
        (step(computing=0.6, exchange=0.4), "exchange, 40%", "compression and local steps"),
        (step(computing=0.7, slower_ranks=0.3), "slower ranks, 30%", 'balance="measured"'),
        (step(computing=0.5, update=0.3, exchange=0.2), "update, 30%", 'parallel="shard"'),
        (step(computing=0.7, samples=0.2, exchange=0.1), "samples, 20%", "num_workers"),
    ],
)
def test_the_largest_part_beside_computing_limits_if_it_is_large(
    parts: dict[str, float], named: str, remedy: str
):
    sentence = what_limits(parts)
    assert sentence.startswith(named)
    assert remedy in sentence
