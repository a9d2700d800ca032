"""A few of the random pairs of benchmarks/budgets: no run out of memory, no untrue refusal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[3] / "benchmarks" / "budgets" / "run.py"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a budget is enforced on Linux")
@pytest.mark.parametrize("seed", [11, 28, 33])
def test_runs_keep_to_random_budgets(seed: int):
    done = subprocess.run(
        [sys.executable, str(RUN), "--seeds", str(seed), "--dry"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
