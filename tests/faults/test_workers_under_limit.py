"""Real memory limits and worker processes: workers are not under the budget, and start or say why."""

import json
import subprocess
import sys

import pytest

from anybatch.engine.limit import _SLACK_BYTES
from anybatch.machine import can_enforce
from anybatch.process.threads import SMALL_STACK_BYTES

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not can_enforce("cpu"), reason="no memory limit is held on this system"),
]


def run(*how):
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.workers_under_limit", *how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("start", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_workers_start_and_load_beside_a_budget_that_has_no_room_for_either(start):
    found = run("budget", start)
    assert found["samples"] == [*range(8), *(4 * [*range(16)]), *range(16, 24)]
    # The budget is held all the while, and evaluations, each with new workers, do not wear it away.
    assert found["refused"]
    assert found["room"] < (8 << 20) + _SLACK_BYTES
    # One thread's stack is kept more or less, as its end comes before the next one's start or after.
    assert max(found["limits"]) - min(found["limits"]) < SMALL_STACK_BYTES + (256 << 10)


def test_without_room_for_their_threads_the_sentence_names_the_workers():
    found = run("of somebody else")
    assert found["told"].startswith(
        "the worker processes that load samples (2) cannot be started (RuntimeError: can't"
        " start new thread)"
    )
    assert "use fewer num_workers, or num_workers=0" in found["told"]
    assert found["afterwards"] == 4  # the loader is none the worse for it


@pytest.mark.slow
def test_a_run_under_24_mib_is_the_same_with_workers():
    found = run("run")
    without, with_workers = found["0"], found["2"]
    assert with_workers["enforced"]
    assert with_workers["failures"] == []
    assert with_workers["losses"] == without["losses"]
    assert with_workers["measured"] <= 24 << 20
