"""Setting and wishes: what a search is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anybatch.estimate import Subject
from anybatch.estimate.calibration_history import Correction, correction
from anybatch.estimate.calibration_store import speeds_of
from anybatch.estimate.seconds import Pace
from anybatch.machine import Device
from anybatch.planner.ranks import Layout
from anybatch.plans import Compile, Precision, Recompute

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
    compile: Compile = False
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
