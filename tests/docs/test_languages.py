"""The Chinese pages follow the English ones: the same headings, code, tables and figures."""

from __future__ import annotations

import re

import pytest
from tests.docs.reading import ROOT, blocks, text_of

PAGES = (
    "README.md",
    "guide.md",
    "words.md",
    "concepts.md",
    "commands.md",
    "ranks.md",
    "survival.md",
    "evidence.md",
    "start.md",
    "reference.md",
    "memory.md",
    *(f"howto/{path.name}" for path in sorted((ROOT / "docs/howto").glob("*.md"))),
)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_NO_FIGURES = re.compile(r"\]\([^)]*\)|`[^`]*`|^    .*$|\b\d{4}\b", re.MULTILINE)
_FIGURE = re.compile(r"(?<![\w.-])\d(?:[\d,]*\d)?(?:\.\d+)?(?:e-\d+)?")


def sections(page: str) -> list[tuple[str, str]]:
    """(level of the heading, as `##`; text below it without fenced code) in order."""
    parts = re.split(r"^(#+) .*$", _FENCED.sub("", text_of(page)), flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def both(name: str) -> tuple[str, str]:
    return (name if name == "README.md" else f"docs/{name}", f"docs/zh/{name}")


@pytest.mark.parametrize("name", PAGES)
def test_code_blocks_are_the_same(name):
    original, translated = map(blocks, both(name))
    assert [(b.language, b.text) for b in translated] == [(b.language, b.text) for b in original]


@pytest.mark.parametrize("name", PAGES)
def test_headings_have_the_same_levels_in_the_same_order(name):
    original, translated = map(sections, both(name))
    assert [level for level, _ in translated] == [level for level, _ in original]


@pytest.mark.parametrize("name", PAGES)
def test_sections_have_the_same_tables_and_figures(name):
    """A section promises by its rows and its figures: digits outside of code, without years."""

    def promises(text: str) -> tuple[int, set[str]]:
        rows = len(re.findall(r"^\|", text, re.MULTILINE))
        return rows, set(_FIGURE.findall(_NO_FIGURES.sub("", text)))

    original, translated = ([promises(text) for _, text in sections(page)] for page in both(name))
    assert translated == original
