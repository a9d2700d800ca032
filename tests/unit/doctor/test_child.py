"""Looks in a child process: what hangs or crashes there is an answer too, and stops no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from anybatch.doctor.examine import ask, examine

GENEROUS = 60.0


def test_an_answer_is_what_the_look_saw():
    answers, ending = ask({"enforcement": GENEROUS, "folders": GENEROUS})
    assert list(answers) == ["enforcement", "folders"]
    is_seen, value = answers["enforcement"]
    assert is_seen
    assert value.keys() == {"fault"}
    assert "status 0" in ending


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
        ("import threading; threading.Event().wait()", "no answer came within 1 s"),
        (
            "import os, sys; print('no licence', file=sys.stderr, flush=True); os._exit(3)",
            "ended with status 3 (no licence)",
        ),
    ],
)
def test_one_that_crashes_or_hangs_leaves_the_answers_before_it(
    broken_torch: Callable[[str], Path], code: str, ending: str
):
    broken_torch(code)
    seconds = 1 if "wait" in code else GENEROUS
    answers, found = ask({"enforcement": GENEROUS, "torch": seconds, "folders": GENEROUS})
    assert list(answers) == ["enforcement"]
    assert ending in found


def test_looks_after_one_that_crashes_are_answered(broken_torch: Callable[[str], Path]):
    broken_torch("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    report = examine()
    assert "torch" in report.named("problem")
    assert report.facts["torch"] is None
    subjects = ("gpus", "host", "enforcement", "folders", "network", "python")
    assert [name for name in subjects if report.facts[name] is None] == []


def test_one_that_wants_to_exit_is_told(broken_torch: Callable[[str], Path]):
    broken_torch("raise SystemExit('no licence')")
    assert ask({"torch": GENEROUS})[0]["torch"] == (False, "SystemExit: no licence")


def test_what_a_library_prints_is_not_taken_for_an_answer(broken_torch: Callable[[str], Path]):
    broken_torch("print('welcome')\nraise ImportError('libnone.so')")
    is_seen, value = ask({"torch": GENEROUS})[0]["torch"]
    assert is_seen
    assert value["fault"] == "ImportError: libnone.so"


@pytest.mark.slow
def test_two_processes_meet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    is_seen, value = ask({"pair": GENEROUS})[0]["pair"]
    assert is_seen
    assert value["fault"] == ""
    assert value["interface"]
