"""Figures of the page, as plain data that `svg` draws and the page's script reads.

A figure's `spec` has `data`, a list of traces, and `layout`. A trace has values `x` and `y` and is a
line, markers, an area or bars. A layout has both axes and `marks`: lines across the plot at one value,
with a label. Colours are names of custom properties of the page's style sheet (`--blue`), so that one
figure serves the light theme and the dark one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anybatch.events import OutOfMemory, Replanned
from anybatch.insight.noise import NoiseScale, windows
from anybatch.insight.noise_series import Block, in_unit_of_batch
from anybatch.plans import Choice, Plan
from anybatch.report.record import Record
from anybatch.report.sentences import format_number
from anybatch.units import format_bytes, format_count, format_seconds

Floats = NDArray[np.floating[Any]]

Trace = dict[str, Any]

KIND_COLORS = ("--blue", "--amber", "--teal", "--rose", "--violet", "--sky", "--moss", "--grey")
MAX_METRICS = 8
MAX_MARKS = 12


@dataclass(frozen=True)
class Figure:
    """A plot: `spec` holds traces and layout, `alt` says in words what it shows."""

    id: str
    title: str
    alt: str
    spec: dict[str, Any]
    height: int = 280


# ----------------------------------------------------------------------------------------- memory


def memory_parts(plan: Plan) -> list[tuple[str, int, str]]:
    """(kind, bytes, colour) at the predicted peak, largest first, adding up to the peak."""
    if plan.prediction is None:
        return []
    sizes = {kind: size for kind, size in plan.prediction.by_kind.items() if size > 0}
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    shown, merged = ordered[: len(KIND_COLORS) - 1], ordered[len(KIND_COLORS) - 1 :]
    rest = sum(size for _, size in merged)
    rest += max(0, plan.prediction.peak_bytes - sum(sizes.values()))
    parts = [(kind, size, KIND_COLORS[i]) for i, (kind, size) in enumerate(shown)]
    if rest:
        parts.append(("other" if shown else "all kinds", rest, KIND_COLORS[-1]))
    return parts


_FAR = 5
"""A budget so many times the larger bar is told in words alone."""


def memory(plan: Plan, measured_bytes: int | None) -> Figure | None:
    """The predicted peak by kind, beside the measured one and the budget."""
    parts = memory_parts(plan)
    if not parts and not measured_bytes:
        return None
    predicted = sum(size for _, size, _ in parts)
    budget, largest = plan.budget_bytes or 0, max(predicted, measured_bytes or 0)
    name = "budget" if plan.enforced else "free"
    is_far = budget > _FAR * largest
    scale, unit = byte_scale(max(largest, 0 if is_far else budget))
    bars = [
        _bar("predicted", size / scale, kind, color, format_bytes(size))
        for kind, size, color in parts
    ]
    said = [f"predicted peak {format_bytes(predicted)}"] if parts else []
    if measured_bytes:
        text = format_bytes(measured_bytes)
        bars.append(_bar("measured", measured_bytes / scale, "measured peak", "--ink-2", text))
        said.append(f"measured peak {text}")
    layout: dict[str, Any] = {
        "barmode": "stack",
        "bargap": 0.35,
        "showlegend": False,
        "xaxis": {"title": unit, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "showgrid": False},
    }
    if budget:
        said.append(f"{name} {format_bytes(budget)}")
    if budget and not is_far:  # else what is used would not be seen beside it
        layout["xaxis"]["range"] = [0, 1.06 * max(largest, budget) / scale]
        text = f"{name} {format_bytes(budget)}"
        layout["marks"] = [mark("x", budget / scale, "--red", text=text, side="right")]
    alt = f"{', '.join(said)}."
    spec = {"data": bars, "layout": layout}
    return Figure("memory", "Memory", alt[0].upper() + alt[1:], spec, 210)


def _bar(row: str, value: float, name: str, color: str, text: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "y": [row],
        "x": [rounded(value)],
        "name": name,
        "color": color,
        "text": [f"{name}: {text}"],
    }


# ----------------------------------------------------------------------------------------- curves


def loss(record: Record) -> Figure | None:
    """Loss of training, raw and smoothed, and of the held-out samples."""
    steps, values = record.column("step"), record.column("loss")
    held_out = [(event.step, event.loss) for event in record.evaluations]
    if not len(steps) and not held_out:
        return None
    smoothed = smooth(values)
    traces: list[Trace] = []
    if np.isfinite(values).any():
        many = len(steps) > 10
        raw = ("--blue-faint", 1) if many else ("--blue", 2)
        traces.append(_line(steps, values, "training, each step", *raw))
        if many:
            traces.append(_line(steps, smoothed, "training, smoothed", "--blue"))
    if held_out:
        traces.append(_points(held_out, "held-out", "--amber"))
    layout = curve_layout("loss", record, steps)
    levels = [*smoothed.tolist(), *(value for _, value in held_out)]
    levels = [value for value in levels if math.isfinite(value)]
    if levels and min(levels) > 0 and max(levels) / min(levels) > 50:
        ticks = _round_numbers(min(levels), max(levels))
        layout["yaxis"] = {"title": "loss (logarithmic)", "type": "log", **ticks}
    said = [_course("Training loss", smoothed)]
    if held_out:
        last = np.array([value for _, value in held_out])
        said.append(_course("Held-out loss", last))
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        said.append(
            f"The loss was not finite in {len(bad):,} of {len(values):,} steps, first in step"
            f" {int(steps[bad[0]]):,}: the curve has gaps there."
        )
    return Figure("loss", "Loss", " ".join(said), {"data": traces, "layout": layout}, 340)


def metrics(record: Record) -> list[Figure]:
    """One figure per metric, for their scales differ."""
    steps = record.column("step")
    figures = []
    for index, name in enumerate(record.metric_names()[:MAX_METRICS]):
        held_out = [(e.step, e.metrics[name]) for e in record.evaluations if name in e.metrics]
        training = record.metric(name)
        traces, said = [], []
        if np.isfinite(training).any():
            training = smooth(training)
            traces.append(_line(steps, training, "training, smoothed", "--blue"))
            said.append(_course(f"Training {name}", training))
        if held_out:
            traces.append(_points(held_out, "held-out", "--amber"))
            values = np.array([value for _, value in held_out])
            said.append(_course(f"Held-out {name}", values))
        layout = curve_layout("", record, steps)
        figures.append(
            Figure(f"metric-{index}", name, " ".join(said), {"data": traces, "layout": layout})
        )
    return figures


WORTH_TELLING = 0.01
"""The part of a step above which waiting for samples is told of."""


def speed(record: Record) -> list[Figure]:
    """Throughput and time of a step, over steps; and how much of it was waiting, if any was."""
    steps, seconds = record.column("step"), record.column("seconds")
    if not len(steps):
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        throughput = np.where(seconds > 0, record.column("samples") / seconds, np.nan)
    scale, unit = _second_scale(_median(seconds))
    each = [
        ("throughput", "Throughput", throughput, "samples/s", "--teal"),
        ("step-time", "Step time", seconds / scale, unit, "--violet"),
    ]
    mean = record.column("samples").sum() / max(1e-12, seconds.sum())
    said = [
        f"{_samples_per_second(mean)} while training.",
        f"Median {format_seconds(_median(seconds))} per step.",
    ]
    waited = record.column("data_seconds").sum() / max(1e-12, seconds.sum())
    if waited > WORTH_TELLING:
        part = 100 * record.column("data_seconds") / seconds
        each.append(("waiting", "Waiting for samples", part, "% of a step", "--moss"))
        said.append(f"{waited:.0%} of the time.")
    return [
        _curve(name, title, record, values, unit, color, alt)
        for (name, title, values, unit, color), alt in zip(each, said, strict=True)
    ]


def optimisation(record: Record) -> list[Figure]:
    """Learning rate, and the norm of the gradient where it was taken."""
    figures = []
    if record.num_steps:
        rate = record.column("learning_rate")
        layout = curve_layout("", record, record.column("step"), marks=False)
        layout["yaxis"]["rangemode"] = "tozero"
        trace = _line(record.column("step"), rate, "learning rate", "--rose")
        alt = f"From {rate[0]:.3g} to {rate[-1]:.3g}, at most {rate.max():.3g}."
        spec = {"data": [trace], "layout": {**layout, "showlegend": False}}
        figures.append(Figure("learning-rate", "Learning rate", alt, spec))
    norm = record.column("grad_norm")
    if np.isfinite(norm).any():
        title = "Gradient norm before clipping"
        alt = _course("Gradient norm", smooth(norm))
        figures.append(_curve("grad-norm", title, record, norm, "", "--moss", alt))
    return figures


def _curve(
    name: str, title: str, record: Record, values: Floats, unit: str, color: str, alt: str
) -> Figure:
    """A curve of training: each step, and smoothed."""
    steps = record.column("step")
    if len(steps) > 10:
        # The first step warms caches up, and is not like the others.
        smoothed = smooth(np.concatenate([[np.nan], values[1:]]))
        traces = [
            _line(steps, values, "each step", f"{color}-faint", width=1),
            _line(steps, smoothed, "smoothed", color),
        ]
    else:
        traces = [_line(steps, values, "each step", color)]
    layout = curve_layout(unit, record, steps)
    layout["yaxis"]["rangemode"] = "tozero"
    if len(steps) > 20:
        # One slow first step must not press the rest of the curve flat.
        finite = values[np.isfinite(values)]
        top = 1.3 * float(np.quantile(finite, 0.98)) if len(finite) else 0.0
        if top > 0 and float(finite.max()) > 2 * top:
            layout["yaxis"]["range"] = [0, rounded(top)]
    spec = {"data": traces, "layout": {**layout, "showlegend": False}}
    return Figure(name, title, alt, spec)


def curve_layout(y_title: str, record: Record, steps: Floats, marks: bool = True) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "xaxis": {"title": "step"},
        "yaxis": {"title": y_title},
    }
    if len(steps) == 1:
        layout["xaxis"] |= {"range": [steps[0] - 1, steps[0] + 1], "tickvals": [steps[0]]}
    if marks:
        layout["marks"] = _marks(record)
    return layout


def _marks(record: Record) -> list[Trace]:
    """Where the plan changed, or memory ran out with no new plan."""
    found: dict[int, dict[str, Any]] = {}
    for event in record.others:
        if isinstance(event, OutOfMemory):
            found[event.step] = mark("x", event.step, "--red", "dot", text="out of memory")
        elif isinstance(event, Replanned):
            found[event.step] = mark("x", event.step, "--ink-2", "dot", text="new plan")
    return list(found.values())[:MAX_MARKS]


def _line(xs: Floats, ys: Floats, name: str, color: str, width: float = 2) -> dict[str, Any]:
    xs, ys = thin(xs, ys)
    return {
        "mode": "lines" if len(xs) > 1 else "markers",
        "x": [int(x) for x in xs],
        "y": [rounded(y) for y in ys],
        "name": name,
        "line": {"width": width, "color": color},
        "marker": {"size": 8, "color": color},
    }


def _points(points: Sequence[tuple[int, float]], name: str, color: str) -> dict[str, Any]:
    xs, ys = (np.array(part, dtype=np.float64) for part in zip(*points, strict=True))
    line = _line(xs, ys, name, color)
    mode = "lines+markers" if len(points) <= 60 else "lines"
    return {**line, "mode": mode, "marker": {"size": 7, "color": color}}


# ------------------------------------------------------------------------------------- candidates


def candidates(plan: Plan) -> Figure | None:
    """What was weighed: memory against time of a step, the plan that was taken marked."""
    weighed = [
        (c.choice, c.peak_bytes, c.step_seconds, c.reason)
        for c in plan.rejected
        if c.possible and c.peak_bytes is not None
    ]
    if not weighed:
        return None
    chosen, budget, taken = plan.prediction, plan.budget_bytes, []
    if chosen is not None:
        # Peaks of the others are those of training alone.
        own = [p.peak_bytes for p in plan.frontier if plan.choice.trains_like(p.choice)]
        peak = own[0] if own and not chosen.rehearsed else chosen.peak_bytes
        taken = [(plan.choice, peak, chosen.step_seconds, "the plan")]
    peaks = [one[1] for one in weighed + taken]
    times = [one[2] for one in weighed + taken]
    per_byte, byte_unit = byte_scale(max(peaks))
    per_second, second_unit = _second_scale(max(times))

    def dots(name: str, points: list[tuple[Choice, int, float, str]], **marker: Any) -> Trace:
        return {
            "mode": "markers",
            "name": name,
            "x": [rounded(peak / per_byte) for _, peak, _, _ in points],
            "y": [rounded(seconds / per_second) for _, _, seconds, _ in points],
            "text": [
                f"{choice.describe()}\n{format_bytes(peak)}, {format_seconds(seconds)} per step\n{why}"
                for choice, peak, seconds, why in points
            ],
            "marker": {"size": 9, "opacity": 0.8, **marker},
        }

    over = [one for one in weighed if budget is not None and one[1] > budget]
    fits = [one for one in weighed if budget is None or one[1] <= budget]
    x_axis = _range_axis(
        f"predicted peak, {byte_unit}", [size / per_byte for size in (*peaks, budget) if size]
    )
    y_axis = _range_axis(f"predicted step, {second_unit}", [time / per_second for time in times])
    traces: list[Trace] = []
    alt = f"{len(weighed):,} candidates not taken, {len(over):,} of them over the budget."
    if len(plan.frontier) > 1:
        style = {"width": 1.5, "color": "--teal", "shape": "hv", "dash": "dot"}
        xs = [rounded(point.peak_bytes / per_byte) for point in plan.frontier]
        ys = [rounded(point.step_seconds / per_second) for point in plan.frontier]
        line = {"mode": "lines", "name": "frontier", "x": xs, "y": ys, "line": style}
        traces.append({**line, "hover": False})
        alt += f" The line joins the {len(plan.frontier)} that no other beats in both."
    if fits:
        traces.append(dots("fits, not taken", fits, color="--blue"))
    if over:
        traces.append(dots("more than the budget", over, color="--red", symbol="x"))
    if taken:
        edge = {"width": 2, "color": "--ink"}
        star = {"color": "--amber", "symbol": "diamond", "size": 15, "opacity": 1, "line": edge}
        traces.append(dots("the plan", taken, **star))
    layout: dict[str, Any] = {"xaxis": x_axis, "yaxis": y_axis}
    if budget:
        layout["marks"] = [mark("x", budget / per_byte, "--red", text="budget", side="right")]
    return Figure("candidates", "Candidates", alt, {"data": traces, "layout": layout}, 360)


def _range_axis(title: str, values: list[float]) -> dict[str, Any]:
    """An axis with room around `values`, logarithmic where they span decades."""
    if min(values) <= 0 or max(values) / min(values) < 20:
        return {"title": title, "range": [0.0, 1.08 * max(values) or 1.0]}
    return _logarithmic(title, min(values) / 1.3, max(values) * 1.3)


def _logarithmic(title: str, low: float, high: float) -> dict[str, Any]:
    ends = [math.log10(low), math.log10(high)]
    return {"title": title, "type": "log", "range": ends, **_round_numbers(low, high)}


def _round_numbers(low: float, high: float) -> dict[str, Any]:
    """Ticks at 1, 2 and 5 times the powers of ten; fewer where they would crowd."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(powers) <= 4 else (1,)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
    shown = [tick for tick in ticks if low <= tick <= high]
    return {"tickvals": shown, "ticktext": [f"{tick:,.6g}" for tick in shown]}


# ---------------------------------------------------------------------------------------- the noise


def noise_scale(blocks: Sequence[Block], batch: int, on_average: str = "") -> Figure | None:
    """The noise scale in windows of a run, with their intervals, and the batch of the run, in samples
    or tokens; None where it is not known for any. `on_average`: said after the batch."""
    blocks, unit = in_unit_of_batch(blocks)
    course = windows(blocks)
    if not course:
        return None
    known = [one if one.samples and one.samples > 0 and one.high else None for one in course]
    of_known = [value for one in known if one for value in (one.samples or 0.0, one.high or 0.0)]
    shown = [value for value in (batch, *(one.low for one in course), *of_known) if value > 0]
    low, high = max(min(shown), 1e-3 * max(shown)) / 1.6, max(shown) * 1.6
    # From the lower ends along the run, and back along the upper ones.
    xs = [x for one in course for x in (one.first_step, one.last_step)]
    lower = [max(one.low, low) for one in course for _ in range(2)]
    upper = [high if one.high is None else max(one.high, low) for one in course for _ in range(2)]
    band: Trace = {
        "mode": "lines",
        "fill": "toself",
        "x": [*xs, *reversed(xs)],
        "y": [rounded(y) for y in (*lower, *reversed(upper))],
        "name": "interval of 95 %",
        "line": {"width": 0, "color": "--teal-faint"},
        "fillcolor": "--teal-faint",
        "hover": False,
    }
    middles: Trace = {
        "mode": "lines+markers",
        "x": [(one.first_step + one.last_step) // 2 for one in course],
        "y": [None if one is None else rounded(one.samples or 0.0) for one in known],
        "text": ["" if one is None else _interval(one, unit) for one in known],
        "name": "noise scale",
        "line": {"width": 2, "color": "--teal"},
        "marker": {"size": 7, "color": "--teal"},
    }
    alt = "The band is the interval of 95 %"
    if None in known:
        alt += "; where it is open above, only the lower end is known"
    alt += f". The line is the batch, {format_count(batch)} {unit}{on_average}."
    layout = {
        "xaxis": {"title": "step"},
        "yaxis": _logarithmic(f"{unit} (logarithmic)", low, high),
        "marks": [mark("y", batch, "--amber", text="batch")],
    }
    spec = {"data": [band, middles], "layout": layout}
    return Figure("noise-scale", "Noise scale", alt, spec, 320)


def _interval(scale: NoiseScale, unit: str) -> str:
    return (
        f"steps {scale.first_step:,} to {scale.last_step:,}: {scale.samples:,.3g} {unit}"
        f" ({scale.low:,.3g} to {scale.high or 0.0:,.3g})"
    )


# ------------------------------------------------------------------------------------------ parts


def mark(
    axis: str,
    value: float,
    color: str,
    dash: str = "",
    width: float = 1.5,
    text: str = "",
    side: str = "left",
) -> dict[str, Any]:
    """A line across the plot where the `axis` has `value`, and its label, which begins (`"left"`) or
    ends there."""
    style = {"color": color, "width": width, "dash": dash}
    return {"axis": axis, "value": value, "text": text, "side": side, **style}


def _course(what: str, values: Floats) -> str:
    """Where a curve begins and ends, for those who do not see it."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return f"{what} was never finite."
    if len(finite) == 1 or finite[0] == finite[-1]:
        return f"{what}: {format_number(finite[-1])}."
    return f"{what} from {format_number(finite[0])} to {format_number(finite[-1])}."


def _median(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else 0.0


def _samples_per_second(value: float) -> str:
    return f"{value:,.0f} samples/s" if value >= 100 else f"{value:.3g} samples/s"


def byte_scale(largest: float) -> tuple[float, str]:
    """What to divide by so that `largest` is read easily, and the unit that it is in then."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return float(1024**power), unit
    return 1.0, "bytes"


def _second_scale(largest: float) -> tuple[float, str]:
    for scale, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if largest >= 2 * scale or (unit == "s" and largest >= 1):
            return scale, unit
    return 1e-6, "µs"


def rounded(value: float) -> float | None:
    """Six digits are more than a screen shows; JSON knows no other numbers than finite ones."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


# ----------------------------------------------------------------------- curves, fit to be looked at

MAX_POINTS = 2000
"""More points than a screen has columns only make a page slow."""


def smooth(values: Floats) -> Floats:
    """Exponentially weighted mean of the values so far, over about a thirtieth of the curve.

    Values that are not finite are left out of the mean and stay gaps. The weights are corrected for
    the beginning (Kingma and Ba 2015, section 3), so the first mean is the first value.
    """
    rate = 2.0 / (max(1.0, len(values) / 30) + 1.0)
    means = np.full(len(values), np.nan)
    total = weight = 0.0
    for index, value in enumerate(values.tolist()):
        if math.isfinite(value):
            total += rate * (value - total)
            weight += rate * (1.0 - weight)
            means[index] = total / weight
    return means


def thin(xs: Floats, ys: Floats, limit: int = MAX_POINTS) -> tuple[Floats, Floats]:
    """At most `limit` points of the curve: the first, the last, and of each stretch in between the
    least and the greatest; where a stretch has values that are not finite, one of them."""
    if len(xs) <= limit:
        return xs, ys
    edges = np.linspace(1, len(xs) - 1, (limit - 2) // 2 + 1).astype(int)
    kept = [0]
    for begin, end in pairwise(edges):
        kept.extend(sorted(begin + offset for offset in _extremes(ys[begin:end])))
    kept.append(len(xs) - 1)
    return xs[kept], ys[kept]


def _extremes(values: Floats) -> set[int]:
    finite = np.isfinite(values)
    if finite.all():
        return {int(values.argmin()), int(values.argmax())}
    gap = int(np.flatnonzero(~finite)[0])
    return {gap, int(np.nanargmax(np.where(finite, values, np.nan)))} if finite.any() else {gap}
