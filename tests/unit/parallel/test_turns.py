"""One party runs at a time, in an order that no clock decides, and nobody waits in vain."""

import itertools
import threading

import hypothesis.strategies as st
import pytest
from hypothesis import given

from anybatch.errors import PeerFailed
from anybatch.parallel.turns import Turns


def play(scripts, interrupt=None):
    """Let parties follow their scripts: "r" runs, "p" passes on, "m" meets, "x" fails, "n" meets for
    something else. Returns what happened, in order."""
    size = len(scripts)
    events, running, ends = [], [], [None] * size
    turns = Turns(size, lambda i: running.remove(i), lambda i: running.append(i))

    def follow(party):
        turns.wait(party)
        running.append(party)
        try:
            for number, letter in enumerate(scripts[party]):
                assert running == [party]
                events.append((party, letter))
                if letter == "p":
                    turns.pass_on(party)
                elif letter in "mn":
                    met = turns.meet(party, letter, (party, number), tuple)
                    assert [who for who, _ in met] == list(range(size))
                elif letter == "x":
                    raise ValueError(f"party {party}")
            ends[party] = "done"
        except PeerFailed:
            ends[party] = "released"
        except ValueError as error:
            turns.break_off(str(error))
            ends[party] = "failed"
        running.remove(party)
        turns.end(party)

    threads = [threading.Thread(target=follow, args=(party,)) for party in range(size)]
    turns.begin()
    for thread in reversed(threads):
        thread.start()
    turns.wait_for_all()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return events, ends


def test_parties_run_in_their_order():
    events, ends = play(["rpr", "rpr", "rpr"])
    assert [party for party, _ in events] == [0, 0, 1, 1, 2, 2, 0, 1, 2]
    assert ends == ["done"] * 3


def test_the_last_to_meet_goes_on_and_the_others_follow():
    events, _ = play(["mr", "mr", "mr"])
    assert events == [(0, "m"), (1, "m"), (2, "m"), (2, "r"), (0, "r"), (1, "r")]


def test_who_waits_for_a_meeting_is_passed_over():
    events, ends = play(["mr", "ppmr"])
    assert events == [(0, "m"), (1, "p"), (1, "p"), (1, "m"), (1, "r"), (0, "r")]
    assert ends == ["done"] * 2


def test_meetings_follow_one_another():
    _, ends = play(["mpmnm", "mmpnm", "pmmnm"])
    assert ends == ["done"] * 3


@pytest.mark.parametrize("party", [0, 1, 2])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_failure_releases_those_who_wait(party, place):
    scripts = ["mpmr"] * 3
    scripts[party] = "mpmr"[:place] + "x"
    _, ends = play(scripts)
    assert ends == ["failed" if i == party else "released" for i in range(3)]


def test_a_party_that_has_ended_is_not_waited_for():
    assert play(["mm", "m", "mm"])[1] == ["released", "done", "released"]
    assert play(["", "m"])[1] == ["done", "released"]
    assert play(["m", ""])[1] == ["released", "done"]


def test_different_meetings_are_told():
    _, ends = play(["m", "n"])
    assert ends == ["released", "released"]


@given(st.lists(st.text("rpmnx", max_size=6), min_size=1, max_size=4))
def test_any_play_ends_and_is_always_the_same(scripts):
    events, ends = play(scripts)
    assert None not in ends
    assert play(scripts) == (events, ends)
    meetings = [[letter for letter in script if letter in "mn"] for script in scripts]
    if not any("x" in script for script in scripts) and all(
        a == b for a, b in itertools.pairwise(meetings)
    ):
        assert set(ends) == {"done"}


def test_an_error_of_combining_is_raised_by_all():
    turns = Turns(2, lambda i: None, lambda i: None)
    caught = []

    def follow(party):
        turns.wait(party)
        with pytest.raises(ZeroDivisionError):
            turns.meet(party, "m", party, lambda values: 1 // 0)
        caught.append(party)
        turns.end(party)

    threads = [threading.Thread(target=follow, args=(party,)) for party in range(2)]
    turns.begin()
    for thread in threads:
        thread.start()
    turns.wait_for_all()
    for thread in threads:
        thread.join()
    assert caught == [1, 0]
