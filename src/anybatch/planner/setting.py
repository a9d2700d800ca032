"""Setting and wishes: what a search is given."""

from __future__ import annotations

from dataclasses import dataclass

from anybatch.estimate.calibration_history import Correction
from anybatch.estimate.seconds import Pace
from anybatch.machine import Device
from anybatch.plans import Precision, Recompute


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user fixed; None leaves it to the search.

    `frontier` asks for ways that cannot win too, so that memory can be drawn against time. `compile` is
    for the blocks of the model; `shapes_vary` tells that samples may differ in shape.
    """

    precision: Precision = "fp32"
    micro_batch: int | None = None
    recompute: Recompute | None = None
    frontier: bool = False
    compile: bool = False
    shapes_vary: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a task runs, as the search needs it.

    Attributes:
        device: one of the devices, all alike.
        num_ranks: how many.
        pace: time of the task on the device.
        mapped: large blocks come as fresh pages; see `Pace`.
        correction: what earlier runs taught.
    """

    device: Device
    num_ranks: int
    pace: Pace
    mapped: bool
    correction: Correction
