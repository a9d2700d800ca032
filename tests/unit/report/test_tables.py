"""Sections and tables in terminals of several widths."""

import io

import pytest
from rich.console import Console

from anybatch.report.tables import Section, Table, print_sections

TABLE = Table(
    [
        ("layer", "words"),
        ("type", "words"),
        ("buffers", "number"),
        ("activations", "number"),
        ("all", "number"),
    ],
    [["blocks.* (4 alike)", "Block", "32.0 KiB", "22.1 MiB", "25.2 MiB"]],
    ["type", "buffers"],
)


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (60, ["layer", "type", "buffers", "activations", "all"]),
        (59, ["layer", "buffers", "activations", "all"]),
        (52, ["layer", "activations", "all"]),
    ],
)
def test_a_narrow_terminal_omits_columns_and_cuts_none(width: int, titles: list[str]):
    console = Console(file=io.StringIO(), width=width)
    print_sections(console, [Section("By layer", table=TABLE)])
    title, header, _, row, *_ = console.file.getvalue().splitlines()
    assert title == "By layer"
    assert header.split() == titles
    assert row.endswith(" 25.2 MiB")
    assert ("32.0 KiB" in row) == ("buffers" in titles)
    assert max(len(header), len(row)) <= width
