"""Processes that load samples and die, hang, or lose the process that they load for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from tests.equivalence.reference import plan_for
from tests.faults.bad_data import Deadly, Faulty, Hanging, Slow, run, task_of, train_plainly

import anybatch as ab
from anybatch.data import workers
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
def test_a_worker_that_is_killed_while_the_rank_computes_is_missed(monkeypatch):
    monkeypatch.setattr(workers, "DEADLINE_SECONDS", 2 * SECONDS)
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
    assert "a worker process that loads samples has died while it loaded samples" in ran.error
    assert ran.seconds < SECONDS  # not by the deadline
    assert set(workers_here()) == before


def test_a_worker_that_hangs_is_ended_and_what_it_was_loading_is_named(monkeypatch):
    monkeypatch.setattr(workers, "DEADLINE_SECONDS", 2.0)
    before = set(workers_here())
    task = task_of(Hanging(LENGTH), num_workers=2, shuffle=False, bad_data="stop")
    ran = run(task, plan_for(task, 6))
    assert ran.kind == "DataError"
    assert ran.error.startswith(
        "the worker process that loads samples 18, 19, 20, 21, 22, 23 (epoch 0) of Hanging has not"
        " come to the end of any in 2 s"
    )
    assert len(ran.losses) == 1
    wanted = train_plainly(task_of(Faulty(12), shuffle=False, epochs=1), 12, {}, shuffle=False)
    for name, value in wanted.model.state_dict().items():
        torch.testing.assert_close(ran.state[name], value, rtol=1e-6, atol=1e-9)
    assert set(workers_here()) == before


def test_a_worker_that_is_slow_but_goes_on_is_waited_for(monkeypatch):
    monkeypatch.setattr(workers, "DEADLINE_SECONDS", 1.5)  # a batch takes 1.8 s
    task = task_of(Slow(24), num_workers=1, shuffle=False, bad_data="stop", epochs=1)
    ran = run(task, plan_for(task, 12))
    assert not ran.error
    assert len(ran.losses) == 2


@pytest.mark.nightly
def test_the_other_ranks_are_told():
    task = task_of(Deadly(LENGTH), num_workers=1, shuffle=False, bad_data="stop")
    with pytest.raises((DataError, PeerFailed), match="has died while it loaded samples") as caught:
        ab.train(task, ranks=2, micro_batch=2)
    assert "22, 23 (epoch 0) of Deadly" in str(caught.value)


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
