"""Real memory limits and worker processes: they start, or say why not."""

import json
import subprocess
import sys

import pytest

from anybatch.machine import can_enforce

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not can_enforce("cpu"), reason="no memory limit is held on this system"),
]


def run(*how):
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.workers_under_limit", *how],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
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
