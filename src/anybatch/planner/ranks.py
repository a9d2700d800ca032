"""Ranks: what a plan for several devices means for one of them, and what it leaves free of its budget.

Each takes its part of the global batch and runs it as a device of its own; then gradients are added up
over the link. This is all that planning knows of data parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.compute.buckets import check_divisible
from anybatch.compute.ghost_norm import cut_norms
from anybatch.compute.low_bit_optimizers import check_whole
from anybatch.data import divided_ghosts, ghosts, share
from anybatch.errors import InputError
from anybatch.estimate import Subject, sums_of
from anybatch.estimate.seconds import tabulated_link
from anybatch.estimate.sharding import Division, parts_of
from anybatch.machine import Device, DeviceKind
from anybatch.plans import Balancing, Exchange, Link, Norms, Parallel, Plan, Sharding, StatesOn

WHOLLY, EXACT = Sharding(), Exchange()
"""All ranks divide one model; they tell each other everything in every step."""


_LEAST: dict[DeviceKind, int] = {"cpu": 2 << 20, "cuda": 256 << 10}
_PARTS: dict[DeviceKind, int] = {"cpu": 25, "cuda": 40}
"""So many bytes at least, and one part in so many."""


def reserve_of(budget_bytes: int, kind: DeviceKind) -> int:
    """Bytes of the budget that a plan leaves free on a device of that `kind`: for memory that a trace
    does not see, such as that of libraries and of the interpreter."""
    return max(_LEAST[kind], budget_bytes // _PARTS[kind])


def budget_for(peak_bytes: int, kind: DeviceKind) -> int:
    """The least budget that leaves `peak_bytes` beside its reserve."""
    parts = _PARTS[kind]
    least = max(peak_bytes + _LEAST[kind], peak_bytes * parts // (parts - 1))
    while least - reserve_of(least, kind) < peak_bytes:  # what rounding has left out
        least += 1
    return least


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks that a plan is for, how they share a step, and what they tell each other. See `Plan`
    for the fields; `link` is what the ranks have measured, None: they have not. `exchange` may be one
    that the plan cannot have."""

    parallel: Parallel = "single"
    shares: tuple[float, ...] = (1.0,)
    balance: Balancing = "fixed"
    norms: Norms = "ghosts"
    link: Link | None = None
    sharding: Sharding = WHOLLY
    exchange: Exchange = EXACT

    @classmethod
    def of(cls, plan: Plan) -> Layout:
        """Of the ranks of `plan`."""
        return cls(
            plan.parallel,
            plan.shares,
            plan.balance,
            plan.norms,
            plan.link,
            plan.sharding,
            plan.exchange,
        )

    def link_on(self, device: Device) -> Link:
        """What joins these ranks, on devices like `device`: as measured, or as tabulated."""
        return self.link or tabulated_link(device)

    def link_within(self, device: Device) -> Link:
        """What joins the ranks of one group that divides a model: of groups within machines, what is
        tabulated for those, where the ranks of all machines have measured something slower."""
        link = self.link_on(device)
        if self.sharding.group_size(len(self.shares)) == len(self.shares):
            return link
        return max(link, tabulated_link(device), key=lambda one: one.bytes_per_second)

    def fields(self, device: Device) -> dict[str, Any]:
        """Those of `Plan` that say where and by whom."""
        several = self.parallel in ("replicate", "shard")
        return {
            "parallel": self.parallel,
            "shares": self.shares,
            "balance": self.balance,
            "norms": self.norms,
            "sharding": self.sharding,
            "link": self.link_on(device) if len(self.shares) > 1 else None,
            "device": device.kind if several else device.torch_name,
            "device_name": device.name,
            "budget_bytes": device.budget_bytes,
            "reserve_bytes": reserve_of(device.budget_bytes, device.kind),
        }


def layouts_of(
    devices: Sequence[Device],
    parallel: Parallel | None,
    balance: Balancing | None = None,
    *,
    divisible: bool = True,
    link: Link | None = None,
    sharding: Sharding | None = None,
    exchange: Exchange | None = None,
) -> tuple[Layout, ...]:
    """How the ranks on `devices`, one each, may share a step, before anything is measured: by the
    nominal speed of their devices. The one to take among equals comes first.

    Args:
        devices: one for each rank.
        parallel: as asked for; None leaves open whether the model is divided.
        balance: as asked for; None: measured where the ranks' times tell something.
        divisible: whether ranks may have parts of the model, which takes that they tell each other
            everything in every step; else each has the whole.
        link: what the ranks have measured to join them; None: nothing.
        sharding: how the model is to be divided, which then it is; None: over all ranks, if at all.
        exchange: what they are to tell each other; None: everything.

    Raises `InputError` if so many ranks cannot be parted into groups as `sharding` has them.
    """
    if sharding is not None and parallel is None and divisible:
        parallel = "shard"
    if len(devices) == 1 and parallel in (None, "single"):
        return (Layout(),)
    if sharding is not None and len(devices) % sharding.group_size(len(devices)):
        raise InputError(
            f"the model is to be divided over {sharding.over} ranks, and {len(devices)} ranks cannot be"
            " parted into groups of so many: give a number that divides theirs."
        )
    speeds = [device.rates.flops for device in devices]
    alike = len(set(speeds)) == 1
    whole = Layout(
        parallel=parallel or "replicate",
        shares=(1.0,) * len(devices) if alike else tuple(s / max(speeds) for s in speeds),
        # What ranks on one CPU measure is mostly what they take from each other.
        balance=balance or ("fixed" if devices[0].kind == "cpu" else "measured"),
        link=link,
        sharding=sharding or WHOLLY,
        exchange=exchange or EXACT,
    )
    if parallel is not None or not divisible:
        return (whole,)
    return whole, replace(whole, parallel="shard")


def of_one_rank(subject: Subject, layout: Layout) -> Subject:
    """What the rank with the largest share computes if it holds the whole model: its part of the global
    batch. `division_of` tells what it holds of one that is divided."""
    identity = subject.identity
    sums = sums_of(identity, layout.shares)
    if len(layout.shares) == 1:
        return subject if sums is None else replace(subject, flat=True, sums=sums)
    unit = identity.part or identity.ghost_batch or 1
    if layout.norms == "synchronised":
        unit = pass_of(subject, layout)
        most = unit * num_ghosts(subject)
    else:
        parts = _parts(identity.global_batch, layout, unit)
        # Whole ghosts: a micro-batch holds nothing else, but for one with all samples of the global
        # batch.
        most = min(-(-max(parts) // unit) * unit, identity.global_batch)
    valid = subject.num_valid
    return replace(
        subject,
        identity=identity.model_copy(
            update={
                "global_batch": most,
                "ghost_batch": unit if layout.norms == "synchronised" else identity.ghost_batch,
                "padded": identity.padded and _part_of_padded(identity.padded, layout, unit),
            }
        ),
        num_valid=valid and max(_parts(valid, layout, 1)),
        # Of a divided model too: its gradients are there all the time, and both are traced at once.
        sums=sums,
        flat=layout.parallel in ("replicate", "shard"),
        families={},  # traces of the whole say nothing of a part
        stages={},
        heads={},
    )


def rank_of(
    subject: Subject, layout: Layout, device: Device, states_on: StatesOn = "device"
) -> Subject:
    """What the rank with the largest share computes, and holds. Raises `InputError` if the model is to
    be divided and cannot be."""
    one = of_one_rank(subject, layout)
    if layout.parallel != "shard":
        return one
    division = division_of(subject, layout, device)
    return replace(one, division=replace(division, offload=states_on == "host"))


def _parts(num_samples: int, layout: Layout, unit: int) -> list[int]:
    """What each rank takes of so many samples."""
    ranks = range(len(layout.shares))
    return [len(share(num_samples, layout.shares, rank, unit)) for rank in ranks]


def _part_of_padded(padded: int, layout: Layout, unit: int) -> int:
    """What the rank with the largest share takes of a global batch of that padded size: whole units."""
    part = padded * max(layout.shares) / sum(layout.shares)
    return math.ceil(part / unit) * unit


def num_ghosts(subject: Subject) -> int:
    """Ghost batches of a full global batch."""
    identity = subject.identity
    return len(ghosts(identity.global_batch, identity.ghost_batch or identity.global_batch))


def pass_of(subject: Subject, layout: Layout) -> int:
    """The most samples that a rank has in one pass where each ghost batch is divided over the ranks; at
    least two, since a norm alone with one sample cannot be traced."""
    identity = subject.identity
    ghost = identity.ghost_batch or identity.global_batch
    parts = [
        len(part)
        for rank in range(len(layout.shares))
        for part in divided_ghosts(identity.global_batch, ghost, layout.shares, rank)
    ]
    return min(max(2, *parts), identity.global_batch)


def num_idle(subject: Subject, layout: Layout) -> int:
    """Ranks that would take part, but have no sample of their own, or no ghost batch, or no part of a
    reproducible step."""
    able = sum(1 for one in layout.shares if one > 0)
    identity = subject.identity
    units = num_ghosts(subject) if identity.ghost_batch else identity.global_batch
    return max(0, able - (identity.num_parts or units))


def norms_that_meet(subject: Subject) -> int | None:
    """How many norms the model has that can be synchronised over ranks; None if one of them computes
    its statistics in a way of its own."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        norms = cut_norms(subject.build_model()).values()
    known = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
    return len(norms) if all(type(norm).forward in known for norm in norms) else None


def division_of(subject: Subject, layout: Layout, device: Device) -> Division:
    """How the model is divided over the ranks of `layout`, on devices like `device`.

    Raises `InputError` if the model or its optimizer cannot be.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = subject.build_model()
        check_divisible(model)
        check_whole(subject.make_optimizer(model))
        parts = parts_of(model)
    sharding = layout.sharding
    return Division(
        parts,
        sharding.group_size(len(layout.shares)),
        by_gloo=device.kind == "cpu",
        reduce_at_last=sharding.reduce == "last pass",
    )


def half_of(global_batch: int, unit: int) -> int:
    """What each of two devices takes of the part of one, in whole units (ghost batches)."""
    units = -(-global_batch // unit)
    return min(global_batch, -(-units // 2) * unit)
