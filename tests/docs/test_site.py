"""The site of the documents: every page is in its navigation, in both languages, and every public name
has an entry. `make site` builds it, and follows its links."""

from __future__ import annotations

import json
import re
import shlex

from tests.docs.reading import ROOT, text_of

import anybatch
from anybatch.recipes.registry import options_of

ENGLISH_ONLY = {
    "log.md",
    "tutorial.md",
    "source/CONTRIBUTING.md",
    *(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs/floors").glob("*.md")),
    *(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs/reference").glob("*.md")),
}


def pages(config: str) -> list[str]:
    navigation = text_of(config).partition("\nnav:\n")[2]
    return re.findall(r"^ *- (?:.*: )?([\w./]+\.md)$", navigation, re.MULTILINE)


def test_every_document_is_in_the_navigation():
    documents = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    english = {name for name in documents if not name.startswith("zh/")}
    chinese = {name.removeprefix("zh/") for name in documents - english}
    made = {"index.md", "tutorial.md", "source/CONTRIBUTING.md"}
    assert set(pages("mkdocs.yml")) == english | made
    assert set(pages("mkdocs.zh.yml")) == chinese


def test_both_languages_have_the_same_pages_in_the_same_order():
    english = [name for name in pages("mkdocs.yml") if name not in ENGLISH_ONLY]
    chinese = ["index.md" if name == "README.md" else name for name in pages("mkdocs.zh.yml")]
    assert chinese == english


def test_every_public_name_is_in_the_reference():
    entries = [
        name
        for path in (ROOT / "docs/reference").glob("*.md")
        for name in re.findall(r"^::: anybatch\.(\w+)$", path.read_text(), re.MULTILINE)
    ]
    assert sorted(entries) == sorted(anybatch.__all__)


def test_the_grid_of_the_memory_page_can_be_looked_up():
    """Plans are in order: more bytes buy less time. A command belongs to each row."""
    text = text_of("docs/site/memory-grid.js")
    grid = json.loads(text.partition("=")[2].strip().removesuffix(";"))
    assert grid["rows"].keys() == grid["commands"].keys()
    assert {name.split()[0] for name in grid["rows"]} <= grid["models"].keys()
    for points in grid["rows"].values():
        peaks, seconds = [point[0] for point in points], [point[1] for point in points]
        assert peaks == sorted(set(peaks))
        assert seconds == sorted(seconds, reverse=True)
        assert all(f"micro-batch {point[2]}," in point[3] for point in points)
    # A plan leaves a fortieth of a card free.
    assert grid["budgets"]["24GiB"] == 24 * 2**30 - 24 * 2**30 // 40


def test_recipes_have_the_options_of_the_commands_of_the_memory_page():
    text = text_of("docs/site/memory-grid.js")
    grid = json.loads(text.partition("=")[2].strip().removesuffix(";"))
    for command in grid["commands"].values():
        task, *words = shlex.split(command)
        options = dict(word.split("=") for word in words if word != "-s")
        if task == "my_task.py":  # the reader's own
            assert not options
            continue
        known = {option.name: option for option in options_of(task)}
        assert options.keys() <= known.keys(), command
