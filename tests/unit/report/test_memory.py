"""The ledger, told: every figure is there, at 80 columns, in a pipe and on a page."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from anybatch.errors import InputError
from anybatch.estimate.ledger import Holding, LayerBytes, Ledger, Moment
from anybatch.planner.knobs import Knob
from anybatch.plans import Candidate, Choice, FrontierPoint, Plan, Prediction, TaskIdentity
from anybatch.report import print_ledger, sheet, write_frontier, write_ledger
from anybatch.report.memory import MAX_LAYERS, curve, plain_name

MIB = 1 << 20
PHASES = ["input"] * 2 + ["forward"] * 40 + ["loss"] * 4 + ["backward"] * 80 + ["update"] * 30


def moments(phases: list[str] = PHASES) -> tuple[Moment, ...]:
    """Up to the loss, down from there."""
    top = next((i for i, phase in enumerate(phases) if phase == "backward"), 0)
    return tuple(
        Moment(i, MIB * (10 + min(i, 2 * top - i)), MIB, phase, "head", "aten.addmm.default")
        for i, phase in enumerate(phases)
    )


def layer(number: int, name: str = "") -> LayerBytes:
    return LayerBytes(
        name=name or f"layers.{number}",
        type_name="Linear",
        depth=1,
        output_shape=(8, 32),
        num_calls=1,
        num_parameters=1000 + number,
        parameter_bytes=4000,
        buffer_bytes=0,
        gradient_bytes=4000,
        optimizer_bytes=8000,
        activation_bytes=100 * number,
    )


def ledger(num_layers: int = 3, phases: list[str] = PHASES) -> Ledger:
    curve = moments(phases)
    peak = max(curve, key=lambda moment: moment.num_bytes)
    return Ledger(
        micro_batch=8,
        layers=tuple(layer(i) for i in range(num_layers)),
        peak=peak,
        by_kind={"parameters": MIB, "gradients": 0, "activations": peak.num_bytes - MIB},
        held=(Holding("activations", "layers.1", 3 * MIB, 7),),
        curve=curve,
        method="by hand",
    )


PLAN = Plan(
    task=TaskIdentity(name="<one>", global_batch=64, parameters=9, trainable_parameters=9),
    device="cpu",
    device_name="a CPU",
    budget_bytes=100 * MIB,
    choice=Choice(micro_batch=8, evaluation_batch=8),
    prediction=Prediction(peak_bytes=50 * MIB, evaluation_peak_bytes=0, step_seconds=0.5),
)
KNOBS = (Knob("micro-batch 1", 20 * MIB, 0.75, ""), Knob("other", 40 * MIB, 0.5, "rounds"))


def told(found: Ledger, width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_ledger(Console(file=file, width=width), PLAN, found, KNOBS)
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [80, 60, 120])
def test_everything_is_told_within_the_width(width: int):
    text = told(ledger(), width)
    assert max(map(len, text.splitlines())) <= width
    for part in ("<one>", "layers.2", "8x32", "1,002", "activations", "56.0 MiB", "addmm"):
        assert part in text
    assert re.search(r"micro-batch 1 +20.0 MiB +64% +750 ms", text)
    assert "budget 100 MiB" in text


def test_a_terminal_without_unicode_gets_plain_characters():
    assert told(ledger(), encoding="ascii").isascii()


def test_the_largest_of_many_layers_are_shown_and_the_rest_added_up():
    text = told(ledger(100))
    assert f"{100 - MAX_LAYERS} smaller ones" in text
    assert "layers.99" in text
    assert "layers.3 " not in text
    assert f"{sum(1000 + i for i in range(100)):,}" in text


def test_the_curve_has_its_top_where_the_peak_is():
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(curve(ledger(), 60, None))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    top = lines[0].index("█") if "█" in lines[0] else lines[0].index("▇")
    names = next(line for line in lines if "backward" in line)
    assert abs(top - names.index("backward")) <= 3
    assert "update" in names


@pytest.mark.parametrize("count", [1, 2, 3, 59, 60, 61, 2000])
def test_any_number_of_moments_can_be_drawn(count: int):
    found = ledger(phases=["forward"] * count)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(curve(found, 60, None))
    assert all(len(line.rstrip()) <= 72 for line in console.export_text().splitlines())


def test_names_of_operations_are_plain():
    assert plain_name("aten.addmm.default") == "addmm"
    assert plain_name("aten.add_.Tensor") == "add_.Tensor"


# ----------------------------------------------------------------------------------- the pages


def specs(page: str) -> dict:
    found = re.search(r'id="specs">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_holds_every_layer_and_loads_nothing(tmp_path: Path):
    page = write_ledger(tmp_path / "m.html", PLAN, ledger(50), KNOBS).read_text()
    text = page.partition("<script>")[0]
    assert "&lt;one&gt;" in text
    assert "<one>" not in text
    assert all(f"layers.{i}<" in text for i in range(50))
    assert "micro-batch 1" in text
    assert "default-src 'none'" in text
    assert not re.search(r'(src|href)="(?!data:)', text)
    drawn = specs(page)
    assert drawn.keys() == {"curve", "kinds", "layers"}
    phases = [trace["name"] for trace in drawn["curve"]["data"]]
    assert phases == ["input", "forward", "loss", "backward", "update"]
    again = write_ledger(tmp_path / "m.html", PLAN, ledger(2, [*PHASES[:-30], *PHASES]), KNOBS)
    twice = specs(again.read_text())["curve"]["data"]
    assert [t["name"] for t in twice] == [*phases[:-1], *phases]
    assert [t["name"] for t in twice if t["showlegend"]] == phases
    highest = max(y for trace in drawn["curve"]["data"] for y in trace["y"] if y is not None)
    assert highest == pytest.approx(56)


def test_the_page_of_the_frontier_draws_it(tmp_path: Path):
    choices = [Choice(micro_batch=size, evaluation_batch=1) for size in (1, 2, 4)]
    plan = PLAN.model_copy(
        update={
            "frontier": tuple(
                FrontierPoint(choice=c, peak_bytes=(i + 1) * MIB, step_seconds=3.0 - i)
                for i, c in enumerate(choices)
            ),
            "rejected": tuple(
                Candidate(choice=c, peak_bytes=2 * MIB, step_seconds=4.0, reason="slow")
                for c in choices
            ),
        }
    )
    page = write_frontier(tmp_path / "f.html", plan).read_text()
    lines = {trace["name"]: trace for trace in specs(page)["candidates"]["data"]}
    assert lines["frontier"]["x"] == [1, 2, 3]
    assert lines["frontier"]["y"] == [3, 2, 1]
    assert "3.00 MiB" in page


def test_a_page_that_cannot_be_written_says_so(tmp_path: Path):
    with pytest.raises(InputError, match="cannot be written"):
        write_ledger(tmp_path / "no" / "m.html", PLAN, ledger(), KNOBS)
    with pytest.raises(InputError, match="folder"):
        sheet.write_whole(tmp_path, "text", "the page")
    assert list(tmp_path.iterdir()) == []
