"""Setting and wishes: what a search is given; whether a run is held to its budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from anybatch.estimate import Subject
from anybatch.estimate.calibration import Correction, correction, speeds_of
from anybatch.estimate.seconds import Pace
from anybatch.machine import Device, can_enforce
from anybatch.planner.ranks import Layout
from anybatch.plans import Precision, Recompute
from anybatch.units import format_bytes

Watch = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user fixed; None leaves it to the search.

    `frontier` asks for ways that cannot win too, so that memory can be drawn against time. `compile` is
    for the blocks of the model; `shapes_vary` tells that samples may differ in shape; `watch` is told
    what is traced, in words, before it is.
    """

    precision: Precision | None = "fp32"
    micro_batch: int | None = None
    recompute: Recompute | None = None
    chunked_loss: bool | None = None
    frontier: bool = False
    compile: bool = False
    shapes_vary: bool = False
    watch: Watch | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how a task runs, as one search needs it.

    Attributes:
        device: one of the devices, all alike.
        layout: the ranks, one on each device.
        precision: of the model.
        pace: time of the task on the device in that precision.
        correction: of predicted times, by earlier runs.
        watch: see `Wishes`.
    """

    device: Device
    layout: Layout
    precision: Precision
    pace: Pace
    correction: Correction
    watch: Watch | None = None


def setting_of(
    subject: Subject,
    device: Device,
    precision: Precision = "fp32",
    layout: Layout | None = None,
    watch: Watch | None = None,
) -> Setting:
    """What a search needs to know of `device`, for what one rank of `layout` computes (`subject`). A
    device that is here is measured, if it was not before.

    Raises whatever the model or loss raises on fake tensors.
    """
    if watch is not None:
        watch(f"counting the work of one pass in {precision}")
    return Setting(
        device,
        layout or Layout(),
        precision,
        Pace(subject, device, speeds_of(device), precision),
        correction(device, subject.identity),
        watch,
    )


def is_enforced(subject: Subject, device: Device, wishes: Wishes, limited: bool) -> bool:
    """Whether the budget of `device` is enforced, if the user named it (`limited`)."""
    if not (limited and device.present and can_enforce(device.kind)):
        return False
    # On a CPU the compiler would take from the same budget.
    return not (device.kind == "cpu" and (wishes.compile or subject.compiled))


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
