"""Checks in a child process: what hangs or crashes there is an answer too, and stops no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anybatch.doctor.examine import Child, Unanswered
from anybatch.doctor.ranks import AHEAD

GENEROUS = 60.0


@pytest.fixture
def child() -> Iterator[Child]:
    one = Child()
    yield one
    one.end()


def test_an_answer_is_what_the_check_saw(child: Child):
    assert child.ask("enforcement", seconds=GENEROUS).keys() == {"fault"}


def test_one_that_crashes_is_told_and_the_next_is_answered(
    child: Child, broken_torch: Callable[[str], Path]
):
    broken_torch("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(Unanswered, match="was ended by SIGSEGV"):
        child.ask("torch", seconds=GENEROUS)
    assert child.ask("enforcement", seconds=GENEROUS).keys() == {"fault"}


def test_one_that_hangs_is_told_and_the_next_is_answered(
    child: Child, broken_torch: Callable[[str], Path]
):
    broken_torch("import threading; threading.Event().wait()")
    with pytest.raises(Unanswered, match="no answer came within 1 s"):
        child.ask("torch", seconds=1)
    assert child.ask("enforcement", seconds=GENEROUS).keys() == {"fault"}


def test_the_last_words_of_one_that_ends_are_told(
    child: Child, broken_torch: Callable[[str], Path]
):
    broken_torch("import os, sys; print('no licence', file=sys.stderr, flush=True); os._exit(3)")
    with pytest.raises(Unanswered, match=r"ended with status 3 \(no licence\)"):
        child.ask("torch", seconds=GENEROUS)


def test_one_that_wants_to_exit_is_told(child: Child, broken_torch: Callable[[str], Path]):
    broken_torch("raise SystemExit('no licence')")
    with pytest.raises(Unanswered, match="SystemExit: no licence"):
        child.ask("torch", seconds=GENEROUS)


def test_what_a_library_prints_is_not_taken_for_an_answer(
    child: Child, broken_torch: Callable[[str], Path]
):
    broken_torch("print('welcome')\nraise ImportError('libnone.so')")
    assert child.ask("torch", seconds=GENEROUS)["fault"] == "ImportError: libnone.so"


@pytest.mark.slow
def test_two_processes_meet(child: Child, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert child.ask("pair", AHEAD, seconds=GENEROUS) is None
    seen = child.ask("pair", seconds=GENEROUS)
    assert seen["fault"] == ""
    assert seen["interface"]
