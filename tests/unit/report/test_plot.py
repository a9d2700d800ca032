"""Figures are drawn where their values are."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from anybatch.report.plot import WIDE, Axis, Figure, Mark, Trace, svg

Point = tuple[float, float]


def drawn(*traces: Trace, x: Axis = Axis(), y: Axis = Axis(), **more: Any) -> ElementTree.Element:  # noqa: B008
    return ElementTree.fromstring(svg(Figure("f", "F", "", traces, x, y, legend=False, **more)))


def line(xs: list[Any], ys: list[Any], **more: Any) -> Trace:
    return Trace("a", xs, ys, "--blue", **more)


def paths(root: ElementTree.Element, color: str = "--blue") -> list[list[Point]]:
    found = [e.attrib["d"] for e in root.iter("path") if f"({color})" in e.attrib["style"]]
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML](\S+) ([^LMZ]+)", d)] for d in found]


def ticks(root: ElementTree.Element, anchor: str) -> dict[str, Point]:
    """Places of the labels along an axis: x is in the middle, y ends at its tick."""
    texts = [e for e in root.iter("text") if e.attrib["text-anchor"] == anchor]
    return {str(e.text): (float(e.attrib["x"]), float(e.attrib["y"]) - 4) for e in texts}


def test_a_curve_goes_through_its_values():
    root = drawn(line([0, 5, 10], [0.0, 2.0, 1.0]))
    ((first, middle, last),) = paths(root)
    xs, ys = ticks(root, "middle"), ticks(root, "end")
    assert first[0] == pytest.approx(xs["0"][0], abs=0.1)
    assert last[0] == pytest.approx(xs["10"][0], abs=0.1)
    assert [first[1], middle[1], last[1]] == pytest.approx(
        [ys["0"][1], ys["2"][1], ys["1"][1]], abs=0.1
    )
    assert middle[1] < last[1] < first[1]  # y grows downwards
    assert 0 < first[0] < last[0] < WIDE


def test_a_gap_parts_a_curve():
    first, second = paths(drawn(line([1, 2, 3, 4], [1.0, 2.0, None, 4.0])))
    assert (len(first), len(second)) == (2, 1)


def test_a_logarithmic_axis_has_decades_alike():
    root = drawn(line([1, 2, 3, 4], [1.0, 10.0, 100.0, 0.0]), y=Axis(is_log=True))
    ((a, b, c),) = paths(root)  # zero has no place
    assert a[1] - b[1] == pytest.approx(b[1] - c[1], abs=0.2)
    assert ticks(root, "end")["10"][1] == pytest.approx(b[1], abs=0.1)


def test_steps_are_horizontal_first():
    ((a, b, c),) = paths(drawn(line([1, 2], [1.0, 2.0], stairs=True)))
    assert (a[1], b[0]) == (b[1], c[0])
    assert a[0] < b[0]


def test_an_area_is_between_its_edges():
    area = Trace("b", [1, 2], [4.0, 4.0], "--teal", "area", low=[1.0, 1.0])
    root = drawn(line([1, 2], [1.0, 1.0]), line([1, 2], [4.0, 4.0]), area)
    below, top = paths(root)
    assert {y for _, y in paths(root, "--teal")[0]} == {below[0][1], top[0][1]}


def test_bars_are_as_long_as_their_values_and_begin_where_they_should():
    def bars(name: str, begin: list[float], end: list[float]) -> Trace:
        text = [f"{name}: <one>", f"{name}: two"]
        return Trace(name, end, [0, 1], "--blue", "bars", begin, text)

    rows = Axis(range=(1.5, -0.5), ticks=[(0, "<one>"), (1, "two")])
    root = drawn(bars("a", [0.0, 0.0], [1.0, 2.0]), bars("b", [1.0, 2.0], [4.0, 2.0]), y=rows)
    first, second, third = root.iter("rect")
    width = {e: float(e.attrib["width"]) for e in (first, second, third)}
    assert width[second] == pytest.approx(2 * width[first], rel=0.01)
    assert width[third] == pytest.approx(3 * width[first], rel=0.01)
    assert float(third.attrib["x"]) == pytest.approx(
        float(first.attrib["x"]) + width[first], abs=0.2
    )
    assert float(first.attrib["y"]) < float(second.attrib["y"])  # the first row is at the top
    assert list(ticks(root, "end")) == ["<one>", "two"]
    assert [title.text for title in root.iter("title")] == ["a: <one>", "a: two", "b: <one>"]


def test_lines_across_and_upwards_are_at_their_values():
    marks = [Mark("x", 4, "--red", "here", dotted=True), Mark("y", 2.0, "--teal")]
    root = drawn(line([0, 4, 10], [0.0, 2.0, 1.0]), marks=marks)
    ((_, middle, _),) = paths(root)
    ((up, _),) = paths(root, "--red")
    ((across, _),) = paths(root, "--teal")
    assert up[0] == pytest.approx(middle[0], abs=0.1)
    assert across[1] == pytest.approx(middle[1], abs=0.1)
    assert ticks(root, "start")["here"][0] == up[0]


def test_values_beyond_a_given_range_stay_on_the_plot():
    root = drawn(line([0, 1], [1.0, 1000.0]), y=Axis(range=(0, 2)))
    ((_, high),) = paths(root)
    assert high[1] == pytest.approx(14.0, abs=0.1)
