"""A rank that fails in the middle of a sharded pass: the others wake, and the step is done again."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from tests.equivalence.reference import train_plainly
from tests.equivalence.worlds import World, task_of
from tests.faults.sharded import lost, out_of_memory, with_a_child

from anybatch.machine import can_enforce

pytestmark = pytest.mark.faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("forward", {}),
        ("backward", {}),
        pytest.param("between passes", {}, marks=pytest.mark.nightly),
        pytest.param("backward", {"reduce": "last pass"}, marks=pytest.mark.nightly),
        pytest.param("between passes", {"reduce": "last pass"}, marks=pytest.mark.nightly),
        ("backward", {"over": 2}),
    ],
    ids=["forward", "backward", "between", "last-backward", "last-between", "machines-backward"],
)
def test_memory_that_runs_out_on_one_rank_leaves_no_trace(crew, where, options):
    world = World(loss="pair", optimizer="adamw", clip_norm=0.1, tied=True, sometimes=True)
    size = 4 if options.get("over") else 3
    ranks = crew(size, out_of_memory, world, 1, where, (0, 3, 4), options)
    plain = train_plainly(task_of(world))
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(ranks[0].state[name], value, rtol=1e-6, atol=1e-9)
    for run in ranks:
        assert run.losses == pytest.approx(plain.losses, rel=1e-6)
        assert run.attempts == world.steps + 3
    # Woken in the pass, not told after a deadline: its neighbours saw the connection close.
    assert ranks[1].woken == []
    assert any(ranks[rank].woken for rank in range(size) if rank != 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked on this system")
def test_ranks_are_woken_though_forked_processes_hold_their_connections(crew):
    world = World(loss="pair")
    for run in crew(2, with_a_child, world, 1, "forward", (1,), {}):
        assert run.attempts == world.steps + 1


@pytest.mark.slow
def test_a_rank_that_is_killed_is_missed_at_once(crew):
    (_, told), (gone, _), (_, also_told) = crew.outcomes(3, lost, World(loss="pair"), "killed", 100)
    assert isinstance(gone, EOFError)
    for woken, message, seconds in (told, also_told):
        assert "a rank did not answer while" in woken[0]
        assert "in the vote" in message
        assert seconds < 60  # not told by the deadline


@pytest.mark.nightly
def test_a_rank_that_hangs_is_given_up_after_the_deadline(crew):
    (woken, message, _), (also_woken, _, _) = crew(2, lost, World(loss="pair"), "hanging", 3)
    assert "a rank did not answer while" in woken[0]
    assert message == woken[0]
    assert (
        "a rank did not answer while" in also_woken[0]
    )  # it finds the others gone when it is back


def under_limit(size, budget_mib):
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.sharded_under_limit", str(size), str(budget_mib)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.skipif(not can_enforce("cpu"), reason="no memory limit is held on this system")
def test_a_model_too_large_for_one_rank_trains_on_two():
    assert "memory ran out" in under_limit(1, 220)
    sharded, whole = under_limit(2, 220), under_limit(1, 400)
    assert sharded["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert whole["peak"] > 220 << 20 > sharded["peak"]
    # Beside what is gathered and kept: activations, and what the libraries take, 10 MiB here.
    assert sharded["predicted"] < sharded["peak"] < sharded["predicted"] + (24 << 20)
