"""The line that says what is being done is for people who watch."""

from __future__ import annotations

from io import StringIO

import pytest

from anybatch.cli.waiting import Waiting


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_each_sentence_is_written_over_the_last_and_none_is_left():
    stream = Terminal()
    with Waiting("planning:", stream) as waiting:
        waiting("candidate 1")
        waiting("candidate " + "2" * 400)
    lines = stream.getvalue().split("\r\x1b[K")
    assert lines[1:3] == ["planning:", "planning: candidate 1"]
    assert lines[3].startswith("planning: candidate 22")
    assert len(lines[3]) < 400
    assert lines[4] == ""


def test_files_and_pipes_get_nothing():
    stream = StringIO()
    with Waiting("planning:", stream) as waiting:
        waiting("candidate 1")
    assert stream.getvalue() == ""


def test_without_standard_error_nothing_is_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr", None)
    with Waiting("planning:") as waiting:
        waiting("1 of 2")
