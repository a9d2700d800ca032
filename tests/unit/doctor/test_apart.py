"""Probes in a process of their own: what hangs or crashes there is told, and stops nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anybatch.doctor.apart import Apart, Unanswered
from anybatch.doctor.facts import Enforcement, Pair, Torch
from anybatch.doctor.probes import AHEAD

GENEROUS = 60.0


@pytest.fixture
def apart() -> Iterator[Apart]:
    one = Apart()
    yield one
    one.close()


def test_an_answer_is_the_record_of_the_probe(apart: Apart):
    assert isinstance(apart.ask("enforcement", seconds=GENEROUS), Enforcement)


def test_one_that_crashes_is_told_and_the_next_is_answered(
    apart: Apart, broken_torch: Callable[[str], Path]
):
    broken_torch("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(Unanswered, match="was ended by SIGSEGV"):
        apart.ask("torch_build", seconds=GENEROUS)
    assert isinstance(apart.ask("enforcement", seconds=GENEROUS), Enforcement)


def test_one_that_hangs_is_told_and_the_next_is_answered(
    apart: Apart, broken_torch: Callable[[str], Path]
):
    broken_torch("import threading; threading.Event().wait()")
    with pytest.raises(Unanswered, match="no answer came within 1 s"):
        apart.ask("torch_build", seconds=1)
    assert isinstance(apart.ask("enforcement", seconds=GENEROUS), Enforcement)


def test_the_last_words_of_one_that_ends_are_told(
    apart: Apart, broken_torch: Callable[[str], Path]
):
    broken_torch("import os, sys; print('no licence', file=sys.stderr, flush=True); os._exit(3)")
    with pytest.raises(Unanswered, match=r"ended with status 3 \(no licence\)"):
        apart.ask("torch_build", seconds=GENEROUS)


def test_one_that_wants_to_exit_is_told(apart: Apart, broken_torch: Callable[[str], Path]):
    broken_torch("raise SystemExit('no licence')")
    with pytest.raises(Unanswered, match="SystemExit: no licence"):
        apart.ask("torch_build", seconds=GENEROUS)


def test_what_a_library_prints_is_not_taken_for_an_answer(
    apart: Apart, broken_torch: Callable[[str], Path]
):
    broken_torch("print('welcome')\nraise ImportError('libnone.so')")
    assert apart.ask("torch_build", seconds=GENEROUS) == Torch("ImportError: libnone.so")


def test_closing_it_ends_one_that_hangs(
    apart: Apart, broken_torch: Callable[[str], Path], tmp_path: Path
):
    begun = tmp_path / "begun"
    broken_torch(f"open({str(begun)!r}, 'w').close()\nimport threading; threading.Event().wait()")
    told: list[Unanswered] = []

    def ask() -> None:
        try:
            apart.ask("torch_build", seconds=GENEROUS)
        except Unanswered as error:
            told.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    waited = threading.Event()
    while not begun.exists() and thread.is_alive():
        waited.wait(0.01)
    apart.close()
    thread.join(GENEROUS)
    assert len(told) == 1
    with pytest.raises(Unanswered):  # and no other is started
        apart.ask("enforcement", seconds=GENEROUS)


@pytest.mark.slow
def test_two_processes_meet(apart: Apart, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert apart.ask("pair", AHEAD, seconds=GENEROUS) is None
    seen = apart.ask("pair", seconds=GENEROUS)
    assert seen == Pair(seen.interface)
    assert seen.interface
