"""The page holds the run, needs nothing else, and believes no name."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.unit.report.fake_run import (
    BEGIN,
    GIB,
    make_candidate,
    make_end,
    make_evaluation,
    make_events,
    make_overflow,
    make_plan,
    make_start,
    make_step,
    write_run,
)

from anybatch.errors import InputError
from anybatch.events import Event, Replanned
from anybatch.plans import Plan
from anybatch.report import write


class Page(HTMLParser):
    """A page taken apart: tags with attributes, text that is read, scripts."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.ids: list[str] = []
        self._within = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.text = " ".join(" ".join(self.texts).split())
        self.specs: dict[str, dict[str, Any]] = json.loads(self.scripts[0], parse_constant=refuse)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        self._within = tag

    def handle_endtag(self, tag):
        self._within = ""

    def handle_data(self, data):
        if self._within == "script":
            self.scripts.append(data)
        elif self._within != "style":
            self.texts.append(data)


def refuse(constant: str):
    raise AssertionError(f"{constant} is not JSON")


def page_of(folder: Path, events: Iterable[Event], plan: Plan | None = None) -> Page:
    page = Page(write(write_run(folder, events, plan)))
    check(page)
    return page


def check(page: Page) -> None:
    """What holds for every page."""
    assert sorted(page.ids) == sorted(set(page.ids))
    for name, spec in page.specs.items():
        assert name in page.ids
        for trace in spec["traces"]:
            assert len(trace["x"]) == len(trace["y"]) <= 1000
    drawn = re.findall(r"<svg.*?</svg>", page.source, re.DOTALL)
    assert len(drawn) == 2 * len(page.specs)  # for wide and narrow places
    for svg in drawn:
        check_drawing(svg)
    plots = [attributes for _, attributes in page.tags if attributes.get("class") == "canvas"]
    assert {plot["id"] for plot in plots} == page.specs.keys()
    assert all(plot["role"] == "img" and plot["aria-label"] for plot in plots)
    colors = set(re.findall(r"[\"(](--[a-z0-9-]+)[\")]", json.dumps(page.specs) + "".join(drawn)))
    style = page_style(page)
    assert all(style.count(f"{color}:") == 2 for color in colors), "a colour lacks a theme"


def check_drawing(svg: str) -> None:
    """It is well formed, and nothing lies outside."""
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root:
        if element.tag == "text":
            assert 0 <= float(element.attrib["x"]) <= width
            assert 0 <= float(element.attrib["y"]) <= height
        if element.tag == "path" and "l" not in element.attrib["d"]:
            for x, y in re.findall(r"[ML](\S+) ([^LMZ]+)", element.attrib["d"]):
                assert -1 <= float(x) <= width + 1
                assert -1 <= float(y) <= height + 1


def page_style(page: Page) -> str:
    return re.split(r"</?style>", page.source, maxsplit=2)[1]


@pytest.fixture
def full(tmp_path: Path) -> Page:
    return page_of(tmp_path / "run", make_events())


def test_the_page_holds_the_figures(full: Page):
    for figure in (
        "cifar10-resnet",
        "NVIDIA H200, 139 GiB",
        "held-out accuracy 0.9250 after step 200",
        "held-out loss 0.4848",
        "steps 200 of 200",
        "peak memory 8.71 GiB 8.62 GiB +1.0% 10.0 GiB",
        "step time 1.18 s 1.27 s -7.1%",
        "activations 7.02 GiB 81%",
        "Out of memory in step 57 (backward, micro-batch 512)",
        "New plan from step 57 on (memory ran out in backward): micro-batch 256",
        "Gradients overflowed in step 12",
        "Evaluation after step 200: loss 0.4848",
        "exceeds the 10.0 GiB planned for by 52.1 GiB",
        "torch 2.13.0",
    ):
        assert figure in full.text
    for what, how in make_plan().explain():
        assert f"{what} {how}" in full.text


def test_the_plots_hold_the_run(full: Page):
    assert full.specs.keys() == {
        "memory", "loss", "metric-0", "metric-1", "throughput", "step-time", "learning-rate",
        "grad-norm", "candidates",
    }  # fmt: skip
    raw, smoothed, held_out = full.specs["loss"]["traces"]
    assert len(raw["x"]) == len(smoothed["x"]) == 200
    assert held_out["x"] == list(range(20, 201, 20))
    assert [mark["value"] for mark in full.specs["loss"]["marks"]] == [57]
    memory = full.specs["memory"]
    assert [name for _, name in memory["y"]["ticks"]] == ["first plan", "measured"]
    predicted = max(bar["x"][0] for bar in full.specs["memory"]["traces"] if bar["y"] == [0])
    assert predicted == pytest.approx(8.71, abs=1e-3)
    chosen = full.specs["candidates"]["traces"][-1]
    assert (chosen["name"], chosen["x"]) == ("the plan", [8.71])


def test_a_candidate_within_the_budget_that_needs_its_reserve_does_not_fit(tmp_path: Path):
    most = max(c.peak_bytes for c in make_plan().rejected if (c.peak_bytes or 0) < 10 * GIB)
    for reserve_bytes, num_over in ((0, 5), (10 * GIB - most, 5), (10 * GIB - most + 1, 6)):
        page = page_of(tmp_path, make_events(), make_plan(reserve_bytes=reserve_bytes))
        traces = {trace["name"]: trace for trace in page.specs["candidates"]["traces"]}
        assert len(traces["more than is planned for"]["x"]) == num_over
        assert f"11 candidates not taken, {num_over} over the " in page.text


def test_a_prediction_that_held_is_that_of_the_run(tmp_path: Path):
    events = [event for event in make_events() if not isinstance(event, Replanned)]
    memory = page_of(tmp_path / "run", events).specs["memory"]
    assert [name for _, name in memory["y"]["ticks"]] == ["predicted", "measured"]


def test_a_budget_far_away_is_told_in_words(tmp_path: Path):
    page = page_of(tmp_path, make_events(), make_plan(budget_bytes=600 * GIB, enforced=False))
    assert page.specs["memory"]["x"]["range"][1] < 10
    assert page.specs["memory"]["marks"] == []
    assert "free 600 GiB" in page.text
    assert "of 600 GiB" not in page.text


def test_how_it_was_run_is_told_in_the_end(full: Page):
    told = full.text.partition("How it was run")[2]
    for line in (
        "command anybatch train cifar10.py --memory 10GiB -s 'name=a b'",
        "host node-7",
        "device NVIDIA H200, 139 GiB",
        "date began 2025-10-09",
        "anybatch 0.1.0",
        "torch 2.13.0",
        "Python 3.11.7",
    ):
        assert line in told


def test_a_resumed_run_tells_each_command_and_each_machine_once(tmp_path: Path):
    again = {"command": "anybatch train cifar10.py --resume", "host": "node-8"}
    starts = [make_start(), make_start(**again), make_start(**again)]
    told = page_of(tmp_path, starts).text.partition("How it was run")[2]
    assert "resumed by anybatch train cifar10.py --resume host node-7, node-8 device" in told


def test_a_log_from_before_commands_were_recorded_has_a_page(tmp_path: Path):
    folder = write_run(tmp_path, [make_start(), make_end()])
    log = folder / "events.jsonl"
    start, end = (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines())
    del start["command"], start["host"]
    log.write_text(f"{json.dumps(start)}\n{json.dumps(end)}\n", encoding="utf-8")
    page = Page(write(folder))
    check(page)
    told = page.text.partition("How it was run")[2]
    assert "device NVIDIA H200" in told
    assert "command" not in told
    assert "host" not in told


def test_waiting_for_samples_has_a_curve(tmp_path: Path):
    steps = [make_step(step, seconds=1.0, data_seconds=0.75) for step in range(1, 21)]
    page = page_of(tmp_path, [make_start(), *steps])
    assert page.specs["waiting"]["traces"][0]["y"][5] == pytest.approx(75.0)
    assert "75% of a step, for samples" in page.text


def test_the_page_loads_nothing(full: Page):
    for tag, attributes in full.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        for name in ("src", "href", "srcset", "action", "data"):
            assert (attributes.get(name) or "data:").startswith(("data:", "#"))
    style = page_style(full)
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a for t, a in full.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in str(policy["content"])
    assert "connect-src" not in str(policy["content"])
    specs, own = full.scripts
    assert len(full.source) < 400_000
    assert "http" not in specs + own


def test_headings_and_tables_are_marked(full: Page):
    tags = [tag for tag, _ in full.tags]
    assert tags.count("h1") == 1
    assert tags.count("thead") == tags.count("table") >= 4
    assert all("scope" in attributes for tag, attributes in full.tags if tag == "th")
    sections = [a["aria-labelledby"] for t, a in full.tags if t == "section"]
    assert set(sections) <= set(full.ids)


def test_names_are_text_and_nothing_more(tmp_path: Path):
    evil = "</script><script>alert(1)</script>"
    plan = make_plan(
        notices=(evil,),
        rejected=(make_candidate(64, 1.0, 1.0).model_copy(update={"reason": evil}),),
    )
    events = [
        make_start(
            task=evil, device=evil, versions={evil: evil}, notices=(evil,), command=evil, host=evil
        ),
        make_step(1, metrics={evil: 1.0}),
        make_evaluation(1, metrics={evil: 1.0, "--blue": 0.5}),
        make_end(finished=False, reason=evil),
    ]
    page = page_of(tmp_path, events, plan)
    assert len(page.scripts) == 2
    assert "alert(1)" not in page.scripts[1]
    assert not re.search(r"<script>\s*alert", page.source)
    assert evil in page.text
    assert "<" not in page.scripts[0]
    assert "<script>" in json.dumps(page.specs["candidates"])


def test_a_run_without_steps(tmp_path: Path):
    end = make_end(steps=0, samples_seen=0, step_seconds=None, measured_peak_bytes=0, seconds=1.0,
                   finished=False, reason="the first batch could not be read")  # fmt: skip
    page = page_of(tmp_path, [make_start(), end])
    assert "stopped early: the first batch could not be read" in page.text
    assert "No step was committed." in page.text
    assert "No held-out samples were evaluated." in page.text
    assert page.specs.keys() == {"memory", "candidates"}


def test_a_log_without_events(tmp_path: Path):
    page = page_of(tmp_path, [], make_plan(prediction=None, rejected=(), budget_bytes=None))
    assert "no end recorded: the run was killed, or is still going" in page.text
    assert "cifar10-resnet" in page.text
    assert page.specs == {}


def test_a_run_of_one_step_is_a_point(tmp_path: Path):
    page = page_of(tmp_path, [make_start(), make_step(1, grad_norm=None), make_end(steps=1)])
    (trace,) = page.specs["loss"]["traces"]
    assert (trace["kind"], trace["x"]) == ("points", [1])
    assert "training loss 2.360 last step" in page.text
    assert "grad-norm" not in page.specs


def test_a_loss_that_is_not_finite_is_a_gap_and_told(tmp_path: Path):
    steps = [make_step(i, loss=math.nan if 60 < i <= 70 else 1.0 / i) for i in range(1, 101)]
    page = page_of(tmp_path, [make_start(), *steps])
    assert page.specs["loss"]["traces"][0]["y"][60:70] == [None] * 10
    assert "The loss was not finite in 10 of 100 steps, first in step 61" in page.text


def test_nothing_finite_at_all(tmp_path: Path):
    steps = [make_step(i, loss=math.nan, seconds=0.0, learning_rate=math.inf) for i in range(1, 31)]
    evaluation = make_evaluation(30, loss=math.nan, metrics={"accuracy": math.nan})
    page = page_of(tmp_path, [make_start(), *steps, evaluation])
    assert "Training loss was never finite." in page.text


def test_a_long_run_is_thinned(tmp_path: Path):
    steps = [make_step(i, loss=9.0 if i == 4321 else 1.0) for i in range(1, 10_001)]
    evaluations = [make_evaluation(i) for i in range(1, 3001)]
    page = page_of(tmp_path, [make_start(total_steps=10_000), *steps, *evaluations])
    assert max(page.specs["loss"]["traces"][0]["y"]) == 9.0
    assert re.search(r"2,601 more events: see events\.jsonl", page.text)
    assert len([tag for tag, _ in page.tags if tag == "tr"]) < 500


def test_a_resumed_run_counts_repeated_steps_once(tmp_path: Path):
    def steps(first: int, last: int, loss: float) -> list[Event]:
        return [make_step(i, loss=loss, metrics={"m": loss}) for i in range(first, last + 1)]

    events = [
        make_start(), *steps(1, 30, 2.0), make_evaluation(10), make_evaluation(30, loss=8.0),
        make_start(time=BEGIN + 1000), *steps(21, 40, 1.0), make_evaluation(40),
        make_end(time=BEGIN + 1040, steps=40, seconds=40.0),
    ]  # fmt: skip
    page = page_of(tmp_path, events)
    raw, _, held_out = page.specs["loss"]["traces"]
    assert raw["x"] == list(range(1, 41))
    assert raw["y"] == [2.0] * 20 + [1.0] * 20
    assert held_out["x"] == [10, 40]
    assert "resumed once" in page.text
    assert "finished" in page.text
    assert "loss 8.000" in page.text, "the events tell what happened, too"


def test_metrics_that_come_and_go(tmp_path: Path):
    steps = [make_step(i, metrics={"late": 1.0} if i % 3 == 0 else {}) for i in range(1, 31)]
    page = page_of(tmp_path, [make_start(), *steps])
    (trace,) = page.specs["metric-0"]["traces"]
    assert trace["y"][:4] == [None, None, 1.0, None]


def test_one_slow_step_does_not_press_the_curve_flat(tmp_path: Path):
    steps = [make_step(i, seconds=100.0 if i == 1 else 0.5) for i in range(1, 101)]
    page = page_of(tmp_path, [make_start(), *steps])
    assert page.specs["step-time"]["y"]["range"][1] < 1000


def test_many_overflows_do_not_hide_the_page(tmp_path: Path):
    page = page_of(tmp_path, [make_start(), *(make_overflow(i) for i in range(1, 1001))])
    assert "601 more events" in page.text


def test_times_are_told_in_a_task_named_like_a_number(tmp_path: Path):
    # The log reads a string "nan" back as a number.
    page = page_of(tmp_path, [make_start(task="nan"), make_end()])
    assert "nan" in page.text


def test_the_page_is_replaced_whole(tmp_path: Path):
    folder = write_run(tmp_path, make_events(30))
    first = write(folder).read_text(encoding="utf-8")
    assert write(folder).read_text(encoding="utf-8") == first
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "events.jsonl",
        "plan.json",
        "report.html",
    ]


def test_a_page_that_cannot_be_written_is_an_input_error(tmp_path: Path):
    folder = write_run(tmp_path, make_events(3))
    (folder / "report.html").mkdir()
    with pytest.raises(InputError, match=r"cannot be written to .*report\.html"):
        write(folder)
    assert not (folder / ".report.html.partial").exists()


def test_a_folder_without_a_run_is_an_input_error(tmp_path: Path):
    with pytest.raises(InputError, match=r"plan\.json cannot be read"):
        write(tmp_path)
    make_plan().save(tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"events\.jsonl cannot be read"):
        write(tmp_path)


def noisy(steps: int, scale: float = 1000.0, spread: float = 0.05) -> list[Event]:
    """A run whose gradients have that noise scale, scattered a little."""
    draw = random.Random(0)
    return [
        make_step(
            number,
            grad_norm=math.sqrt(1 + scale / 4096) * draw.gauss(1, spread),
            part_weight=512.0,
            part_grad_norm=math.sqrt(1 + scale / 512) * draw.gauss(1, spread),
        )
        for number in range(1, steps + 1)
    ]


def test_the_noise_scale_is_drawn_with_its_interval_beside_the_batch(tmp_path):
    page = page_of(tmp_path, [make_start(), *noisy(200), make_end()])
    band, curve = page.specs["noise-scale"]["traces"]
    marks = page.specs["noise-scale"]["marks"]
    assert [(mark["axis"], mark["value"]) for mark in marks] == [("y", 4096)]
    assert len(curve["x"]) == 6
    assert all(400 < value < 2500 for value in curve["y"])
    assert min(band["low"]) < min(curve["y"]) < max(curve["y"]) < max(band["y"])
    assert max(band["x"]) == 200
    assert "x the minimum of steps" in page.text


def test_it_is_in_tokens_where_the_batch_is(tmp_path):
    steps = [replace(one, tokens_seen=20 * one.samples_seen) for one in noisy(200)]
    plan = make_plan()
    task = plan.task.model_copy(update={"batch_rule": "81920tokens"})
    plan = plan.model_copy(update={"task": task})
    page = page_of(tmp_path / "tokens", [make_start(), *steps, make_end()], plan)
    spec = page.specs["noise-scale"]
    assert spec["y"]["title"] == "tokens (logarithmic)"
    assert spec["marks"][0]["value"] == 81_920
    plain = page_of(tmp_path / "samples", [make_start(), *noisy(200), make_end()])
    samples = plain.specs["noise-scale"]["traces"][1]["y"]
    assert spec["traces"][1]["y"] == pytest.approx([20 * value for value in samples], rel=1e-3)
    assert "81,920 tokens on average" in page.text


def test_where_only_a_lower_end_is_known_the_band_is_open(tmp_path):
    page = page_of(tmp_path, [make_start(), *noisy(50, 1e6, 0.3), make_end()])
    band, curve = page.specs["noise-scale"]["traces"]
    assert curve["y"] == [None] * len(curve["x"])
    top = page.specs["noise-scale"]["y"]["range"][1]
    assert max(band["y"]) == pytest.approx(top, rel=1e-4)
    assert "only the lower end is known" in page.text


def test_steps_that_were_done_again_are_in_it_once(tmp_path):
    once = page_of(tmp_path / "once", [make_start(), *noisy(200), make_end()])
    again = [make_start(), *noisy(150, scale=9e4), make_start(), *noisy(200), make_end()]
    assert page_of(tmp_path / "again", again).specs["noise-scale"] == once.specs["noise-scale"]


def test_a_log_from_before_it_was_measured_says_so(tmp_path):
    page = page_of(tmp_path, make_events())
    assert "noise-scale" not in page.specs
    assert "The noise scale was not measured" in page.text
