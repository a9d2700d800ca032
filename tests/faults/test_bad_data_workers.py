"""Processes that load samples and die, or lose the process that they load for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tests.equivalence.reference import plan_for
from tests.faults.bad_data import Deadly, Slow, run, task_of

import anybatch as ab
from anybatch.errors import DataError, PeerFailed

pytestmark = [pytest.mark.faults, pytest.mark.slow]

LENGTH = 40
SECONDS = 120.0


def workers_here():
    """The processes that load for this one."""
    return [p for p in psutil.Process().children() if "resource_tracker" not in str(p.cmdline())]


def is_running(process):
    """Whether it has not ended yet; who asks how it did is torch's business."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.usefixtures("losses_are_not_checked")  # whose hooks find everything as before
def test_a_worker_that_is_killed_while_the_rank_computes_is_missed():
    before = set(workers_here())
    # torch would raise in the middle of this pass; here the next batch tells.
    killed = []

    def kill(session):
        def hook(*_):
            if not killed:
                victim = min(set(workers_here()) - before, key=lambda p: p.pid)
                victim.send_signal(signal.SIGKILL)
                killed.append(victim.pid)
                while is_running(victim):
                    time.sleep(0.01)

        session.model.register_forward_hook(hook)

    task = task_of(Slow(LENGTH), num_workers=2, shuffle=False, bad_data="stop")
    ran = run(task, plan_for(task, 6), kill)
    assert killed
    assert ran.kind == "DataError"
    assert "a worker process that loads samples has died, while samples" in ran.error
    assert ran.seconds < SECONDS
    assert set(workers_here()) == before


def test_the_other_ranks_are_told():
    task = task_of(Deadly(LENGTH), num_workers=1, shuffle=False, bad_data="stop")
    with pytest.raises((DataError, PeerFailed), match="has died, while samples") as caught:
        ab.train(task, ranks=2, micro_batch=2)
    assert "(epoch 0) of Deadly" in str(caught.value)


def test_no_worker_outlives_a_process_that_was_killed():
    script = "from tests.faults.bad_data import hang; hang()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(2)]
        told.remove("hangs\n")
        pids = [int(pid) for pid in told[0].split()]
        loading = [psutil.Process(pid) for pid in pids[1:]]
        assert len(loading) == 2
        os.kill(pids[0], signal.SIGKILL)
    _, left = psutil.wait_procs(loading, timeout=SECONDS)
    for each in left:
        each.kill()
    assert not left
