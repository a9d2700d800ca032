"""Figures drawn as inline SVG, which every browser shows, without a library: a page is a few dozen
kilobytes, and works offline and for years.

This draws a `figures.Figure.spec`: lines, markers, areas, horizontal bars, marks, and axes (linear,
logarithmic, categories). Colours are custom properties of the page's style sheet, so they follow its
theme.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from anybatch.report.figures import Figure

WIDTH = 760
"""Of a figure, in its own units: the page scales it."""

_CHARACTER, _LINE = 6.6, 18.0  # of text, on average
_TOP, _RIGHT = 14.0, 14.0
_ABOVE = 20.0  # of labels above the plot

Trace = Mapping[str, Any]


def draw(figure: Figure) -> str:
    """The figure as an SVG element, and its legend, whose text stays as large as that of the page."""
    data, layout = figure.spec["data"], figure.spec["layout"]
    return _Drawing(data, layout, figure.height).element() + _legend(data, layout)


# --------------------------------------------------------------------------------------------- axes


@final
class _Axis:
    """Where values lie between two ends, and the ticks.

    Args:
        layout: of the axis.
        values: all that is to be seen.
    """

    def __init__(self, layout: Mapping[str, Any], values: Sequence[Any]) -> None:
        self.title: str = layout.get("title", "")
        self.shows_grid: bool = layout.get("showgrid", True)
        self.is_log: bool = layout.get("type") == "log"
        self.is_reversed: bool = layout.get("autorange") == "reversed"
        self.categories: list[str] = []
        if values and isinstance(values[0], str):
            self.categories = list(dict.fromkeys(values))
            self.low, self.high = -0.5, len(self.categories) - 0.5
            self.ticks: list[tuple[float, str]] = list(enumerate(self.categories))
            return
        places = [place for value in values if (place := self._place(value)) is not None]
        self.low, self.high = layout.get("range") or self._around(places, layout)
        if "tickvals" in layout:
            given = layout["tickvals"]
            names = layout.get("ticktext") or [f"{value:,.6g}" for value in given]
            found = [(self._place(value), name) for value, name in zip(given, names, strict=True)]
            self.ticks = [(place, str(name)) for place, name in found if place is not None]
        elif self.is_log:
            powers = range(math.ceil(self.low), math.floor(self.high) + 1)
            self.ticks = [(power, f"{10.0**power:,.6g}") for power in powers]
        else:
            self.ticks = [(value, f"{value:,.6g}") for value in _round_values(self.low, self.high)]
        self.ticks = [tick for tick in self.ticks if self.low <= tick[0] <= self.high]

    def part(self, value: Any) -> float | None:
        """Where `value` is, 0 at the low end, 1 at the high one; None: it has no place."""
        place = self._place(value)
        return None if place is None else self.part_of_place(place)

    def part_of_place(self, place: float) -> float:
        """The same, of a value as the axis has it: a logarithm, or the number of a category."""
        part = (place - self.low) / (self.high - self.low)
        return 1.0 - part if self.is_reversed else part

    def _place(self, value: Any) -> float | None:
        if isinstance(value, str):
            return float(self.categories.index(value)) if value in self.categories else None
        if value is None or (self.is_log and value <= 0):
            return None
        return math.log10(value) if self.is_log else float(value)

    @staticmethod
    def _around(places: Sequence[float], layout: Mapping[str, Any]) -> tuple[float, float]:
        low, high = min(places, default=0.0), max(places, default=1.0)
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        if layout.get("rangemode") == "tozero" and low >= 0:
            return 0.0, high + room
        return low - room, high + room


def _round_values(low: float, high: float, most: int = 7) -> list[float]:
    """1, 2 or 5 times a power of ten apart."""
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


# --------------------------------------------------------------------------------------- the drawing


@final
class _Drawing:
    """One figure. y grows downwards, as in SVG."""

    def __init__(self, data: Sequence[Trace], layout: Mapping[str, Any], height: float) -> None:
        self._data, self._layout, self._height = data, layout, height
        self._stacks = _stacked(data)
        self._x = _Axis(layout.get("xaxis", {}), self._values("x"))
        self._y = _Axis(layout.get("yaxis", {}), self._values("y"))
        widest = max((len(name) for _, name in self._y.ticks), default=0)
        self._left = 12 + _CHARACTER * widest + (_LINE if self._y.title else 0)
        self._right = WIDTH - _RIGHT
        labels = [it["text"] for it in layout.get("marks", ()) if it["axis"] == "x"]
        self._top = _TOP + (_ABOVE if any(labels) else 0)
        self._bottom = height - (_LINE + 4 + (_LINE if self._x.title else 0))

    def element(self) -> str:
        """The whole of it."""
        parts = [*self._grid(), *self._bars()]
        for index, trace in enumerate(self._data):
            if trace.get("type") != "bar":
                parts += self._curve(trace, self._stacks.get(index))
        parts += [*self._marks(), *self._axis_titles()]
        area = {
            "left": round(self._left, 1),
            "right": self._right,
            "x": [self._x.low, self._x.high, self._x.is_log],
        }
        told = html.escape(json.dumps(area))
        return (
            f'<svg viewBox="0 0 {WIDTH} {self._height:g}" data-area="{told}"'
            f' font-size="12" fill="none">{"".join(parts)}</svg>'
        )

    def _values(self, name: str) -> list[Any]:
        found: list[Any] = []
        for index, trace in enumerate(self._data):
            found += (
                self._stacks[index][1] if name == "y" and index in self._stacks else trace[name]
            )
        if name == "x" and self._layout.get("barmode") == "stack":
            ends: dict[str, float] = {}
            for trace in self._data:
                for row, size in zip(trace["y"], trace["x"], strict=True):
                    ends[row] = ends.get(row, 0.0) + (size or 0.0)
            return [0.0, *ends.values()]
        return [value for value in found if value is not None]

    # ------------------------------------------------------------------------------------- places

    def _at(self, x: Any, y: Any) -> tuple[float, float] | None:
        across, up = self._x.part(x), self._y.part(y)
        if across is None or up is None:
            return None
        return self._across(across), self._up(up)

    def _across(self, part: float) -> float:
        return self._left + part * (self._right - self._left)

    def _up(self, part: float) -> float:
        height = self._bottom - self._top
        return self._bottom - part * height

    # -------------------------------------------------------------------------------------- parts

    def _grid(self) -> Iterator[str]:
        for place, name in self._x.ticks:
            x = self._across(self._x.part_of_place(place))
            if self._x.shows_grid:
                yield _path([(x, self._top), (x, self._bottom)], "--grid", 1)
            yield _text(x, self._bottom + _LINE - 2, name, "middle")
        for place, name in self._y.ticks:
            y = self._up(self._y.part_of_place(place))
            if self._y.shows_grid:
                yield _path([(self._left, y), (self._right, y)], "--grid", 1)
            yield _text(self._left - 6, y + 4, name, "end")

    def _axis_titles(self) -> Iterator[str]:
        if self._x.title:
            middle = (self._left + self._right) / 2
            yield _text(middle, self._bottom + 2 * _LINE, self._x.title, "middle")
        if self._y.title:
            x, y = 12.0, (self._top + self._bottom) / 2
            turned = f' transform="rotate(-90 {x:g} {y:.1f})"'
            yield _text(x, y, self._y.title, "middle", more=turned)

    def _bars(self) -> Iterator[str]:
        bars = [trace for trace in self._data if trace.get("type") == "bar"]
        if not bars:
            return
        thick = (self._bottom - self._top) / max(1, len(self._y.categories))
        thick *= 1 - self._layout.get("bargap", 0.2)
        ends: dict[str, float] = {}
        for trace in bars:
            colors, texts = trace["color"], trace["text"]
            for i, (row, size) in enumerate(zip(trace["y"], trace["x"], strict=True)):
                begin = ends.get(row, 0.0)
                end = ends[row] = begin + (size or 0.0)
                left, right = self._at(begin, row), self._at(end, row)
                if left is None or right is None or end <= begin:
                    continue
                (x0, y), (x1, _) = left, right
                color = colors if isinstance(colors, str) else colors[i]
                yield (
                    f'<rect x="{x0:.1f}" y="{y - thick / 2:.1f}" width="{x1 - x0:.1f}"'
                    f' height="{thick:.1f}" style="fill:var({color});stroke:var(--card)">'
                    f"<title>{_escaped(texts[i])}</title></rect>"
                )

    def _curve(self, trace: Trace, stack: tuple[list[float], list[float]] | None) -> Iterator[str]:
        line, mode = trace.get("line", {}), trace.get("mode", "lines")
        steps = line.get("shape") == "hv"
        if stack is not None or trace.get("fill") == "toself":
            if stack is not None:
                upper = _stairs(self._points(trace["x"], stack[1]), steps)
                lower = _stairs(self._points(trace["x"], stack[0]), steps)
                outline = [*upper, *reversed(lower)]
            else:
                outline = self._points(trace["x"], trace["y"])
            yield _area([point for point in outline if point is not None], trace["fillcolor"])
            return
        points = self._points(trace["x"], trace["y"])
        if "lines" in mode:
            for piece in _pieces(_stairs(points, steps)):
                yield _path(piece, line["color"], line.get("width", 2), line.get("dash"))
        if "markers" in mode:
            texts = trace.get("text") or [""] * len(points)
            for point, text in zip(points, texts, strict=True):
                if point is not None:
                    yield _marker(*point, trace["marker"], text)

    def _points(self, xs: Sequence[Any], ys: Sequence[Any]) -> list[tuple[float, float] | None]:
        return [self._clipped(self._at(x, y)) for x, y in zip(xs, ys, strict=True)]

    def _clipped(self, point: tuple[float, float] | None) -> tuple[float, float] | None:
        """Not beyond the ends of the y axis, whose range may leave values out."""
        if point is None:
            return None
        return point[0], min(max(point[1], self._top), self._bottom)

    def _marks(self) -> Iterator[str]:
        for mark in self._layout.get("marks", ()):
            part = (self._x if mark["axis"] == "x" else self._y).part(mark["value"])
            if part is None:
                continue
            if mark["axis"] == "x":
                x, anchor = self._across(part), "start" if mark["side"] == "left" else "end"
                line, label = [(x, self._bottom), (x, self._top)], (x, self._top - 6)
            else:
                y, anchor = self._up(part), "end"
                line, label = [(self._left, y), (self._right, y)], (self._right, y - 5)
            yield _path(line, mark["color"], mark["width"], mark["dash"])
            if mark["text"]:
                yield _text(*label, mark["text"], anchor)


def _legend(data: Sequence[Trace], layout: Mapping[str, Any]) -> str:
    """The names of the traces with their colours; the shapes of markers, too."""
    if not layout.get("showlegend", len(data) > 1):
        return ""
    shapes = {"x": "cross", "diamond": "diamond"}
    items: list[str] = []
    for trace in data:
        line, marker = trace.get("line", {}), trace.get("marker", {})
        styles = trace.get("fillcolor"), trace.get("color"), line.get("color"), marker.get("color")
        color = next(filter(None, styles))
        if trace.get("type") == "bar" or "fillcolor" in trace:
            shape = "area"
        elif "lines" in trace.get("mode", "lines"):
            shape = "line"
        else:
            shape = shapes.get(marker.get("symbol"), "dot")
        items.append(
            f'<li><i class="{shape}" style="color:var({color})"></i>{_escaped(trace["name"])}</li>'
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _stacked(data: Sequence[Trace]) -> dict[int, tuple[list[float], list[float]]]:
    """The lower and the upper edge of each trace of a stack of areas, by its number."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    below: list[float] | None = None
    for index, trace in enumerate(data):
        if "stackgroup" in trace:
            lower = below or [0.0] * len(trace["y"])
            upper = [a + (b or 0.0) for a, b in zip(lower, trace["y"], strict=True)]
            found[index], below = (lower, upper), upper
    return found


_Point = tuple[float, float]


def _stairs(points: Sequence[_Point | None], steps: bool) -> list[_Point | None]:
    """`points`; joined by a horizontal line, then a vertical one, if `steps`."""
    if not steps:
        return list(points)
    found: list[_Point | None] = []
    for point in points:
        if found and found[-1] is not None and point is not None:
            found.append((point[0], found[-1][1]))
        found.append(point)
    return found


def _pieces(points: Sequence[_Point | None]) -> Iterator[list[_Point]]:
    """Stretches without a gap."""
    piece: list[_Point] = []
    for point in (*points, None):
        if point is not None:
            piece.append(point)
        elif piece:
            yield piece
            piece = []


def _path(points: Sequence[_Point], color: str, width: float, dash: str | None = None) -> str:
    if not points:
        return ""
    dots = f' stroke-dasharray="{2 * width:g}"' if dash == "dot" else ""
    return (
        f'<path d="{_moves(points)}" style="stroke:var({color})" stroke-width="{width:g}"'
        f' stroke-linejoin="round"{dots}/>'
    )


def _area(points: Sequence[_Point], color: str) -> str:
    return f'<path d="{_moves(points)}Z" style="fill:var({color})"/>' if points else ""


def _moves(points: Sequence[_Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _marker(x: float, y: float, marker: Mapping[str, Any], text: str) -> str:
    r, edge = marker["size"] / 2, marker.get("line", {})
    style = f"fill:var({marker['color']})"
    if edge:
        style += f";stroke:var({edge['color']});stroke-width:{edge['width']}"
    if "opacity" in marker:
        style += f";opacity:{marker['opacity']}"
    told = f"<title>{_escaped(text)}</title>" if text else ""
    match marker.get("symbol"):
        case "x":
            style = f"stroke:var({marker['color']});stroke-width:2.5"
            moves = (
                f"M{x - r:.1f} {y - r:.1f}l{2 * r:g} {2 * r:g}m{-2 * r:g} 0l{2 * r:g} {-2 * r:g}"
            )
            return f'<path d="{moves}" style="{style}">{told}</path>'
        case "diamond":
            moves = f"M{x:.1f} {y - r:.1f}l{r:g} {r:g}l{-r:g} {r:g}l{-r:g} {-r:g}Z"
            return f'<path d="{moves}" style="{style}">{told}</path>'
        case _:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:g}" style="{style}">{told}</circle>'


def _text(
    x: float, y: float, text: str, anchor: str, color: str = "--ink-2", more: str = ""
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="fill:var({color})"{more}>'
        f"{_escaped(text)}</text>"
    )


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)
