"""Choose: from a plan to the group of ranks that it is for, and to this rank's device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from anybatch.errors import InputError
from anybatch.oom import is_limited
from anybatch.parallel.group import Group, SingleDevice
from anybatch.parallel.link import connect
from anybatch.parallel.local_steps import LocalSteps
from anybatch.parallel.replicate import Replicate
from anybatch.parallel.reproducible import Reproducible
from anybatch.parallel.shard import Shard
from anybatch.parallel.stale import Stale
from anybatch.parallel.sums import Sums
from anybatch.plans import Plan

_COMPRESSED = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def group_of(plan: Plan) -> Iterator[tuple[Group, str]]:
    """The group that `plan` is for, seen from this process, and the device of this rank.

    Raises `InputError` if there are not as many ranks as the plan has.
    """
    part = plan.task.part
    if plan.parallel == "single":
        device = _first(plan.device)
        if part is None:
            yield SingleDevice(), device
        else:
            yield _in_parts(plan, part, device), device
        return
    there = dist.get_world_size() if dist.is_initialized() else 1
    if there != plan.num_ranks:
        raise InputError(
            f"the plan is for {plan.num_ranks} ranks, and here {'is' if there == 1 else 'are'} {there}:"
            f" start it with `anybatch train --ranks {plan.num_ranks}` or torchrun, or plan anew."
        )
    device = _own(plan.device)
    connect(torch.device(device))  # before memory counts
    if part is not None:
        yield _in_parts(plan, part, device), device
        return
    # What the kernel may refuse memory must not be refused any while it speaks to others.
    overlaps = device != "cpu" or not (plan.enforced or is_limited())
    if not plan.exchange.is_exact:
        yield _as_asked(plan, torch.device(device), overlaps), device
        return
    if plan.parallel == "shard":
        yield _divided(plan, torch.device(device)), device
        return
    synchronised = plan.norms == "synchronised"
    yield Replicate(plan.shares, torch.device(device), overlaps, synchronised), device


def _in_parts(plan: Plan, part: int, device: str) -> Group:
    return Reproducible(plan.shares, torch.device(device), plan.task.global_batch, part)


def _divided(plan: Plan, device: torch.device) -> Shard:
    sharding = plan.sharding
    return Shard(
        plan.shares,
        device,
        plan.choice.precision,
        over=sharding.over,
        reduce=sharding.reduce,
        to_host=plan.choice.optimizer_states == "host",
    )


def _as_asked(plan: Plan, device: torch.device, overlaps: bool) -> Group:
    """What is only done where the plan asks for it."""
    exchange = plan.exchange
    if plan.enforced and not overlaps and exchange.stale:
        raise InputError(
            "the plan has stale gradients and a budget that the operating system enforces, but stale"
            " gradients cross while a step computes, and a rank that is refused memory meanwhile cannot"
            " answer: run it without --memory."
        )
    sums = Sums(_COMPRESSED[exchange.compress])
    if exchange.every > 1:
        return LocalSteps(plan.shares, device, exchange.every, exchange.outer, sums)
    if exchange.stale:
        return Stale(plan.shares, device, sums)
    return Replicate(plan.shares, device, overlaps, plan.norms == "synchronised", sums)


def _first(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


def _own(device: str) -> str:
    """`cuda` is the current device of this process, which whoever started the ranks has set."""
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
