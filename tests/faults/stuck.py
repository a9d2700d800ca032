"""Ranks of a run in which one hangs, for `test_stuck.py`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import torch
from torch import nn
from torch.utils.data import Dataset

import anybatch as ab
from anybatch.engine import watchdog
from anybatch.launch import find
from anybatch.runs.session import joined

STEP = 8
"""In which it hangs, in the passes that check the loss: what is done for the first time is behind."""

PASS_SECONDS = 0.3
"""Of each pass, so that the watchdogs have looked before it hangs."""


class Samples(Dataset[torch.Tensor]):
    """Sixteen samples, those of a step; in step `STEP` the first one that this rank asks for is never
    there."""

    def __init__(self, hangs: bool) -> None:
        self._hangs = hangs
        self._num_read = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        self._num_read += 1
        if self._hangs and self._num_read > 8 * (STEP - 1):
            threading.Event().wait()
        return torch.full((4,), float(index))


def hang(how: str) -> None:
    if how == "forward":
        time.sleep(3600)
    if how == "held":
        ctypes.PyDLL(None).sleep(3600)  # with the lock of the interpreter
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)


def train(how: str, bad_rank: int, epochs: int = 1000) -> tuple[int, int]:
    """What each rank does; in the first attempt, one hangs. The deadline is short for what was done
    before, and long for the first time, however slow the machine.

    Returns the number of the attempt, and the steps done in it.
    """
    watchdog.LEAST_SECONDS, watchdog.TIMES_LONGEST, watchdog.FIRST_SECONDS = 3.0, 1.0, 60.0
    if how != "held":  # the last resort counts on while the machine stands still
        watchdog._HELD = 20
    member = find()
    assert member is not None
    torch.set_num_threads(1)
    bad = member.rank == bad_rank and member.attempt == 0
    if how == "held" and not bad:  # the rank that is held is to speak for itself, on any machine
        watchdog.LEAST_SECONDS = 60.0
    passes = [0]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        passes[0] += 1
        time.sleep(PASS_SECONDS)
        if bad and passes[0] >= STEP:
            hang(how)
        return model(batch).square().mean()

    task = ab.Task(
        model=lambda: nn.Linear(4, 1),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-4),
        train=Samples(bad and how == "loading"),
        global_batch=16,
        epochs=epochs,
    )
    with joined():
        plan = ab.plan(task, micro_batch=8, rehearsal=False)
        with ab.Session(task, plan) as session:
            return member.attempt, len(list(session.steps()))


if __name__ == "__main__":  # as a command
    how, bad_rank = sys.argv[1:]
    try:
        train(how, int(bad_rank))
    except ab.errors.AnybatchError as error:
        if type(error) is not ab.errors.PeerLost:  # the process that started the ranks tells of it
            sys.stderr.write(f"anybatch: {error}\n")
        sys.exit(error.exit_status)
