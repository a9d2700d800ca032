"""Errors are sentences for people."""

from __future__ import annotations

from anybatch.errors import (
    InputError,
    as_setting,
    listed,
    shortened,
    worded,
    worded_for_command_line,
)


def test_names_are_listed_as_people_count():
    names = ["blocks.10", "head", "blocks.2", "blocks.1"]
    assert listed(names) == "'blocks.1', 'blocks.2', 'blocks.10' or 'head'"
    assert listed([10, 9]) == "'9' or '10'"
    assert listed(["one"]) == "'one'"
    assert listed([]) == "nothing"


def test_what_was_most_likely_meant_comes_first():
    names = [*(f"blocks.{i}" for i in range(12)), "embed", "head"]
    assert listed(names, "headd").startswith("'head', 'blocks.0', 'blocks.1', 'blocks.2'")
    assert listed(names, "nothing like it").startswith("'blocks.0'")


def test_a_value_of_thousands_of_characters_is_cut():
    text = str(InputError(f"size is {'x' * 50_000!r}: give a smaller one.\nand more"))
    assert text.startswith("size is 'xxx")
    assert text.endswith("give a smaller one.\nand more")
    assert "characters left out" in text
    assert len(text) < 2200
    assert shortened("x" * 200) == "x" * 200
    assert shortened("ab" * 200, 100).startswith("ab" * 25 + " ... (300 characters left out) ... ")


def test_settings_are_named_as_in_the_interface_that_is_used():
    def named() -> list[str]:
        given = as_setting("memory", "1GiB"), as_setting("micro_batch", 4), as_setting("out")
        return [*given, as_setting("resume", True), worded("settings=", "-s")]

    in_python = ['memory="1GiB"', "micro_batch=4", "out=", "resume=True", "settings="]
    assert named() == in_python
    with worded_for_command_line():
        assert named() == ["--memory 1GiB", "--micro-batch 4", "--out", "--resume", "-s"]
    assert named() == in_python
