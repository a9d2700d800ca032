"""Looks in a child process: what hangs or crashes there is an answer too, and stops no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from anybatch.doctor.examine import ask, examine

GENEROUS = 60.0


def test_an_answer_is_what_the_look_saw():
    answers = ask({"enforcement": GENEROUS, "folders": GENEROUS})
    assert list(answers) == ["enforcement", "folders"]
    assert answers["enforcement"]["seen"].keys() == {"fault"}


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
def test_one_that_crashes_or_hangs_keeps_no_other_from_answering(
    broken_torch: Callable[[str], Path], code: str, ending: str
):
    broken_torch(code)
    seconds = 1 if "wait" in code else GENEROUS
    answers = ask({"enforcement": GENEROUS, "torch": seconds, "folders": GENEROUS})
    assert [name for name, answer in answers.items() if "seen" in answer] == [
        "enforcement",
        "folders",
    ]
    assert ending in answers["torch"]["why"]


def test_what_a_crash_leaves_unknown_is_that_look_alone(broken_torch: Callable[[str], Path]):
    broken_torch("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    report = examine()
    assert "torch" in report.named("problem")
    assert report.facts["torch"] is None
    subjects = ("gpus", "host", "enforcement", "folders", "network", "python")
    assert [name for name in subjects if report.facts[name] is None] == []


def test_one_that_wants_to_exit_is_told(broken_torch: Callable[[str], Path]):
    broken_torch("raise SystemExit('no licence')")
    assert ask({"torch": GENEROUS}) == {"torch": {"why": "SystemExit: no licence"}}


def test_what_a_library_prints_is_not_taken_for_an_answer(broken_torch: Callable[[str], Path]):
    broken_torch("print('welcome')\nraise ImportError('libnone.so')")
    answer = ask({"torch": GENEROUS})["torch"]
    assert answer["seen"]["fault"] == "ImportError: libnone.so"


@pytest.mark.slow
def test_two_processes_meet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    seen = ask({"pair": GENEROUS})["pair"]["seen"]
    assert seen["fault"] == ""
    assert seen["interface"]
