"""Precisions: those that a search chooses among if it is asked to choose, and what to say where another
would be much faster."""

from __future__ import annotations

from collections.abc import Iterator

from anybatch.machine import Device
from anybatch.planner.setting import Setting
from anybatch.planner.sizes import Sizes
from anybatch.plans import Choice, Precision
from anybatch.units import format_seconds

_WORTH_SAYING = 1.5
"""Times faster that half precision has to be."""


def precisions_of(device: Device) -> tuple[Precision, ...]:
    """What `device` computes in, the most exact first: half precision as autocast, and float16, whose
    loss has to be scaled, only where there is no bfloat16."""
    found: list[Precision] = ["fp32"]
    if device.has("tf32"):
        found.append("tf32")
    if device.has("bf16"):
        found.append("bf16")
    elif device.kind == "cuda":
        found.append("fp16")
    return tuple(found)


def faster_notice(choice: Choice, sizes: Sizes, setting: Setting) -> Iterator[str]:
    """What to say of `choice`, in float32 on a device that is much faster in bfloat16."""
    if choice.precision not in ("fp32", "tf32") or not setting.device.has("bf16"):
        return
    now, half = (
        pace.step(
            choice.micro_batch, choice.recompute, sizes.whole, states_on=choice.optimizer_states
        ).total
        * setting.correction.seconds
        for pace in (setting.pace, setting.pace.in_half())
    )
    if now > _WORTH_SAYING * half:
        yield (
            f"In bf16 a step would take about {format_seconds(half)} on this device instead of"
            f" {format_seconds(now)}, and less memory. Ask for it with --precision bf16 or auto (in"
            " Python, precision=): it rounds differently, so it is never chosen unasked."
        )
