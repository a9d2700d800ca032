"""Least bytes: what a model takes whatever is computed with it, for one that cannot be traced.

Its weights, gradients and optimizer states are known without running it. What does not fit so cannot be
trained there, and on a device that is not here nothing else would tell.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.compute.low_bit_optimizers import state_kinds
from anybatch.compute.optimizer_update import can_part
from anybatch.errors import NoPlanFits
from anybatch.estimate import Subject
from anybatch.machine import Device
from anybatch.planner.ranks import Layout
from anybatch.planner.reserve import budget_for
from anybatch.plans import Precision
from anybatch.task import parameters_in
from anybatch.units import format_bytes


def check_floor(
    subject: Subject, device: Device, layouts: Sequence[Layout], precision: Precision, why: str
) -> None:
    """Raises `NoPlanFits` if not even weights, gradients and states fit `device`; `why` says for what
    reason nothing else is known."""
    try:
        num_bytes = min(_floor(subject, layout, device, precision) for layout in layouts)
    except Exception:  # whatever the user's code raises on fake tensors
        return
    least = budget_for(num_bytes, device.kind)
    if least > device.budget_bytes:
        raise NoPlanFits(
            f"no plan fits the budget of {format_bytes(device.budget_bytes)}: weights, gradients and"
            f" optimizer states that have to be there take {format_bytes(num_bytes)} by themselves."
            f" Give it more than {format_bytes(least)}. {why}",
            least_bytes=least,
        )


def _floor(subject: Subject, layout: Layout, device: Device, precision: Precision) -> int:
    """Bytes on one rank: of states only if they have to lie on the device."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = subject.build_model()
        optimizer = subject.make_optimizer(model)
        weights = sum(param.nbytes for param in model.parameters())
        trained = [p for p in parameters_in(optimizer.param_groups) if p.requires_grad]
        gradients = sum(param.nbytes for param in trained)
        groups = [
            (group, sum(p.nbytes for p in group["params"] if p.requires_grad))
            for group in optimizer.param_groups
        ]
    divided = layout.parallel == "shard"
    elsewhere = device.kind == "cuda" and can_part(optimizer) and not divided
    states = 0 if elsewhere else sum(n * len(state_kinds(optimizer, g)) for g, n in groups)
    whole = (weights + gradients + states) // (2 if precision.endswith("-pure") else 1)
    return whole // (len(layout.shares) if divided else 1)
