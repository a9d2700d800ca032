"""The rule: which end was the cause, and whether ranks are started again."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from anybatch.errors import InputError, NoPlanFits, PeerLost, Stopped, Stuck
from anybatch.launch import exits
from anybatch.launch.exits import End, first, mended, read, write_word

SECOND = 10**9
KILLED = -signal.SIGKILL


def end(
    when: int = 0,
    rank: int = 0,
    status: int = 1,
    mended: bool = False,
    spoke: bool = True,
) -> End:
    return End(rank, rank, 100 + rank, "node1", status, when, spoke, mended, "it failed")


def good(rank: int) -> End:
    return end(rank=rank, status=0)


# --------------------------------------------------------------------------------------- one's own end


@pytest.fixture
def word(tmp_path: Path) -> Path:
    return tmp_path / "0-1.word"


def read_end(word: Path, code: int, ended: int | None = 9 * SECOND) -> End:
    return read(
        word,
        rank=3,
        local_rank=1,
        pid=7,
        machine="node1",
        code=code,
        ended=ended,
        start=2 * SECOND,
    )


@pytest.mark.parametrize(
    ("code", "mended", "what"),
    [
        (KILLED, True, "killed by SIGKILL (the system kills so when memory runs out)"),
        (-signal.SIGSEGV, True, "killed by SIGSEGV"),
        (-signal.SIGTERM, True, "killed by SIGTERM"),
        (9, True, "exited with status 9"),
        (0, False, "exited with status 0"),
        (2, False, "exited with status 2"),
        (3, False, "exited with status 3"),
        (75, False, "exited with status 75"),
    ],
    ids=str,
)
def test_a_death_without_a_word_is_mended_unless_its_status_speaks(
    code: int, mended: bool, what: str, word: Path
):
    found = read_end(word, code)
    assert (found.status, found.spoke, found.mended) == (code, False, mended)
    assert found.what == f"it was {what}" if code < 0 else f"it {what}"
    assert not found.is_good


@pytest.mark.parametrize(
    ("status", "error", "mended", "what"),
    [
        (2, InputError("no such file"), False, "InputError: no such file"),
        (1, PeerLost("rank 1 is gone"), True, "PeerLost: rank 1 is gone"),
        (1, ArithmeticError(), False, "ArithmeticError"),
        (1, MemoryError("no room"), True, "MemoryError: no room"),
        (3, NoPlanFits("no plan fits"), False, "NoPlanFits: no plan fits"),
        (75, SystemExit(75), False, "it exited with status 75"),
        (3, None, False, "it exited with status 3"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_a_rank_says_counts_from_when_it_told(
    status: int, error: BaseException | None, mended: bool, what: str, word: Path
):
    exits.forget()
    failure = exits.note(error)
    exits.forget()
    write_word(word, status, failure)
    found = read_end(word, status)
    assert (found.status, found.spoke, found.mended) == (status, True, mended)
    assert found.what == what
    assert found.when == failure.when - 2 * SECOND


@pytest.mark.parametrize(
    ("error", "sentence", "stack", "stopped", "by_agent"),
    [
        (
            Stuck("rank 1 hangs.\n  thread A\n    b()"),
            "Stuck: rank 1 hangs",
            "  thread A\n    b()",
            "",
            False,
        ),
        (PeerLost("rank 1 hangs.\n  thread A"), "PeerLost: rank 1 hangs", "  thread A", "", True),
        (ValueError("a\nb."), "ValueError: a\nb", "", "", False),
        (Stopped("it has stopped."), "Stopped: it has stopped", "", "it has stopped.", True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_is_told_of_an_end_and_by_whom(
    error: BaseException, sentence: str, stack: str, stopped: str, by_agent: bool, word: Path
):
    exits.forget()
    write_word(word, 1, exits.note(error))
    exits.forget()
    found = read_end(word, 1)
    assert (found.sentence, found.stack, found.was_stopped) == (sentence, stack, stopped)
    assert found.is_reported_by_agent == by_agent
    assert replace(found, spoke=False).is_reported_by_agent


def test_what_was_noted_stands_for_a_word_that_never_came(word: Path):
    write_word(word.with_suffix(".noted"), 1, exits.Failure(5 * SECOND, False, "ValueError: a"))
    for code in (-signal.SIGTERM, -signal.SIGSEGV):
        found = read_end(word, code, ended=None)
        assert (found.when, found.spoke, found.what) == (3 * SECOND, False, "ValueError: a")


def test_a_good_word_does_not_hide_a_death_after_it(word: Path):
    write_word(word, 0, exits.Failure(5 * SECOND, False, ""))
    assert read_end(word, 0).is_good
    assert not read_end(word, KILLED).is_good
    assert read_end(word, KILLED).mended


def test_a_death_comes_before_what_its_peers_felt_of_it(word: Path):
    peers = end(when=7 * SECOND - 10**8, rank=0, mended=True)
    assert first([peers, read_end(word, KILLED)]) == read_end(word, KILLED)
    # but the agent's own signal, and what follows it, comes after
    assert first([peers, read_end(word, -signal.SIGTERM)]) == peers
    assert first([peers, read_end(word, KILLED, ended=None)]) == peers


def test_a_death_that_is_seen_late_comes_before_what_its_peers_felt_of_it(word: Path):
    felt = replace(end(when=SECOND, mended=True), what="PeerLost: rank 3 is gone")
    killed = read_end(word, KILLED)
    assert first([felt, killed]) == killed
    assert first([felt, good(1)]) == felt
    assert first([felt, read_end(word, KILLED, ended=None)]) == felt
    noted = replace(
        felt, when=2 * SECOND, rank=1, spoke=False
    )  # it was ended before it could say so
    assert first([felt, noted]) == felt


# --------------------------------------------------------------------------------------------- the rule


def test_the_earliest_of_all_machines_is_the_cause():
    late, early = end(when=2, mended=True), end(when=1, rank=5)
    assert first([late, early]) == early
    assert not mended([late, early], ())
    assert mended([late], ())
    follower = replace(
        end(when=1, rank=2), what="PeerFailed: rank 0 failed in step 3 with a KeyError."
    )
    assert first([late, follower]) == late
    assert first([good(0), follower]) == follower
    assert first([replace(late, spoke=False), follower]) == follower
    assert first([good(0), good(1)]) is None


def test_a_machine_that_is_silent_is_the_cause_of_what_others_say():
    assert mended([end(rank=1)], ["node1"])
    assert mended([], ["node1"])
    assert not mended([], ())
