"""Memory really refused at random moments, in every way of being parallel: the end is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.faults import campaign

from anybatch.machine import can_enforce

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(not can_enforce("cpu"), reason="no memory limit is held on this system"),
]

TRIALS = {
    str(trial.way): trial
    for trial in campaign.draw(seed=3, count=6 * len(campaign.WAYS))
    if trial.way
    in (
        campaign.Way("single", limited=True),
        campaign.Way("replicate", 2),
        campaign.Way("shard", 2, limited=True),
    )
}


@pytest.fixture(scope="module")
def crew():
    with campaign.crew_of_one_heap() as crew:
        yield crew


@pytest.mark.nightly
@pytest.mark.parametrize("way", TRIALS)
def test_refusals_of_memory_leave_no_trace(crew, way):
    judged = campaign.judge(crew, TRIALS[way])
    assert judged.error == ""
    assert judged.deviation <= campaign.TOLERANCE
    assert judged.num_lowered >= 3
    # Every failure is told with what the plan became, and whoever met one is told of.
    assert judged.num_told >= judged.num_met
    assert judged.replanned


@pytest.mark.nightly
def test_a_run_without_limits_meets_no_failure(crew):
    trial = replace(TRIALS["replicate on 2"], refusals=())
    ranks = crew(2, campaign.run, trial, False)
    assert [rank.failures for rank in ranks] == [[], []]
    assert len(ranks[0].losses) == trial.steps  # which rank 0 is told
