"""The ledger, told: every figure is there, at 80 columns, in a pipe and on a page."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from anybatch.errors import InputError
from anybatch.estimate.ledger import Holding, LayerBytes, Ledger, Moment
from anybatch.planner.knobs import Knob
from anybatch.plans import Candidate, Choice, FrontierPoint, Plan, Prediction, TaskIdentity
from anybatch.process.files import write_whole
from anybatch.report import print_ledger, write_frontier, write_ledger
from anybatch.report.layers import Row, every_row, rows_of, total_row

MIB = 1 << 20
PHASES = ["input"] * 2 + ["forward"] * 40 + ["loss"] * 4 + ["backward"] * 80 + ["update"] * 30


def moments(phases: list[str] = PHASES) -> tuple[Moment, ...]:
    """Up to the loss, down from there; what was taken is kept."""
    top = next((i for i, phase in enumerate(phases) if phase == "backward"), 0)
    return tuple(
        Moment(
            i,
            MIB * (12 + min(i, top)),
            {"parameters": MIB, "activations": MIB * (9 + min(i, 2 * top - i))},
            phase,
            "head",
            "aten.addmm.default",
        )
        for i, phase in enumerate(phases)
    )


def layer(number: int, name: str = "", **changes: Any) -> LayerBytes:
    values: dict[str, Any] = {
        "name": name or f"layers.{number}",
        "type_name": "Linear",
        "depth": 1,
        "output_shape": (8, 32),
        "num_calls": 1,
        "num_parameters": 1000 + number,
        "parameter_bytes": 4000,
        "buffer_bytes": 0,
        "gradient_bytes": 4000,
        "optimizer_bytes": 8000,
        "activation_bytes": 100 * number,
    }
    return LayerBytes(**{**values, **changes})


def ledger(
    num_layers: int = 3,
    phases: list[str] = PHASES,
    layers: Sequence[LayerBytes] = (),
    modules: dict[str, str] | None = None,
) -> Ledger:
    curve = moments(phases)
    peak = max(curve, key=lambda moment: moment.used_bytes)
    held = max(moment.num_bytes for moment in curve)
    own = tuple(layers) or tuple(layer(i) for i in range(num_layers))
    return Ledger(
        micro_batch=8,
        layers=own,
        modules=modules or {".": "Net", **{one.name: one.type_name for one in own}},
        totals={"allocated": peak.used_bytes, "reserved": held - MIB, "total": held},
        peak=peak,
        by_kind={**peak.by_kind, "allocator's rounding and holes": held - peak.used_bytes},
        held=(Holding("activations", "layers.1", 3 * MIB, 7),),
        curve=curve,
        method="by hand",
        not_counted=("Nothing of this is real.",),
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
    for part in ("<one>", "layers", "activations", "58.0 MiB", "backward of head: addmm"):
        assert part in text
    assert re.search(r"micro-batch 1 +20.0 MiB +-66% +750 ms", text)
    assert "58.0 MiB (58% of 100 MiB)" in text
    assert text.index("by hand") < text.index("Nothing of this is real.")
    assert ("7.81 KiB" in text) == (width > 60)  # of the optimizer
    assert ("8x32" in text) == (width >= 80)


def test_every_account_is_told_with_what_it_counts():
    text = told(ledger())
    assert re.search(r"allocated +56.0 MiB +in tensors", text)
    assert re.search(r"reserved +57.0 MiB +as allocated", text)
    assert re.search(r"total +58.0 MiB +resident", text)


def test_a_terminal_without_unicode_gets_plain_characters():
    assert told(ledger(), encoding="ascii").isascii()


def blocks(count: int, odd: int = -1) -> Ledger:
    """A model of equal blocks of two layers, one of which may keep more."""
    own = [layer(0, "emb")]
    modules = {".": "Net", "emb": "Embedding", "blocks": "ModuleList"}
    for i in range(count):
        kept = 999_000 if i == odd else 6_000
        own += [layer(1, f"blocks.{i}.up", activation_bytes=kept), layer(1, f"blocks.{i}.down")]
        modules |= {
            f"blocks.{i}": "Block",
            f"blocks.{i}.up": "Linear",
            f"blocks.{i}.down": "Linear",
        }
    return ledger(layers=own, modules=modules)


def names(rows: Sequence[Row]) -> list[str]:
    return ["  " * row.depth + row.name for row in rows]


def test_blocks_that_are_alike_are_one_row_and_so_is_what_they_contain():
    found = blocks(12)
    rows = rows_of(found)
    assert names(rows) == ["emb", "blocks.* (12 alike)", "  up", "  down"]
    whole, up, down = rows[1:]
    assert whole.sizes == tuple(a + b for a, b in zip(up.sizes, down.sizes, strict=True))
    assert (whole.type_name, whole.total_bytes) == ("Block", 12 * (2 * 16_000 + 6_100))
    assert (up.type_name, up.total_bytes) == ("Linear", 12 * (16_000 + 6_000))
    tops = sum(row.total_bytes for row in rows if not row.depth)
    assert tops == total_row(found).total_bytes == sum(each.total_bytes for each in found.layers)
    assert rows_of(found, depth=0) == []


def test_a_block_that_keeps_more_stands_by_itself():
    rows = rows_of(blocks(12, odd=5), depth=1)
    assert names(rows) == ["emb", "blocks.* (11 alike)", "blocks.5"]


def test_bytes_of_a_block_itself_are_a_row():
    own = [layer(0, "."), *(layer(1, f"{i}{end}") for i in range(3) for end in ("", ".up"))]
    modules = {".": "Net", **{one.name: "Block" for one in own[1::2]}}
    rows = rows_of(ledger(layers=own, modules=modules))
    assert names(rows) == ["Net itself", "* (3 alike)", "  itself", "  up"]


def test_single_layers_in_a_row_are_rows_of_their_own():
    own = [layer(1, f"features.{i}", activation_bytes=500) for i in (0, 2, 4)]
    assert names(rows_of(ledger(layers=own))) == ["features", "  0", "  2", "  4"]


@pytest.mark.parametrize("count", [0, 1, 2, 40, 400])
def test_a_page_of_rows_holds_every_byte(count: int):
    own = [layer(i, f"part{i}.{'x' * (i % 3 + 1)}", activation_bytes=i**3) for i in range(count)]
    found = ledger(layers=[layer(0, "emb"), *own])
    rows = rows_of(found)
    assert sum(row.total_bytes for row in rows if not row.depth) == total_row(found).total_bytes
    assert names(every_row(found)) == [each.name for each in found.layers]


def test_what_alike_layers_hold_is_one_line():
    held = tuple(Holding("activations", f"blocks.{i}.up", MIB, 2) for i in range(12))
    found = replace(ledger(), held=(*held, Holding("activations", "blocks.12.up", 2 * MIB, 2)))
    text = told(found)
    assert re.search(r"activations +blocks\.\*\.up \(12 alike\) +24 +12.0 MiB", text)
    assert re.search(r"activations +blocks\.12\.up +2 +2.00 MiB", text)


def test_the_terminal_unfolds_as_deep_as_asked():
    raw = io.StringIO()
    print_ledger(Console(file=raw, width=100), PLAN, blocks(3), KNOBS, depth=1)
    assert "blocks.* (3 alike)" in raw.getvalue()
    assert "down" not in raw.getvalue()
    print_ledger(Console(file=raw, width=100), PLAN, blocks(3), KNOBS, every_layer=True)
    assert "blocks.2.down" in raw.getvalue()


def test_the_most_bytes_of_each_phase_are_told():
    text = told(ledger())
    assert re.search(r"forward +51.0 MiB +53.0 MiB", text)
    assert re.search(r"backward +56.0 MiB +58.0 MiB", text)
    assert text.index("\n  input") < text.index("\n  forward") < text.index("\n  update")


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
    assert drawn.keys() == {"curve"}
    traces = {trace["name"]: trace for trace in drawn["curve"]["traces"]}
    assert list(traces) == ["parameters", "activations", "held by the process", "most in use"]
    assert max(traces["held by the process"]["y"]) == pytest.approx(58)
    assert traces["most in use"]["y"] == [pytest.approx(56)]
    assert traces["activations"]["low"] == traces["parameters"]["y"]
    assert max(traces["activations"]["y"]) == pytest.approx(56)
    budget = [mark for mark in drawn["curve"]["marks"] if mark["axis"] == "y"]
    assert [mark["value"] for mark in budget] == [pytest.approx(100)]
    # Only phases whose names have room are named.
    assert "backward" in [name for _, name in drawn["curve"]["x"]["ticks"]]


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
    lines = {trace["name"]: trace for trace in specs(page)["candidates"]["traces"]}
    assert lines["frontier"]["x"] == [1, 2, 3]
    assert lines["frontier"]["y"] == [3, 2, 1]
    assert "3.00 MiB" in page


def test_a_page_that_cannot_be_written_says_so(tmp_path: Path):
    with pytest.raises(InputError, match="cannot be written"):
        write_ledger(tmp_path / "no" / "m.html", PLAN, ledger(), KNOBS)
    with pytest.raises(InputError, match="folder"):
        write_whole(tmp_path, "text", "the page")
    assert list(tmp_path.iterdir()) == []
