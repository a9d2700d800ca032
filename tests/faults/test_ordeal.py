"""One training that ranks and agents are killed in, memory is refused in, and checkpoints are damaged
in, ends as one that nothing disturbed. `benchmarks/survival` has many of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.ordeal import KILLS, Ordeal


@pytest.mark.nightly
@pytest.mark.faults
def test_whatever_happens_to_a_run_its_end_is_the_same(tmp_path: Path):
    ordeal = Ordeal(tmp_path, epochs=3)
    ordeal.undisturbed()
    story = ordeal.run(seed=1, num_faults=2, most_ranks=2, pace=(0.0, 1.0))
    assert not story.wrong, story
    assert sum(story.faults.values()) >= 1


@pytest.mark.nightly
@pytest.mark.faults
def test_a_model_with_dropout_ends_with_the_same_bits_after_kills(tmp_path: Path):
    ordeal = Ordeal(tmp_path, epochs=2, dropout=0.3, reproducible=True)
    ordeal.undisturbed()
    story = ordeal.run(seed=3, kinds=KILLS, num_faults=1, most_ranks=3, pace=(0.0, 0.5))
    assert not story.wrong, story
    assert sum(story.faults.values()) == 1
    assert story.deviation == 0.0
