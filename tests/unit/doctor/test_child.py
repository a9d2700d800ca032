"""Checks in a child process: what hangs or crashes there is a finding too, and stops no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from anybatch.doctor.examine import CHECKS, examine, run


@pytest.mark.parametrize(
    ("code", "words", "remedy"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "was ended by SIGILL", "build"),
        ("import threading; threading.Event().wait()", "no answer came within 1 s", "disk"),
        ("import os; os.write(2, b'no licence'); os._exit(3)", "status 3 (no licence)", "disk"),
        ("raise SystemExit('no licence')", "SystemExit: no licence", "disk"),
    ],
)
def test_one_that_crashes_or_hangs_keeps_no_other_from_answering(
    broken_torch: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    words: str,
    remedy: str,
):
    broken_torch(code)
    if "wait" in code:
        soon = CHECKS["torch"]._replace(seconds=1)
        monkeypatch.setitem(CHECKS, "torch", soon)
    found = run(["environment", "torch", "folders"])
    assert [one.name for one in found["folders"]] == ["runs", "cache", "temporary files"]
    assert found["environment"]
    (told,) = found["torch"]
    assert (told.name, told.value, told.level) == ("torch", "not checked to the end", "problem")
    assert words in told.meaning
    assert remedy in told.remedy


def test_what_was_found_before_a_crash_is_kept(broken_torch: Callable[[str], Path]):
    broken_torch("import os; os._exit(3)")
    report = examine()
    assert report.named("problem") == ["torch"]
    assert all(group for title, group in report.groups.items())


def test_what_a_library_prints_is_not_taken_for_a_finding(broken_torch: Callable[[str], Path]):
    broken_torch("print('welcome')\nraise ImportError('libnone.so')")
    (told,) = run(["torch"])["torch"]
    assert told.meaning == "ImportError: libnone.so"


@pytest.mark.nightly
def test_two_processes_meet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    backends, gloo = run(["gloo"])["gloo"]
    assert (backends.name, backends.level) == ("backends", "ok")
    assert gloo.level == "ok", gloo.sentence
