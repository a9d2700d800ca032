"""Enforcement: whether a run is held to its budget, or the budget is only planned with."""

from __future__ import annotations

from collections.abc import Iterator

from anybatch.estimate import Subject
from anybatch.machine import Device, can_enforce
from anybatch.planner.setting import Wishes
from anybatch.units import format_bytes


def is_enforced(subject: Subject, device: Device, wishes: Wishes, limited: bool) -> bool:
    """Whether the budget of `device` is enforced, if the user named it (`limited`)."""
    if not (limited and device.present and can_enforce(device.kind)):
        return False
    # On a CPU the compiler would take from the same budget.
    return not (device.kind == "cpu" and (wishes.compile is True or subject.compiled))


def budget_notices(subject: Subject, device: Device, limited: bool) -> Iterator[str]:
    """What to say of a budget that is not enforced, but for the sake of blocks that the plan compiles,
    whose own notice says so."""
    if limited and device.present:
        if not can_enforce(device.kind):
            yield (
                "This operating system does not enforce a memory limit on a process: the budget is only"
                " planned with."
            )
        elif subject.compiled and device.kind == "cpu":
            yield (
                "The model is compiled by torch.compile, whose compiler takes memory in this process:"
                " the budget is only planned with, and bytes and seconds are predicted for the model"
                " as it is without the compiler."
            )
    free, limit = device.free_bytes, device.limit or "what other processes leave of the machine"
    if limited and free is not None and device.budget_bytes > free:
        yield (
            f"The budget of {format_bytes(device.budget_bytes)} a rank is more than the"
            f" {format_bytes(free)} that are free now ({limit}): where that is used up, the kernel"
            " refuses memory or ends the process. Give less with --memory."
        )
    if not limited and device.kind == "cpu" and device.limit:
        yield f"No budget was given, so none is enforced. What is free is bounded by {device.limit}."
