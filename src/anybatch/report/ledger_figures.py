"""The figure of a ledger: bytes over one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from anybatch.report.figures import byte_scale, rounded
from anybatch.report.memory import where
from anybatch.report.plot import Axis, Figure, Mark, Trace
from anybatch.units import format_bytes

if TYPE_CHECKING:
    from anybatch.estimate.ledger import Ledger, Moment

_KIND_COLORS = {  # from the bottom of the figure up: constant, growing, temporary
    "device context": "--grey",
    "libraries": "--ink-2",
    "libraries' workspaces": "--ink-2",
    "parameters": "--blue",
    "buffers": "--blue-faint",
    "weights in half precision": "--sky",
    "gathered weights and gradients": "--sky",
    "optimizer state": "--violet",
    "gradients": "--teal",
    "input batch": "--teal-faint",
    "activations": "--amber",
    "loss and logits": "--rose",
    "temporary": "--moss",
    "kernels' scratch": "--moss-faint",
}
_LEAST_SHOWN = 0.002
"""Kinds that never exceed this fraction of the peak are not drawn."""

_NAME_WIDTH = 0.17
"""Fraction of the figure's width that the name of a phase takes on a narrow screen."""


def over_time(ledger: Ledger, budget: int | None) -> Figure:
    """A figure of the bytes in use over one step, as stacked areas by kind, and the bytes held by the
    process, as a line above them."""
    moments, peak = ledger.curve or (ledger.peak,), ledger.peak
    top = max(moment.num_bytes for moment in moments)
    scale, unit = byte_scale(max(top, 1))
    xs = [moment.number for moment in moments]
    traces: list[Trace] = []
    below = [0] * len(moments)
    for kind, color in _KIND_COLORS.items():
        sizes = [moment.by_kind.get(kind, 0) for moment in moments]
        if max(sizes) > _LEAST_SHOWN * top:
            above = [a + b for a, b in zip(below, sizes, strict=True)]
            edges = [[rounded(size / scale) for size in edge] for edge in (below, above)]
            traces.append(Trace(kind, xs, edges[1], color, "area", edges[0], stairs=True))
            below = above
    held = [rounded(moment.num_bytes / scale) for moment in moments]
    texts = [_hover(moment) for moment in moments]
    traces += [
        Trace("held by the process", xs, held, "--ink", text=texts, width=1.5, stairs=True),
        Trace("most in use", [peak.number], [rounded(peak.used_bytes / scale)], "--ink", "points"),
    ]
    said = (
        f"At most {format_bytes(peak.used_bytes)} in use, at operation {peak.number:,}"
        f" ({where(peak)}), and {format_bytes(top)} held"
    )
    phases = list(_phases(moments))
    marks = [Mark("x", begin, "--grey", dotted=True) for _, begin, _ in phases[1:]]
    near = budget if budget and budget < 4 * top else 0
    if near:
        name = f"budget {format_bytes(near)}"
        marks.append(Mark("y", near / scale, "--red", name))
        said += f"; the red line is the {name}"
    most = 1.06 * max(top, near) / scale
    x_axis = Axis("operations of one step", ticks=_names(phases), grid=False)
    axes = x_axis, Axis(unit, (0, most or 1.0))
    return Figure("curve", "Memory over one step", f"{said}.", traces, *axes, marks, height=460)


def _hover(moment: Moment) -> str:
    largest = sorted(moment.by_kind.items(), key=lambda item: -item[1])[:4]
    lines = [
        where(moment),
        f"{format_bytes(moment.used_bytes)} in use, {format_bytes(moment.num_bytes)} held",
        *(f"{kind} {format_bytes(size)}" for kind, size in largest),
    ]
    return "\n".join(lines)


def _phases(moments: Sequence[Moment]) -> Iterator[tuple[str, int, int]]:
    """(phase, first operation, last operation) of each sequence of moments in one phase."""
    begin = 0
    for place in range(1, len(moments) + 1):
        if place == len(moments) or moments[place].phase != moments[begin].phase:
            end = moments[min(place, len(moments) - 1)].number
            yield moments[begin].phase, moments[begin].number, end
            begin = place


def _names(phases: Sequence[tuple[str, int, int]]) -> list[tuple[float, str]]:
    """(position, name) of the phases, each at its middle. Where names would overlap, only the longest
    phase is named."""
    room = _NAME_WIDTH * (phases[-1][2] - phases[0][1])
    named: list[tuple[float, str]] = []
    for phase, begin, end in sorted(phases, key=lambda it: it[1] - it[2]):
        middle = (begin + end) / 2
        if all(abs(middle - other) >= room for other, _ in named):
            named.append((middle, phase))
    return named
