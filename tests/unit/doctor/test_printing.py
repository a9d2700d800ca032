"""Findings in a terminal: rows of at most its width, and a last line that counts."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from anybatch.doctor.finding import Finding, Report

WELL = Report({"GPUs": [Finding("driver", "580.82, for CUDA up to 13.0")], "Folders": []})
BROKEN = Report(
    {
        "torch": [
            Finding("torch", "2.13.0"),
            Finding("steps on cpu", "wrong or failed", "problem", "weights came to nan", "restart"),
        ],
        "GPUs": [
            Finding("CUDA_VISIBLE_DEVICES", "'7'", "problem", "none", "unset it", "environment")
        ],
        "Folders": [
            Finding("/dev/shm", "1.00 MiB", "warning", "workers that load data " * 9, "enlarge it"),
            Finding("cache", "/a/very/long/path" * 12, "warning", "denied", "set another"),
        ],
    }
)


def shown(report: Report, width: int = 80) -> str:
    text = io.StringIO()
    report.print(Console(file=text, width=width, highlight=False))
    return text.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_longer_than_the_terminal_and_none_ends_with_spaces(width: int):
    lines = shown(BROKEN, width).splitlines()
    assert max(map(len, lines)) <= width
    assert [line for line in lines if line != line.rstrip()] == []


def test_below_what_is_not_well_stands_what_it_means():
    lines = shown(BROKEN).splitlines()
    row = next(i for i, line in enumerate(lines) if "/dev/shm" in line)
    assert lines[row].split()[:2] == ["warning", "/dev/shm"]
    assert lines[row + 1].startswith(" " * 11 + "Workers that load data")


def test_the_last_line_counts_problems_and_warnings():
    last = " ".join(shown(BROKEN).split("\n\n")[-1].split())
    assert last == (
        "2 problems (steps on cpu, CUDA_VISIBLE_DEVICES), 2 warnings (/dev/shm, cache)."
    )
    assert shown(WELL).splitlines()[-1] == "No problem was found."


def test_groups_without_findings_are_left_out():
    assert "GPUs" in shown(WELL)
    assert "Folders" not in shown(WELL)


def test_the_report_is_json_with_counts_and_findings():
    content = json.loads(json.dumps(BROKEN.to_dict()))
    assert content["counts"]["problem"] == 2
    assert sum(content["counts"].values()) == len(content["findings"])
    (one,) = [one for one in content["findings"] if one["name"] == "CUDA_VISIBLE_DEVICES"]
    assert one.keys() == {"group", "name", "value", "level", "place", "meaning", "remedy"}
    assert (one["group"], one["value"], one["place"]) == ("GPUs", "'7'", "environment")
