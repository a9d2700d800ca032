"""Choose: creates the group of ranks for a plan, and selects the device of this rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from anybatch.errors import InputError, as_setting, setting, worded
from anybatch.oom import is_limited
from anybatch.parallel.group import Group, SingleDevice
from anybatch.parallel.link import connect
from anybatch.parallel.local_steps import LocalSteps
from anybatch.parallel.replicate import Replicate
from anybatch.parallel.reproducible import Reproducible
from anybatch.parallel.stale import Stale
from anybatch.parallel.sums import Sums
from anybatch.plans import Plan

_COMPRESSED = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


def group_of(plan: Plan) -> tuple[Group, str]:
    """The group for `plan`, as seen from this process, and the device of this rank.

    Raises `InputError` if the number of ranks differs from that of the plan, or they have not joined.
    """
    task, shares, exchange = plan.task, plan.shares, plan.exchange
    if plan.parallel == "single":
        name = "cuda:0" if plan.device == "cuda" else plan.device
        if task.part is None:
            return SingleDevice(), name
        return Reproducible(shares, torch.device(name), task.global_batch, task.part), name
    there = dist.get_world_size() if dist.is_initialized() else 1
    if there != plan.num_ranks:
        raise InputError(
            f"the plan is for {plan.num_ranks} ranks, and here {'is' if there == 1 else 'are'} {there}:"
            f" start it with {as_setting('ranks', plan.num_ranks)} or torchrun, or plan anew."
        )
    if not dist.is_initialized():
        more = worded('ranks=2 or more, or parallel="single"', "--ranks 2 or more")
        raise InputError(
            f"{setting('parallel')} is {plan.parallel!r}, which is for ranks that have joined, and this"
            f" process has joined no others: give {more}, or start several with torchrun."
        )
    name = plan.device
    if name == "cuda":  # the current device, which was set when the ranks were started
        name = f"cuda:{torch.cuda.current_device()}"
    device = torch.device(name)
    connect(device)  # before memory is measured
    # Under an enforced memory limit a rank must not run out of memory inside a collective.
    overlaps = name != "cpu" or not (plan.enforced or is_limited())
    sums = Sums(_COMPRESSED[exchange.compress])
    if task.part is not None:
        group: Group = Reproducible(shares, device, task.global_batch, task.part)
    elif exchange.every > 1:
        group = LocalSteps(shares, device, exchange.every, exchange.outer, sums)
    elif exchange.stale:
        group = Stale(shares, device, sums)
    elif plan.parallel == "shard":
        from anybatch.parallel.shard import Shard  # FSDP takes half a second to import

        group = Shard(
            shares,
            device,
            plan.choice.precision,
            over=plan.sharding.over,
            reduce=plan.sharding.reduce,
            to_host=plan.choice.optimizer_states == "host",
        )
    else:
        group = Replicate(shares, device, overlaps, plan.norms == "synchronised", sums)
    return group, name
