"""Ranks of a sharded run in which one breaks, for `test_shard.py`."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
from tests.equivalence.sharding import Sharded
from tests.equivalence.worlds import task_of

from anybatch.errors import PeerLost


def with_a_child(rank, size, *args):
    """`out_of_memory` on ranks that fork in the first step, as those do that load samples in other
    processes: each child holds all connections of its rank."""
    children = []

    def fork(step, number):
        if (step, number) != (0, 0):
            return
        child = os.fork()
        if not child:
            while True:
                signal.pause()
        children.append(child)

    try:
        return out_of_memory(rank, size, *args, also_before_pass=fork)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def out_of_memory(rank, size, world, bad_rank, where, at, options, also_before_pass=None):
    """Rank `bad_rank` runs out of memory in pass 1 of the steps `at`."""
    due = set(at)
    now = [(-1, -1)]

    def fail(in_what):
        step, number = now[0]
        if rank == bad_rank and in_what == where and number == 1 and step in due:
            due.remove(step)
            raise torch.OutOfMemoryError("tried to allocate more than there is")

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            fail("forward")
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            fail("backward")
            return gradient

    def before_pass(step, number):
        if also_before_pass is not None:
            also_before_pass(step, number)
        now[0] = step, number
        fail("between passes")

    mine = Sharded(task_of(world), 2, (1.0,) * size, before_pass=before_pass, **options)
    mine.model.body.register_forward_hook(lambda _m, _a, out: Fails.apply(out))
    return mine.train()


def lost(rank, size, world, how, seconds):
    """Rank 1 ends, or hangs, in its second step. Returns what each is told, and after how long."""
    begun = [0.0]

    def before_pass(step, number):
        if (step, number) == (1, 1):
            begun[0] = time.monotonic()
            if rank == 1 and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1:
                time.sleep(2 * seconds)

    deadline = timedelta(seconds=seconds)
    mine = Sharded(task_of(world), 2, (1.0,) * size, before_pass=before_pass, deadline=deadline)
    try:
        mine.train()
    except PeerLost as error:
        return mine.run.woken, str(error), time.monotonic() - begun[0]
    finally:
        mine.group.close()
    return None
