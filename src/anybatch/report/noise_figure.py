"""The noise scale over a run, as a figure: a band for what is known of it, beside the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from anybatch.insight.noise import NoiseScale, windows
from anybatch.insight.noise_series import Block
from anybatch.report.figures import Figure, mark, round_numbers, rounded
from anybatch.units import format_count

_ROOM = 1.6  # above what is drawn, and below it


def over_run(blocks: Sequence[Block], batch: int, on_average: str = "") -> Figure | None:
    """The noise scale in windows of a run, with their intervals, and the batch of the run, in samples;
    None where it is not known for any. `on_average`: said after the batch."""
    course = windows(blocks)
    if not course:
        return None
    low, high = _ends(course, batch)
    layout: dict[str, Any] = {
        "xaxis": {"title": "step"},
        "yaxis": {
            "title": "samples (logarithmic)",
            "type": "log",
            "range": [math.log10(low), math.log10(high)],
            **round_numbers(low, high),
        },
        "marks": [mark("y", batch, "--amber", text="batch")],
    }
    traces = [_band(course, low, high), _middles(course)]
    known = [one for one in course if _is_known(one)]
    said = "The band is the interval of 95 %"
    if len(known) < len(course):
        said += "; where it is open above, only the lower end is known"
    said += f". The line is the batch, {format_count(batch)} samples{on_average}."
    spec = {"data": traces, "layout": layout}
    return Figure("noise-scale", "Noise scale", said, spec, 320)


def _is_known(scale: NoiseScale) -> bool:
    return scale.samples is not None and scale.samples > 0 and scale.high is not None


def _ends(course: Sequence[NoiseScale], batch: int) -> tuple[float, float]:
    """Of the axis: all that is known is on it."""
    known = [one for one in course if _is_known(one)]
    shown = [float(batch), *(one.low for one in course), *(one.high or 0.0 for one in known)]
    shown = [value for value in [*shown, *(one.samples or 0.0 for one in known)] if value > 0]
    least = max(min(shown), 1e-3 * max(shown))
    return least / _ROOM, max(shown) * _ROOM


def _band(course: Sequence[NoiseScale], low: float, high: float) -> dict[str, Any]:
    """From the lower ends along the run, and back along the upper ones."""
    xs = [x for one in course for x in (one.first_step, one.last_step)]
    lower = [max(one.low, low) for one in course for _ in range(2)]
    upper = [high if one.high is None else max(one.high, low) for one in course for _ in range(2)]
    return {
        "mode": "lines",
        "fill": "toself",
        "x": [*xs, *reversed(xs)],
        "y": [rounded(y) for y in (*lower, *reversed(upper))],
        "name": "interval of 95 %",
        "line": {"width": 0, "color": "--teal-faint"},
        "fillcolor": "--teal-faint",
        "hover": False,
    }


def _middles(course: Sequence[NoiseScale]) -> dict[str, Any]:
    """A curve with gaps where the noise scale is not known."""
    known = [one if _is_known(one) else None for one in course]
    return {
        "mode": "lines+markers",
        "x": [(one.first_step + one.last_step) // 2 for one in course],
        "y": [None if one is None else rounded(one.samples or 0.0) for one in known],
        "text": ["" if one is None else _told(one) for one in known],
        "name": "noise scale",
        "line": {"width": 2, "color": "--teal"},
        "marker": {"size": 7, "color": "--teal"},
    }


def _told(scale: NoiseScale) -> str:
    return (
        f"steps {scale.first_step:,} to {scale.last_step:,}: {scale.samples:,.3g} samples"
        f" ({scale.low:,.3g} to {scale.high or 0.0:,.3g})"
    )
