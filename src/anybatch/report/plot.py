"""Plots as plain data, drawn as inline SVG, which every browser shows without a library: a page is a
few dozen kilobytes, and keeps working offline for years.

A figure has traces (lines, points, areas, horizontal bars), two axes, and marks: lines across the plot
at one value. Colors are names of custom properties of the page's style sheet (`--blue`), so that one
figure works in both the light and the dark theme.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

WIDE, NARROW = 760, 440
"""Widths of a figure in its own units; a line of text is 18 units high. The page scales the drawings,
and shows the one whose text is readable."""

_CHARACTER, _LINE = 6.6, 18.0  # average width of a character, and height of a line
_TOP, _RIGHT = 14.0, 14.0
_ABOVE = 20.0  # height of labels above the plot
_THIN = 3.0  # bars up to this width have no edge, which would hide them

Values: TypeAlias = Sequence[float | None]
"""None is a gap."""

Shape: TypeAlias = Literal["dot", "cross", "diamond"]


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        range: values at both ends; None: the range of the data with a margin, or from zero.
        ticks: (value, name) of each tick; None: at round values.
        grid: whether grid lines are drawn at the ticks.
    """

    title: str = ""
    range: tuple[float, float] | None = None
    ticks: Sequence[tuple[float, str]] | None = None
    is_log: bool = False
    from_zero: bool = False
    grid: bool = True


@dataclass(frozen=True)
class Trace:
    """Values drawn in one color.

    Attributes:
        kind: an area extends from `low` to `y`; bars are in the rows `y`, from `low` to `x`.
        text: text of each value, shown when the pointer is over it.
        stairs: whether consecutive values are joined by a horizontal line, then a vertical one.
    """

    name: str
    x: Values
    y: Values
    color: str
    kind: Literal["line", "points", "line and points", "area", "bars"] = "line"
    low: Values = ()
    text: Sequence[str] = ()
    width: float = 2
    shape: Shape = "dot"
    stairs: bool = False
    dotted: bool = False


@dataclass(frozen=True)
class Mark:
    """A line across the plot at `value` of an axis, with a label."""

    axis: Literal["x", "y"]
    value: float
    color: str
    text: str = ""
    dotted: bool = False


@dataclass(frozen=True)
class Figure:
    """A plot. `alt` describes its content in words."""

    id: str
    title: str
    alt: str
    traces: Sequence[Trace]
    x: Axis
    y: Axis
    marks: Sequence[Mark] = ()
    height: float = 280
    legend: bool = True


def draw(figure: Figure) -> str:
    """Draw the figure as two SVG elements, for wide and narrow screens, and a legend, whose text has
    the size of the page's text."""
    return svg(figure, WIDE) + svg(figure, NARROW) + _legend(figure)


def svg(figure: Figure, width: float = WIDE) -> str:
    """Draw the figure as an SVG element."""
    return _Drawing(figure, width).element()


def _legend(figure: Figure) -> str:
    if not figure.legend or len(figure.traces) < 2:
        return ""
    items: list[str] = []
    for trace in figure.traces:
        lines = "line" if trace.kind.startswith("line") else "area"
        shape = trace.shape if trace.kind == "points" else lines
        style = f'class="{shape}" style="color:var({trace.color})"'
        items.append(f"<li><i {style}></i>{_escaped(trace.name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


# ------------------------------------------------------------------------------------- the drawing


@final
class _Scale:
    """Positions of values between the ends of an axis, and of its ticks."""

    def __init__(self, axis: Axis, values: Values) -> None:
        self.axis = axis
        places = [
            place for value in axis.range or values if (place := self._place(value)) is not None
        ]
        if axis.range:
            self.low, self.high = places
        else:
            low, high = min(places, default=0.0), max(places, default=1.0)
            room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
            self.low = 0.0 if axis.from_zero and low >= 0 else low - room
            self.high = high + room
        ticks = axis.ticks
        if ticks is None:
            round_values = _round_powers if axis.is_log else _round_values
            ticks = [(value, f"{value:,.6g}") for value in round_values(self.low, self.high)]
        parts = [(self.part(value), name) for value, name in ticks]
        self.ticks = [(part, name) for part, name in parts if part is not None and 0 <= part <= 1]

    def part(self, value: float | None) -> float | None:
        """The position of `value`: 0 at the first end, 1 at the second. None for a gap, and on a
        logarithmic axis for values that are not positive."""
        place = self._place(value)
        return None if place is None else (place - self.low) / (self.high - self.low)

    def _place(self, value: float | None) -> float | None:
        if value is None or (self.axis.is_log and value <= 0):
            return None
        return math.log10(value) if self.axis.is_log else float(value)


def _round_values(low: float, high: float, most: int = 7) -> list[float]:
    """Round values between `low` and `high`, 1, 2 or 5 times a power of ten apart."""
    low, high = min(low, high), max(low, high)
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _round_powers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten between two logarithms; only the powers of ten if there are
    more than four."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    return [
        float(f"{digit}e{power}")
        for power in powers
        for digit in ((1, 2, 5) if len(powers) <= 4 else (1,))
    ]


_Point: TypeAlias = tuple[float, float]


@final
class _Drawing:
    """The drawing of one figure. y increases downward, as in SVG."""

    def __init__(self, figure: Figure, width: float) -> None:
        self._figure, self._width = figure, width
        xs: list[float | None] = []
        ys: list[float | None] = []
        for trace in figure.traces:
            xs += [*trace.x, *(trace.low if trace.kind == "bars" else ())]
            ys += [*trace.y, *(trace.low if trace.kind == "area" else ())]
        self._x, self._y = _Scale(figure.x, xs), _Scale(figure.y, ys)
        widest = max((len(name) for _, name in self._y.ticks), default=0)
        self._left = 12 + _CHARACTER * widest + (_LINE if figure.y.title else 0)
        self._right = width - _RIGHT
        labelled = any(mark.text and mark.axis == "x" for mark in figure.marks)
        self._top = _TOP + (_ABOVE if labelled else 0)
        self._bottom = figure.height - (_LINE + 4 + (_LINE if figure.x.title else 0))

    def element(self) -> str:
        """The SVG element. The page's script reads the position of the plot and the range of its x axis
        from `data-area`."""
        parts = [*self._axes()]
        for trace in self._figure.traces:
            parts += self._bars(trace) if trace.kind == "bars" else self._curve(trace)
        parts += self._marks()
        ends = [self._x.low, self._x.high, self._figure.x.is_log]
        area = json.dumps({"left": round(self._left, 1), "right": self._right, "x": ends})
        return (
            f'<svg viewBox="0 0 {self._width:g} {self._figure.height:g}"'
            f' class="{"wide" if self._width == WIDE else "narrow"}" data-area="{html.escape(area)}"'
            f' font-size="12" fill="none">{"".join(parts)}</svg>'
        )

    def _across(self, part: float) -> float:
        return self._left + part * (self._right - self._left)

    def _up(self, part: float) -> float:
        return self._bottom - part * (self._bottom - self._top)

    def _axes(self) -> Iterator[str]:
        x_axis, y_axis = self._figure.x, self._figure.y
        named: list[tuple[float, float]] = []
        for part, name in self._x.ticks:
            x = self._across(part)
            if x_axis.grid:
                yield _path([(x, self._top), (x, self._bottom)], "--grid", 1)
            if _has_room(named, x, name, "middle"):
                yield _text(x, self._bottom + _LINE - 2, name, "middle")
        for part, name in self._y.ticks:
            y = self._up(part)
            if y_axis.grid:
                yield _path([(self._left, y), (self._right, y)], "--grid", 1)
            yield _text(self._left - 6, y + 4, name, "end")
        if x_axis.title:
            middle = (self._left + self._right) / 2
            yield _text(middle, self._bottom + 2 * _LINE, x_axis.title, "middle")
        if y_axis.title:
            x, y = 12.0, (self._top + self._bottom) / 2
            turned = f' transform="rotate(-90 {x:g} {y:.1f})"'
            yield _text(x, y, y_axis.title, "middle", turned)

    def _bars(self, trace: Trace) -> Iterator[str]:
        thick = 0.7 * (self._bottom - self._top) / max(1, len(self._y.ticks))
        ends = zip(self._points(trace.low, trace.y), self._points(trace.x, trace.y), strict=True)
        for number, (begin, end) in enumerate(ends):
            if begin and end and end[0] > begin[0]:
                edge = ";stroke:var(--card)" if end[0] > begin[0] + _THIN else ""
                yield (
                    f'<rect x="{begin[0]:.1f}" y="{begin[1] - thick / 2:.1f}"'
                    f' width="{end[0] - begin[0]:.1f}" height="{thick:.1f}"'
                    f' style="fill:var({trace.color}){edge}">'
                    f"<title>{_escaped(trace.text[number])}</title></rect>"
                )

    def _curve(self, trace: Trace) -> Iterator[str]:
        points = self._points(trace.x, trace.y)
        joined = _stairs(points) if trace.stairs else points
        if trace.kind == "area":
            lower = self._points(trace.x, trace.low)
            edges = [*joined, *reversed(_stairs(lower) if trace.stairs else lower)]
            if outline := [point for point in edges if point]:
                yield f'<path d="{_moves(outline)}Z" style="fill:var({trace.color})"/>'
            return
        if trace.kind != "points":
            for piece in _pieces(joined):
                yield _path(piece, trace.color, trace.width, trace.dotted)
        if trace.kind != "line":
            for number, point in enumerate(points):
                if point:
                    text = trace.text[number] if trace.text else ""
                    yield _symbol(*point, trace, f"<title>{_escaped(text)}</title>" if text else "")

    def _points(self, xs: Values, ys: Values) -> list[_Point | None]:
        """Positions of values, clamped to the y axis, whose range may exclude some. None is a gap."""
        parts = [(self._x.part(x), self._y.part(y)) for x, y in zip(xs, ys, strict=True)]
        return [
            None if x is None or y is None else (self._across(x), self._up(min(max(y, 0.0), 1.0)))
            for x, y in parts
        ]

    def _marks(self) -> Iterator[str]:
        named: list[tuple[float, float]] = []
        for mark in self._figure.marks:
            part = (self._x if mark.axis == "x" else self._y).part(mark.value)
            if part is None:
                continue
            if mark.axis == "x":
                x, anchor = self._across(part), "start" if part < 0.5 else "end"
                line, label = [(x, self._bottom), (x, self._top)], (x, self._top - 6)
            else:
                y, anchor = self._up(part), "end"
                line, label = [(self._left, y), (self._right, y)], (self._right, y - 5)
            yield _path(line, mark.color, 1.5, mark.dotted)
            if mark.text and (mark.axis == "y" or _has_room(named, label[0], mark.text, anchor)):
                yield _text(*label, mark.text, anchor)


def _has_room(named: list[tuple[float, float]], x: float, text: str, anchor: str) -> bool:
    """Return whether `text` at `x` overlaps none of the labels whose extents are in `named`. If so, its
    extent is added to them."""
    width = _CHARACTER * (len(text) + 1)
    begin = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
    is_free = all(begin >= end or begin + width <= other for other, end in named)
    if is_free:
        named.append((begin, begin + width))
    return is_free


def _stairs(points: Sequence[_Point | None]) -> list[_Point | None]:
    found: list[_Point | None] = []
    for point in points:
        if found and found[-1] and point:
            found.append((point[0], found[-1][1]))
        found.append(point)
    return found


def _pieces(points: Sequence[_Point | None]) -> Iterator[list[_Point]]:
    """Split `points` at gaps."""
    piece: list[_Point] = []
    for point in (*points, None):
        if point:
            piece.append(point)
        elif piece:
            yield piece
            piece = []


def _path(points: Sequence[_Point], color: str, width: float, dotted: bool = False) -> str:
    dots = f' stroke-dasharray="{2 * width:g}"' if dotted else ""
    return (
        f'<path d="{_moves(points)}" style="stroke:var({color})" stroke-width="{width:g}"'
        f' stroke-linejoin="round"{dots}/>'
    )


def _moves(points: Sequence[_Point]) -> str:
    """SVG path data through `points`, without points in the middle of a horizontal line."""
    texts = [(f"{x:.1f}", f"{y:.1f}") for x, y in points]
    ends = [(None, None), *texts, (None, None)]
    kept = [
        f"{x} {y}"
        for (_, before), (x, y), (_, after) in zip(ends, texts, ends[2:], strict=False)
        if not before == y == after
    ]
    return "M" + "L".join(kept)


def _symbol(x: float, y: float, trace: Trace, title: str) -> str:
    match trace.shape:
        case "cross":
            moves = f"M{x - 4:.1f} {y - 4:.1f}l8 8m-8 0l8 -8"
            style = f"stroke:var({trace.color});stroke-width:2.5"
            return f'<path d="{moves}" style="{style}">{title}</path>'
        case "diamond":
            moves = f"M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7Z"
            style = f"fill:var({trace.color});stroke:var(--ink);stroke-width:2"
            return f'<path d="{moves}" style="{style}">{title}</path>'
        case _:
            style = f"fill:var({trace.color});stroke:var(--card)"
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" style="{style}">{title}</circle>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="fill:var(--ink-2)"{more}>'
        f"{_escaped(text)}</text>"
    )


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)
