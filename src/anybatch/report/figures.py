"""Figures for the HTML pages of runs and plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from anybatch.events import OutOfMemory, Replanned
from anybatch.insight.noise import NoiseScale, windows
from anybatch.insight.noise_series import Block, in_unit_of_batch
from anybatch.plans import Choice, Plan
from anybatch.report.plot import Axis, Figure, Mark, Shape, Trace
from anybatch.report.record import Record
from anybatch.report.sentences import format_number, format_speed
from anybatch.units import format_bytes, format_count, format_seconds

Floats = NDArray[np.floating[Any]]

KIND_COLORS = ("--blue", "--amber", "--teal", "--rose", "--violet", "--sky", "--moss", "--grey")
MAX_METRICS = 8
MAX_MARKS = 12

# ----------------------------------------------------------------------------------------- memory


def memory_parts(plan: Plan) -> list[tuple[str, int]]:
    """(kind, bytes) at the predicted peak, largest first. The bytes add up to the peak."""
    if plan.prediction is None:
        return []
    sizes = {kind: size for kind, size in plan.prediction.by_kind.items() if size > 0}
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    shown = ordered[: len(KIND_COLORS) - 1]
    rest = max(sum(sizes.values()), plan.prediction.peak_bytes) - sum(size for _, size in shown)
    return [*shown, ("other" if shown else "all kinds", rest)] if rest else shown


def memory(plan: Plan, measured_bytes: int | None, replanned: bool = False) -> list[Figure]:
    """A figure of the predicted peak by kind, the measured peak, and the budget. `replanned`: whether
    the run replaced the plan, so that the measured peak includes steps under another one."""
    parts = memory_parts(plan)
    if not parts and not measured_bytes:
        return []
    budget = plan.budget_bytes or 0
    name = f"{'budget' if plan.enforced else 'free'} {format_bytes(budget)}"
    predicted = sum(size for _, size in parts)
    largest = max(predicted, measured_bytes or 0)
    is_shown = 0 < budget <= 5 * largest  # a larger budget would make the bars invisible
    most = max(largest, budget) if is_shown else largest
    scale, unit = byte_scale(most)
    traces: list[Trace] = []
    rows: list[str] = []
    said: list[str] = []
    if parts:
        rows.append("first plan" if replanned else "predicted")
        of_plan = " of the first plan" if replanned else ""
        said.append(f"predicted peak{of_plan} {format_bytes(predicted)}")
        end = 0
        for (kind, size), color in zip(parts, KIND_COLORS, strict=False):
            traces.append(_bar(kind, 0, end / scale, (end + size) / scale, size, color))
            end += size
    if measured_bytes:
        end = measured_bytes / scale
        traces.append(_bar("measured peak", len(rows), 0, end, measured_bytes, "--ink-2"))
        rows.append("measured")
        said.append(f"measured peak {format_bytes(measured_bytes)}")
    alt = ", ".join([*said, name] if budget else said)
    figure = Figure(
        *("memory", "Memory", f"{alt[0].upper()}{alt[1:]}.", traces),
        x=Axis(unit, (0, 1.06 * most / scale)),
        y=Axis(range=(len(rows) - 0.5, -0.5), ticks=list(enumerate(rows)), grid=False),
        marks=[Mark("x", budget / scale, "--red", name)] if is_shown else [],
        height=210,
    )
    return [figure]


def _bar(name: str, row: int, begin: float, end: float, num_bytes: int, color: str) -> Trace:
    text = [f"{name}: {format_bytes(num_bytes)}"]
    return Trace(name, [rounded(end)], [row], color, "bars", [rounded(begin)], text)


# ----------------------------------------------------------------------------------------- curves


def loss(record: Record) -> list[Figure]:
    """A figure of the training loss, raw and smoothed, and the held-out loss."""
    values = record.column("loss")
    held_out = [(event.step, event.loss) for event in record.evaluations]
    if not len(values) and not held_out:
        return []
    traces, said = _scored("loss", record, values, held_out)
    levels = [y for trace in traces for y in trace.y if y is not None]
    steps = record.column("step")
    if len(steps) > _UNSMOOTHED:
        traces.insert(0, _line(steps, values, "training, each step", "--blue-faint", 1))
    spans_decades = bool(levels) and min(levels) > 0 and max(levels) / min(levels) > 50
    y_axis = Axis("loss (logarithmic)", is_log=True) if spans_decades else Axis("loss")
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        said.append(
            f"The loss was not finite in {len(bad):,} of {len(values):,} steps, first in step"
            f" {int(steps[bad[0]]):,}: the curve has gaps there."
        )
    return [_over_steps(record, "loss", "Loss", said, traces, y_axis, height=340)]


def metrics(record: Record) -> list[Figure]:
    """One figure per metric, since their scales differ."""
    figures = []
    for index, name in enumerate(record.metric_names()[:MAX_METRICS]):
        held_out = [(e.step, e.metrics[name]) for e in record.evaluations if name in e.metrics]
        traces, said = _scored(name, record, record.metric(name), held_out)
        figures.append(_over_steps(record, f"metric-{index}", name, said, traces))
    return figures


def _scored(
    name: str, record: Record, values: Floats, held_out: Sequence[tuple[int, float]]
) -> tuple[list[Trace], list[str]]:
    """Curves, and sentences about them, of a loss or metric in training and on held-out samples."""
    traces: list[Trace] = []
    said: list[str] = []
    if len(values) and (name == "loss" or np.isfinite(values).any()):
        smoothed = smooth(values)
        label = "training, smoothed" if len(values) > _UNSMOOTHED else "training, each step"
        traces.append(_line(record.column("step"), smoothed, label, "--blue"))
        said.append(_course(f"Training {name}", smoothed))
    if held_out:
        steps, scores = (np.array(each, dtype=np.float64) for each in zip(*held_out, strict=True))
        trace = _line(steps, scores, "held-out", "--amber")
        few = trace.kind == "line" and len(trace.x) <= 60
        traces.append(replace(trace, kind="line and points") if few else trace)
        said.append(_course(f"Held-out {name}", scores))
    return traces, said


WORTH_TELLING = 0.01
"""Fraction of a step above which the time spent waiting for samples is reported."""


def speed(record: Record) -> list[Figure]:
    """Figures of throughput and step time over steps, and of the fraction spent waiting for samples if
    it exceeds `WORTH_TELLING`."""
    seconds, samples = record.column("seconds"), record.column("samples")
    if not len(seconds):
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        throughput = np.where(seconds > 0, samples / seconds, np.nan)
        waiting = 100 * record.column("data_seconds") / seconds
    total = max(1e-12, seconds.sum())
    finite = seconds[np.isfinite(seconds)]
    median = float(np.median(finite)) if len(finite) else 0.0
    scale, unit = _second_scale(median)
    mean = f"{format_speed(samples.sum() / total)} samples/s while training."
    step = f"Median {format_seconds(median)} per step."
    figures = [
        _curve("throughput", "Throughput", record, throughput, "samples/s", "--teal", mean),
        _curve("step-time", "Step time", record, seconds / scale, unit, "--violet", step),
    ]
    waited = record.column("data_seconds").sum() / total
    if waited > WORTH_TELLING:
        title, unit, said = "Waiting for samples", "% of a step", f"{waited:.0%} of the time."
        figures.append(_curve("waiting", title, record, waiting, unit, "--moss", said))
    return figures


def optimisation(record: Record) -> list[Figure]:
    """Figures of the learning rate, and of the gradient norm if it was measured."""
    figures = []
    if record.num_steps:
        rate = record.column("learning_rate")
        traces = [_line(record.column("step"), rate, "learning rate", "--rose")]
        alt = f"From {rate[0]:.3g} to {rate[-1]:.3g}, at most {rate.max():.3g}."
        y_axis = Axis(from_zero=True)
        figures.append(_over_steps(record, "learning-rate", "Learning rate", [alt], traces, y_axis))
    norm = record.column("grad_norm")
    if np.isfinite(norm).any():
        title = "Gradient norm before clipping"
        alt = _course("Gradient norm", smooth(norm))
        figures.append(_curve("grad-norm", title, record, norm, "", "--moss", alt))
    return figures


def _curve(
    name: str, title: str, record: Record, values: Floats, unit: str, color: str, alt: str
) -> Figure:
    """A figure of one value per training step, and its smoothed curve."""
    steps, top = record.column("step"), None
    if len(steps) > 10:
        # The first step warms up caches and is not representative.
        smoothed = smooth(np.concatenate([[np.nan], values[1:]]))
        traces = [
            _line(steps, values, "each step", f"{color}-faint", width=1),
            _line(steps, smoothed, "smoothed", color),
        ]
    else:
        traces = [_line(steps, values, "each step", color)]
    finite = values[np.isfinite(values)]
    if len(steps) > 20 and len(finite):
        # A slow first step must not flatten the rest of the curve.
        top = rounded(1.3 * float(np.quantile(finite, 0.98)))
        top = top if top and float(finite.max()) > 2 * top else None
    y_axis = Axis(unit, (0, top) if top else None, from_zero=True)
    return _over_steps(record, name, title, [alt], traces, y_axis, legend=False)


def _over_steps(
    record: Record,
    name: str,
    title: str,
    said: Sequence[str],
    traces: Sequence[Trace],
    y_axis: Axis | None = None,
    height: float = 280,
    legend: bool = True,
) -> Figure:
    """A figure over the steps of a run, with marks where the plan changed or memory ran out."""
    found: dict[int, Mark] = {}
    for event in record.others:
        if isinstance(event, OutOfMemory):
            found[event.step] = Mark("x", event.step, "--red", "out of memory", dotted=True)
        elif isinstance(event, Replanned):
            found[event.step] = Mark("x", event.step, "--ink-2", "new plan", dotted=True)
    x_axis = Axis("step")
    if record.num_steps == 1:
        only = int(record.column("step")[0])
        x_axis = Axis("step", (only - 1, only + 1), [(only, f"{only:,}")])
    marks = list(found.values())[:MAX_MARKS]
    axes = x_axis, y_axis or Axis()
    return Figure(name, title, " ".join(said), traces, *axes, marks, height, legend)


def _line(xs: Floats, ys: Floats, name: str, color: str, width: float = 2) -> Trace:
    xs, ys = thin(xs, ys)
    kind: Literal["line", "points"] = "line" if len(xs) > 1 else "points"
    return Trace(name, [int(x) for x in xs], [rounded(y) for y in ys], color, kind, width=width)


# ------------------------------------------------------------------------------------- candidates

_Weighed = tuple[Choice, int, float, str]  # peak, seconds, reason


def candidates(plan: Plan) -> list[Figure]:
    """A scatter plot of the candidates: peak memory against step time. The selected plan is marked."""
    weighed: list[_Weighed] = [
        (c.choice, c.peak_bytes, c.step_seconds, c.reason)
        for c in plan.rejected
        if c.possible and c.peak_bytes is not None
    ]
    if not weighed:
        return []
    chosen, budget = plan.prediction, plan.budget_bytes
    taken: list[_Weighed] = []
    if chosen is not None:
        # Peaks of the other candidates are of training alone.
        own = [p.peak_bytes for p in plan.frontier if plan.choice.trains_like(p.choice)]
        peak = own[0] if own and not chosen.rehearsed else chosen.peak_bytes
        taken = [(plan.choice, peak, chosen.step_seconds, "the plan")]
    peaks, times = [one[1] for one in weighed + taken], [one[2] for one in weighed + taken]
    per_byte, byte_unit = byte_scale(max(peaks))
    per_second, second_unit = _second_scale(max(times))
    room = None if budget is None else budget - plan.reserve_bytes
    over = [one for one in weighed if room is not None and one[1] > room]
    fits = [one for one in weighed if room is None or one[1] <= room]
    traces: list[Trace] = []
    alt = f"{len(weighed):,} {'candidate' if len(weighed) == 1 else 'candidates'} not taken,"
    if room is not None:
        alt += f" {len(over):,} over the {format_bytes(room)} planned for."
    else:
        alt = alt.rstrip(",") + "."
    if len(plan.frontier) > 1:
        xs = [rounded(point.peak_bytes / per_byte) for point in plan.frontier]
        ys = [rounded(point.step_seconds / per_second) for point in plan.frontier]
        traces.append(Trace("frontier", xs, ys, "--teal", width=1.5, stairs=True, dotted=True))
        alt += f" The line joins the {len(plan.frontier)} that no other beats in both."
    groups: tuple[tuple[list[_Weighed], str, str, Shape], ...] = (
        (fits, "fits, not taken", "--blue", "dot"),
        (over, "more than is planned for", "--red", "cross"),
        (taken, "the plan", "--amber", "diamond"),
    )
    for points, name, color, shape in groups:
        if points:
            texts = [
                f"{choice.describe()}\n{format_bytes(peak)}, {format_seconds(seconds)} per step\n{why}"
                for choice, peak, seconds, why in points
            ]
            xs = [rounded(peak / per_byte) for _, peak, _, _ in points]
            ys = [rounded(seconds / per_second) for _, _, seconds, _ in points]
            traces.append(Trace(name, xs, ys, color, "points", text=texts, shape=shape))
    sizes = [size / per_byte for size in (*peaks, budget) if size]
    figure = Figure(
        *("candidates", "Candidates", alt, traces),
        x=_range_axis(f"predicted peak, {byte_unit}", sizes),
        y=_range_axis(f"predicted step, {second_unit}", [time / per_second for time in times]),
        marks=[Mark("x", budget / per_byte, "--red", "budget")] if budget else [],
        height=360,
    )
    return [figure]


def _range_axis(title: str, values: list[float]) -> Axis:
    """An axis with a margin around `values`, logarithmic if they span decades."""
    low, high = min(values), max(values)
    if low <= 0 or high / low < 20:
        return Axis(title, (0.0, 1.08 * high or 1.0))
    return Axis(title, (low / 1.3, high * 1.3), is_log=True)


# ---------------------------------------------------------------------------------------- the noise


def noise_scale(blocks: Sequence[Block], batch: int, on_average: str = "") -> list[Figure]:
    """A figure of the noise scale in windows of a run, with confidence intervals, and the run's batch,
    in samples or tokens; none if no window has an estimate. `on_average` is appended to the batch in
    the description."""
    blocks, unit = in_unit_of_batch(blocks)
    course = windows(blocks)
    if not course:
        return []
    known = [one if one.samples and one.samples > 0 and one.high else None for one in course]
    of_known = [value for one in known if one for value in (one.samples or 0.0, one.high or 0.0)]
    shown = [value for value in (batch, *(one.low for one in course), *of_known) if value > 0]
    low, high = max(min(shown), 1e-3 * max(shown)) / 1.6, max(shown) * 1.6
    band = Trace(
        "interval of 95 %",
        x=[x for one in course for x in (one.first_step, one.last_step)],
        y=[rounded(min(max(one.high or high, low), high)) for one in course for _ in range(2)],
        color="--teal-faint",
        kind="area",
        low=[rounded(max(one.low, low)) for one in course for _ in range(2)],
    )
    middles = Trace(
        "noise scale",
        x=[(one.first_step + one.last_step) // 2 for one in course],
        y=[None if one is None else rounded(one.samples or 0.0) for one in known],
        color="--teal",
        kind="line and points",
        text=["" if one is None else _interval(one, unit) for one in known],
    )
    alt = "The band is the interval of 95 %"
    if None in known:
        alt += "; where it is open above, only the lower end is known"
    alt += f". The line is the batch, {format_count(batch)} {unit}{on_average}."
    figure = Figure(
        *("noise-scale", "Noise scale", alt, [band, middles]),
        x=Axis("step"),
        y=Axis(f"{unit} (logarithmic)", (low, high), is_log=True),
        marks=[Mark("y", batch, "--amber", "batch")],
        height=320,
    )
    return [figure]


def _interval(scale: NoiseScale, unit: str) -> str:
    return (
        f"steps {scale.first_step:,} to {scale.last_step:,}: {scale.samples:,.3g} {unit}"
        f" ({scale.low:,.3g} to {scale.high or 0.0:,.3g})"
    )


# ------------------------------------------------------------------------------------------ parts


def _course(what: str, values: Floats) -> str:
    """A sentence with the first and last finite value of a curve, as alternative text."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return f"{what} was never finite."
    if len(finite) == 1 or finite[0] == finite[-1]:
        return f"{what}: {format_number(finite[-1])}."
    return f"{what} from {format_number(finite[0])} to {format_number(finite[-1])}."


def byte_scale(largest: float) -> tuple[float, str]:
    """A divisor that makes `largest` easy to read, and the resulting unit."""
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
    """`value` with six significant digits, more than a screen shows. None if it is not finite, since
    JSON has only finite numbers."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


# ----------------------------------------------------------------------- curves, fit to be looked at

MAX_POINTS = 1000
"""Maximum number of points of a curve. More points than a screen has columns only slow down a page."""


_UNSMOOTHED = 30
"""Number of values up to which `smooth` leaves a curve as it is."""


def smooth(values: Floats) -> Floats:
    """Exponential moving average of `values`, over about a thirtieth of the curve.

    Non-finite values are excluded from the mean and remain gaps. The mean is corrected for its
    initialization bias (Kingma and Ba 2015, section 3), so the first mean is the first value.
    """
    rate = 2.0 / (max(1.0, len(values) / _UNSMOOTHED) + 1.0)
    means = np.full(len(values), np.nan)
    total = weight = 0.0
    for index, value in enumerate(values.tolist()):
        if math.isfinite(value):
            total += rate * (value - total)
            weight += rate * (1.0 - weight)
            means[index] = total / weight
    return means


def thin(xs: Floats, ys: Floats, limit: int = MAX_POINTS) -> tuple[Floats, Floats]:
    """Downsample a curve to at most `limit` points: the first, the last, and the minimum and maximum of
    each interval between them. If an interval has non-finite values, one of them replaces the
    minimum."""
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
