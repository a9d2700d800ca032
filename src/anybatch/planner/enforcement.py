"""Enforcement: whether a run is held to its budget, or the budget is only planned with."""

from __future__ import annotations

from collections.abc import Iterator

from anybatch.estimate import Subject
from anybatch.machine import Device, can_enforce
from anybatch.planner.setting import Wishes


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
