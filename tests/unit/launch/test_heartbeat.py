"""What machines say of themselves: heard by the others, agreed on, and missed when they fall silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from torch.distributed import PrefixStore, TCPStore

from anybatch.launch import heartbeat
from anybatch.launch.exits import End, Verdict, Word
from anybatch.launch.heartbeat import Heartbeat, Lost
from anybatch.launch.network import LOOPBACK, Deadline, meet

SECONDS = 60.0
BAD = End(0, 0, 7, "node0", 1, 5, True, True, "PeerLost: it is gone")


@pytest.fixture
def store() -> TCPStore:
    return meet(LOOPBACK, 0, "host", Deadline(SECONDS), listen=LOOPBACK)


@pytest.fixture
def two(store: TCPStore) -> Iterator[tuple[Heartbeat, Heartbeat]]:
    """Two machines that have met; the second has come late."""
    both = [Heartbeat(store, f"node{i}", lambda: 3) for i in (0, 1)]
    both[0].attempt, both[0].failures = 4, 1
    threads = [
        threading.Thread(target=one.open, args=(PrefixStore("m", store.clone()), i, 2, "here"))
        for i, one in enumerate(both)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield both[0], both[1]
    closing = [threading.Thread(target=one.close) for one in both]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_machines_count_alike_and_hear_each_other(two: tuple[Heartbeat, Heartbeat]):
    one, other = two
    for each in two:
        assert (each.attempt, each.failures, each.names) == (5, 1, ("node0", "node1"))
        assert each.heard() == [Word(), Word()]
    other.say(done=True)
    wait_until(lambda: one.words[1].done)
    assert not one.words[0].done
    wait_until(lambda: other.waiting == 3)


def test_all_go_by_one_verdict(two: tuple[Heartbeat, Heartbeat]):
    one, other = two
    one.say(told=True, first=BAD)
    other.say(told=True)
    # Each would come to another, since it was given another number.
    verdicts = [
        each.verdict(restarts=restarts, least=1, most=2)
        for each, restarts in ((one, 9), (other, 0))
    ]
    assert verdicts == [Verdict(True, 2, BAD)] * 2
    assert [each.failures for each in two] == [2, 2]


def test_a_machine_that_falls_silent_is_missed_unless_it_has_told(
    two: tuple[Heartbeat, Heartbeat], monkeypatch: pytest.MonkeyPatch
):
    one, other = two
    other._closing.set()
    assert other._thread is not None
    other._thread.join()
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 1.0)
    wait_until(lambda: one.heard()[1] is None)
    assert one.heard()[0] is not None
    one.words[1] = Word(told=True)
    assert one.heard()[1] == Word(told=True)


def test_a_machine_that_has_slept_misses_nobody(
    two: tuple[Heartbeat, Heartbeat], monkeypatch: pytest.MonkeyPatch
):
    later = SimpleNamespace(
        monotonic=lambda: time.monotonic() + 3600, monotonic_ns=time.monotonic_ns, sleep=time.sleep
    )
    monkeypatch.setattr(heartbeat, "time", later)
    assert None not in two[0].heard()


def test_a_store_that_does_not_answer_is_lost(
    two: tuple[Heartbeat, Heartbeat], monkeypatch: pytest.MonkeyPatch
):
    silent = threading.Event()
    monkeypatch.setattr(two[0], "_speak_and_listen", silent.wait)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 1.0)

    wait_until(lambda: is_lost(two[0]))
    assert two[0].lost == "it has not answered for 1 s"
    silent.set()


def is_lost(one: Heartbeat) -> bool:
    try:
        one.check()
    except Lost:
        return True
    return False


def test_one_machine_agrees_with_itself():
    alone = Heartbeat(None, "node0", None)
    alone.open(None, 0, 1, "")  # type: ignore[arg-type]
    alone.say(told=True, first=BAD)
    assert alone.verdict(restarts=1, least=1, most=1) == Verdict(True, 1, BAD)
    assert alone._thread is None
