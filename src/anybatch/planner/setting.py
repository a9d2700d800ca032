"""Setting and wishes: the inputs of a search, and whether a budget is enforced."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from anybatch.errors import as_setting
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
    """Constraints set by the user; None leaves the decision to the search.

    `frontier` also considers recompute methods and settings that cannot win, so that memory can be
    plotted against time and the selected choice be compared. `compile` applies to the blocks of the
    model; `shapes_vary` states that samples may differ in shape; `watch` is called with a
    description of each trace before it starts.
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
    """Where and how a task runs, as needed by one search.

    Attributes:
        device: one of the devices, which are all alike.
        layout: the ranks, one on each device.
        precision: precision of the model.
        pace: time of the task on the device in that precision.
        correction: correction of predicted times, from earlier runs.
        watch: see `Wishes`.
        saved_bytes: bytes at the peak of each traced choice that passes need wherever the optimizer
            states are: activations, loss, and gathered weights and gradients.
    """

    device: Device
    layout: Layout
    precision: Precision
    pace: Pace
    correction: Correction
    watch: Watch | None = None
    saved_bytes: dict[Hashable, int] = field(default_factory=dict[Hashable, int])


def setting_of(
    subject: Subject,
    device: Device,
    precision: Precision = "fp32",
    layout: Layout | None = None,
    watch: Watch | None = None,
) -> Setting:
    """The setting of a search on `device`, for the computation of one rank of `layout` (`subject`).
    A device that is present is measured, unless it was before.

    Raises any exception that the model or loss raises on fake tensors.
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


def is_enforced(device: Device, limited: bool) -> bool:
    """Whether the budget of `device` is enforced, given whether the user named it (`limited`). Where
    the kernel ends processes that exceed a limit, the memory that it leaves is enforced too."""
    asked = limited or (device.kind == "cpu" and bool(device.limit))
    return asked and device.present and can_enforce(device.kind)


def budget_notices(device: Device, limited: bool) -> Iterator[str]:
    """Notices on the budget, such as that it is not enforced."""
    if limited and device.present and not can_enforce(device.kind):
        yield (
            "This operating system does not enforce a memory limit on a process: the budget is only"
            " planned with."
        )
    free, limit = device.free_bytes, device.limit or "what other processes leave of the machine"
    if limited and free is not None and device.budget_bytes > free:
        yield (
            f"The budget of {format_bytes(device.budget_bytes)} a rank is more than the"
            f" {format_bytes(free)} that are free now ({limit}): where that is used up, the kernel"
            f" refuses memory or ends the process. Give less with {as_setting('memory')}."
        )
    if not limited and device.kind == "cpu" and device.limit:
        yield f"No budget was given: it is most of the memory that {device.limit} leaves free."
