"""Ranks: the part of one device in a plan for several, and the reserve of its budget.

Each rank takes its part of the global batch and runs it as a single device would; then gradients
are summed over the link. Planning knows nothing else of data parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from anybatch.compute.buckets import check_divisible
from anybatch.compute.ghost_norm import cut_norms
from anybatch.compute.low_bit_optimizers import check_whole
from anybatch.data import divided_ghosts, ghosts, share
from anybatch.errors import InputError, as_setting
from anybatch.estimate import Subject, sums_of
from anybatch.estimate.seconds import tabulated_link
from anybatch.estimate.sharding import Division, parts_of
from anybatch.machine import Device, DeviceKind
from anybatch.plans import Balancing, Exchange, Link, Norms, Parallel, Plan, Sharding, StatesOn
from anybatch.units import format_bytes

WHOLLY, EXACT = Sharding(), Exchange()
"""Defaults: all ranks divide one model, and they exchange everything in every step."""


_LEAST: dict[DeviceKind, int] = {"cpu": 2 << 20, "cuda": 256 << 10}
_PARTS: dict[DeviceKind, int] = {"cpu": 25, "cuda": 40}
"""The reserve is at least `_LEAST` bytes, and at least one part in `_PARTS` of the budget."""


def reserve_of(budget_bytes: int, kind: DeviceKind) -> int:
    """Bytes of the budget that a plan leaves free on a device of this `kind`, for memory that a
    trace does not cover, such as that of libraries and of the interpreter."""
    return max(_LEAST[kind], budget_bytes // _PARTS[kind])


def budget_for(peak_bytes: int, kind: DeviceKind) -> int:
    """The smallest budget that leaves `peak_bytes` after its reserve."""
    parts = _PARTS[kind]
    least = max(peak_bytes + _LEAST[kind], peak_bytes * parts // (parts - 1))
    while least - reserve_of(least, kind) < peak_bytes:  # compensates for rounding
        least += 1
    return least


def least_budget(num_bytes: int) -> str:
    """`num_bytes` and the setting for a budget of as many, for a message that asks for more memory."""
    return f"{format_bytes(num_bytes)} ({as_setting('memory', f'{-(-num_bytes // (1 << 20))}MiB')})"


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks that a plan is for, how they share a step, and what they exchange. See `Plan` for
    the fields. `link` is the link that the ranks measured; None: they have not measured it.
    `exchange` may be one that the plan cannot use."""

    parallel: Parallel = "single"
    shares: tuple[float, ...] = (1.0,)
    balance: Balancing = "fixed"
    norms: Norms = "ghosts"
    link: Link | None = None
    sharding: Sharding = WHOLLY
    exchange: Exchange = EXACT

    @classmethod
    def of(cls, plan: Plan) -> Layout:
        """The layout of the ranks of `plan`."""
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
        """The link between these ranks, on devices like `device`: as measured, or as tabulated."""
        return self.link or tabulated_link(device)

    def link_within(self, device: Device) -> Link:
        """The link between the ranks of one group that divides a model. For groups within
        machines, this is the tabulated link if the ranks of all machines measured a slower one."""
        link = self.link_on(device)
        if self.sharding.group_size(len(self.shares)) == len(self.shares):
            return link
        return max(link, tabulated_link(device), key=lambda one: one.bytes_per_second)

    def fields(self, device: Device) -> dict[str, Any]:
        """The fields of `Plan` that describe devices and ranks."""
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
    """The ways in which ranks on `devices`, one each, may share a step, before anything is
    measured: by the nominal speed of the devices. The one that is preferred among equals comes
    first.

    Args:
        devices: one device for each rank.
        parallel: as requested; None leaves open whether the model is divided.
        balance: as requested; None: measured where the times of the ranks are meaningful.
        divisible: whether ranks may hold parts of the model, which requires that they exchange
            everything in every step; otherwise each holds the whole model.
        link: the link that the ranks measured; None: they have not measured it.
        sharding: how the model is divided, which also requests that it is; None: over all ranks, if
            at all.
        exchange: what the ranks are to exchange; None: everything.

    Raises `InputError` if the ranks cannot be partitioned into groups as `sharding` requires.
    """
    if sharding is not None and parallel is None and divisible:
        parallel = "shard"
    if len(devices) == 1 and parallel != "shard":
        return (Layout(),)
    if sharding is not None and len(devices) % sharding.group_size(len(devices)):
        raise InputError(
            f"the model is to be divided over {sharding.over} ranks, which does not divide the number"
            f" of ranks, {len(devices)}: give a divisor of that."
        )
    speeds = [device.rates.flops for device in devices]
    alike = len(set(speeds)) == 1
    whole = Layout(
        parallel=parallel or "replicate",
        shares=(1.0,) * len(devices) if alike else tuple(s / max(speeds) for s in speeds),
        # Ranks on one CPU mostly measure how much they slow down each other.
        balance=balance or ("fixed" if devices[0].kind == "cpu" else "measured"),
        link=link,
        sharding=sharding or WHOLLY,
        exchange=exchange or EXACT,
    )
    if parallel is not None or not divisible:
        return (whole,)
    return whole, replace(whole, parallel="shard")


def of_one_rank(subject: Subject, layout: Layout) -> Subject:
    """The computation of the rank with the largest share if it holds the whole model: its part of
    the global batch. For a divided model, `division_of` describes the part that it holds."""
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
        # Whole ghost batches, of which micro-batches consist, except for one with all samples of the
        # global batch.
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
        # Also for a divided model: its gradients always exist, and both are traced together.
        sums=sums,
        flat=layout.parallel in ("replicate", "shard"),
        families={},  # traces of the whole do not apply to a part
        stages={},
        heads={},
    )


def rank_of(
    subject: Subject, layout: Layout, device: Device, states_on: StatesOn = "device"
) -> Subject:
    """The computation and the memory of the rank with the largest share. Raises `InputError` if the
    model is to be divided and cannot be."""
    one = of_one_rank(subject, layout)
    if layout.parallel != "shard":
        return one
    division = division_of(subject, layout, device)
    return replace(one, division=replace(division, offload=states_on == "host"))


def _parts(num_samples: int, layout: Layout, unit: int) -> list[int]:
    """Number of samples that each rank takes of `num_samples`."""
    ranks = range(len(layout.shares))
    return [len(share(num_samples, layout.shares, rank, unit)) for rank in ranks]


def _part_of_padded(padded: int, layout: Layout, unit: int) -> int:
    """The part of a global batch of this padded size that the rank with the largest share takes, in
    whole units."""
    part = padded * max(layout.shares) / sum(layout.shares)
    return math.ceil(part / unit) * unit


def num_ghosts(subject: Subject) -> int:
    """Number of ghost batches in a full global batch."""
    identity = subject.identity
    return len(ghosts(identity.global_batch, identity.ghost_batch or identity.global_batch))


def pass_of(subject: Subject, layout: Layout) -> int:
    """The maximum number of samples of a rank in one pass if each ghost batch is divided over the
    ranks; at least two, since a norm with a single sample cannot be traced."""
    identity = subject.identity
    ghost = identity.ghost_batch or identity.global_batch
    parts = [
        len(part)
        for rank in range(len(layout.shares))
        for part in divided_ghosts(identity.global_batch, ghost, layout.shares, rank)
    ]
    return min(max(2, *parts), identity.global_batch)


def num_idle(subject: Subject, layout: Layout) -> int:
    """Number of ranks that have a share, but no sample, no ghost batch, or no part of a
    reproducible step."""
    able = sum(1 for one in layout.shares if one > 0)
    identity = subject.identity
    units = num_ghosts(subject) if identity.ghost_batch else identity.global_batch
    return max(0, able - (identity.num_parts or units))


def norms_that_meet(subject: Subject) -> int | None:
    """Number of norms of the model that can be synchronized over ranks; None if one of them
    computes its statistics in a custom way."""
    norms = cut_norms(subject.inspect()).values()
    known = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
    return len(norms) if all(type(norm).forward in known for norm in norms) else None


def division_of(subject: Subject, layout: Layout, device: Device) -> Division:
    """How the model is divided over the ranks of `layout`, on devices like `device`.

    Raises `InputError` if the model or its optimizer cannot be divided.
    """
    model = subject.inspect()
    check_divisible(model)
    check_whole(subject.make_optimizer(model))
    sharding = layout.sharding
    return Division(
        parts_of(model),
        sharding.group_size(len(layout.shares)),
        by_gloo=device.kind == "cpu",
        reduce_at_last=sharding.reduce == "last pass",
    )


def half_of(global_batch: int, unit: int) -> int:
    """The part of each of two devices in the `global_batch` of one, in whole units (ghost batches)."""
    units = -(-global_batch // unit)
    return min(global_batch, -(-units // 2) * unit)
