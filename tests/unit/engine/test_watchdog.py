"""Who hangs is found by what is seen of it, under a clock that the tests turn."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import pytest

from anybatch.engine.balance import Stragglers
from anybatch.engine.watchdog import (
    FIRST_SECONDS,
    LEAST_SECONDS,
    Heard,
    Pulse,
    Stall,
    Watchdog,
    Word,
    judged,
    stacks,
    waits_for_others,
)
from anybatch.errors import AnybatchError, InputError, PeerLost, Stuck

# --------------------------------------------------------------------------------------- how long


def still_after(stillness: Stall, looks: Sequence[tuple[float, int, str]]) -> list[float]:
    """What each look (elapsed, beats, phase) returns."""
    return [stillness.observe(*look) for look in looks]


def test_stillness_counts_from_the_last_sign_of_life():
    stillness = Stall(10.0)
    ended = still_after(stillness, [(1, 0, "forward"), (4, 0, "forward"), (5, 0, "forward")])
    assert (ended, stillness.seconds, stillness.is_over) == ([0, 0, 0], 9, False)
    assert stillness.observe(1, 0, "forward") == 0
    assert stillness.is_over
    assert stillness.observe(1, 1, "forward") == 10  # it has gone on
    assert not stillness.is_over


def test_a_new_phase_is_a_sign_of_life():
    stillness = Stall(10.0)
    still_after(stillness, [(1, 0, "forward"), (9, 0, "forward"), (9, 0, "backward")])
    assert stillness.seconds == 0


def test_rest_between_steps_does_not_count():
    stillness = Stall(10.0)
    still_after(stillness, [(1, 0, ""), (1000, 0, ""), (1000, 0, "")])
    assert not stillness.is_over


def test_what_is_done_for_the_first_time_may_take_longer():
    stillness = Stall()
    stillness.observe(0, 0, "forward", is_first=True)
    assert stillness.limit == FIRST_SECONDS
    still_after(stillness, [(1000, 0, "forward"), (1, 1, "loading")])
    assert stillness.limit == LEAST_SECONDS  # the first time is no measure of the later ones


def test_the_first_block_of_its_kind_is_known():
    pulse = Pulse()
    with pulse.at_work("loading"):
        assert pulse.is_first
    with pulse.at_work("loading"):
        assert not pulse.is_first
        with pulse.at_work("evaluation"):
            assert pulse.is_first
        assert not pulse.is_first


def test_saving_shows_no_sign_of_life_and_gets_the_long_deadline():
    pulse = Pulse()
    for _ in range(2):
        with pulse.at_work("saving"):
            assert pulse.is_first


def test_the_deadline_grows_with_what_was_survived():
    stillness = Stall()
    still_after(stillness, [(0, 0, "forward"), (1, 1, "forward"), (100, 1, "forward")])
    assert stillness.limit == LEAST_SECONDS
    assert stillness.observe(1, 2, "forward") == 100
    assert stillness.limit == 2000


# ------------------------------------------------------------------------------------------- who

BUSY = Word(step=3, phase="forward", still=10, limit=10)
WAITS = replace(BUSY, phase="update", waits=True)


def heard(rank: int, word: Word | None, silent: float = 0.0) -> Heard:
    return Heard(rank, word, silent)


def test_a_rank_that_hangs_in_its_own_work_names_itself():
    found = judged("rank 1 of 3", BUSY, [heard(0, WAITS), heard(2, WAITS)], silence=5)
    assert isinstance(found, Stuck)
    assert str(found).startswith("rank 1 of 3 has made no progress for 10 s in step 3, forward")


def test_a_rank_that_waits_gives_the_others_time_to_tell_it_themselves():
    others = [heard(1, BUSY)]
    assert judged("rank 0 of 2", WAITS, others, silence=5) is None
    late = replace(WAITS, still=15)
    found = judged("rank 0 of 2", late, [heard(1, replace(BUSY, still=14))], silence=5)
    assert isinstance(found, PeerLost)
    assert "rank 1 has made no progress for 14 s in step 3, forward" in str(found)


def test_a_rank_that_makes_progress_is_waited_for():
    slow = heard(1, replace(BUSY, still=2))
    assert judged("rank 0 of 2", replace(WAITS, still=1000), [slow], silence=5) is None


def test_a_rank_at_rest_is_waited_for():
    resting = heard(1, Word(step=3, phase="", limit=10))
    assert judged("rank 0 of 2", replace(WAITS, still=1000), [resting], silence=5) is None


def test_a_process_that_says_nothing_is_named():
    late = replace(WAITS, still=20)
    silent = heard(2, replace(BUSY, still=0, phase="backward"), silent=640)
    found = judged("rank 0 of 3", late, [heard(1, late), silent], silence=5)
    assert isinstance(found, PeerLost)
    assert str(found).startswith("rank 2 was last heard of ")
    assert "s ago, in step 3, backward; rank 0 of 3 has waited for 20 s" in str(found)


def test_a_rank_that_never_spoke_is_named():
    found = judged("rank 0 of 2", replace(WAITS, still=20), [heard(1, None, 10)], silence=5)
    assert "rank 1 was never heard of" in str(found)


def test_a_rank_that_has_left_is_not_missed():
    gone = heard(1, Word(step=3, phase="left"), silent=1000)
    assert judged("rank 0 of 2", replace(WAITS, still=1000), [gone], silence=5) is None


def test_a_rank_that_is_ahead_of_one_that_hangs_is_not_blamed():
    """As in a pass whose backward, in C++, waits for the others' gradients."""
    ahead = replace(BUSY, phase="backward")
    assert judged("rank 0 of 2", ahead, [heard(1, BUSY)], silence=5) is None
    late = replace(ahead, still=15)
    found = judged("rank 0 of 2", late, [heard(1, BUSY)], silence=5)
    assert isinstance(found, PeerLost)
    assert "rank 1" in str(found)
    behind = judged("rank 1 of 2", BUSY, [heard(0, ahead)], silence=5)
    assert isinstance(behind, Stuck)


def test_what_comes_between_two_steps_is_after_the_one_and_before_the_other():
    evaluates = replace(BUSY, phase="evaluation")
    for behind, ahead in ((BUSY, evaluates), (evaluates, replace(BUSY, step=4, phase="loading"))):
        assert judged("rank 0 of 2", ahead, [heard(1, behind)], silence=5) is None
        assert isinstance(judged("rank 1 of 2", behind, [heard(0, ahead)], silence=5), Stuck)
    found = judged("rank 1 of 2", evaluates, [heard(0, WAITS)], silence=5)
    assert "for 10 s after step 3, evaluation, where at most" in str(found)


def test_ranks_that_all_wait_for_each_other_say_so():
    late = replace(WAITS, still=15)
    found = judged("rank 0 of 2", late, [heard(1, late)], silence=5)
    assert isinstance(found, Stuck)
    assert "all ranks wait for each other" in str(found)


def hang(ready: threading.Event, go_on: threading.Event) -> None:
    ready.set()
    go_on.wait()


def test_the_stack_of_a_thread_is_shown():
    ready, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=hang, args=(ready, go_on), name="loads")
    thread.start()
    ready.wait()
    try:
        assert thread.ident is not None
        shown = stacks(thread.ident)
        assert not waits_for_others(thread.ident)
    finally:
        go_on.set()
        thread.join()
    assert shown.index("thread loads") < shown.index("in hang")
    assert "test_the_stack_of_a_thread_is_shown" not in shown  # who asks knows where it is


# ---------------------------------------------------------------------------------- the watchdog


class Wall:
    """A board that is a list."""

    def __init__(self, rank: int, words: list[str], verdicts: list[str]) -> None:
        self.rank = rank
        self.size = len(words)
        self.answered = 0.0
        self.answers = True
        self._words = words
        self._verdicts = verdicts
        self.words: Sequence[str] = [""] * self.size

    @property
    def verdict(self) -> str:
        return self._verdicts[0] if self._verdicts else ""

    def tell(self, word: str, ask: bool = False) -> None:
        self._words[self.rank] = word
        if ask and self.answers:
            self.words = list(self._words)
            self.answered = time.monotonic()

    def announce(self, verdict: str, seconds: float) -> None:
        self._verdicts.append(verdict)

    def refresh(self, seconds: float) -> None:
        self.words = list(self._words)

    def close(self) -> None:
        """Nothing to close."""


class Scene:
    """Watchdogs of several ranks, looked through second by second."""

    def __init__(self, size: int, seconds: float | None) -> None:
        self.now = 0.0
        self.ends: dict[int, list[AnybatchError]] = {rank: [] for rank in range(size)}
        words, verdicts = [""] * size, list[str]()
        self.walls = [Wall(rank, words, verdicts) for rank in range(size)]
        self.dogs = [
            Watchdog(seconds, self.walls[rank], self.ends[rank].append, clock=lambda: self.now)
            for rank in range(size)
        ]
        self.pulses = [dog.pulse(rank) for rank, dog in enumerate(self.dogs)]

    def live(self, seconds: int, *ranks: int, then: Callable[[], None] = lambda: None) -> None:
        """So many seconds, in which `ranks` look and the others' processes stand still."""
        for _ in range(seconds):
            self.now += 1.0
            then()
            for rank in ranks:
                self.dogs[rank].look()


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The ranks that wait for others, instead of what their stacks say."""
    ranks: set[int] = set()
    monkeypatch.setattr("anybatch.engine.watchdog.waits_for_others", ranks.__contains__)
    thread = property(lambda pulse: pulse.rank, lambda pulse, thread: None)
    monkeypatch.setattr(Pulse, "thread", thread, raising=False)
    return ranks


def test_progress_is_left_alone(waiting: set[int]):
    scene = Scene(1, 20)
    with scene.pulses[0].at_work("loading"):
        scene.live(200, 0, then=scene.pulses[0].beat)
    assert scene.ends == {0: []}


def test_the_rank_that_hangs_ends_with_its_stack_and_its_verdict_is_on_the_board(
    waiting: set[int],
):
    scene = Scene(2, 20)
    waiting.add(0)
    with scene.pulses[0].at_work("forward"), scene.pulses[1].at_work("loading"):
        scene.live(20, 0, 1)
        assert scene.ends == {0: [], 1: []}
        scene.live(2, 0, 1)
    (error,) = scene.ends[1]
    assert isinstance(error, Stuck)
    assert "rank 1 of 2 has made no progress" in str(error)
    assert scene.walls[0].verdict == str(error)
    assert scene.ends[0] == []


def test_whoever_is_not_woken_by_it_ends_by_the_verdict(waiting: set[int]):
    scene = Scene(2, 20)
    waiting.add(0)
    with scene.pulses[0].at_work("forward"), scene.pulses[1].at_work("loading"):
        scene.live(30, 0, 1)
    (error,) = scene.ends[0]
    assert isinstance(error, PeerLost)
    assert str(error) == scene.walls[0].verdict


def test_what_the_lost_rank_said_is_what_the_others_raise():
    scene = Scene(2, 20)
    scene.walls[1].announce("rank 1 hangs", 1)
    pulse = scene.pulses[0]
    with (
        pytest.raises(PeerLost) as raised,
        pulse.at_work("forward"),
        pulse.at_work("evaluation"),
    ):
        raise PeerLost("a rank did not answer")
    assert str(raised.value) == "rank 1 hangs"
    assert str(raised.value.__cause__) == "a rank did not answer"


def test_a_process_that_stands_still_is_named_by_the_others(waiting: set[int]):
    scene = Scene(3, 20)
    waiting.update((0, 1))
    scene.pulses[2].step = 7
    with (
        scene.pulses[0].at_work("update"),
        scene.pulses[1].at_work("update"),
        scene.pulses[2].at_work("backward"),
    ):
        scene.live(2, 0, 1, 2)
        scene.live(35, 0, 1)
    assert scene.ends[2] == []
    for rank in (0, 1):
        (error,) = scene.ends[rank]
        assert isinstance(error, PeerLost)
        assert "rank 2 was last heard of" in str(error)
        assert "in step 7, backward" in str(error)


def test_time_in_which_the_watchdog_did_not_run_either_is_nobodys_fault():
    scene = Scene(1, 20)
    with scene.pulses[0].at_work("loading"):
        scene.live(2, 0)
        scene.now += 1000
        scene.dogs[0].look()
    assert scene.ends == {0: []}


def test_a_board_that_does_not_answer_is_told(waiting: set[int]):
    scene = Scene(2, 20)
    waiting.add(1)
    scene.walls[1].answers = False
    with scene.pulses[1].at_work("forward"):
        scene.live(35, 1)
    (error,) = scene.ends[1]
    assert isinstance(error, PeerLost)
    assert "the place where the ranks met has not answered" in str(error)


def test_a_process_of_the_users_own_is_told_and_lives(
    waiting: set[int], capsys: pytest.CaptureFixture[str]
):
    now = [0.0]
    dog = Watchdog(20, clock=lambda: now[0])
    pulse = dog.pulse(0)
    with pulse.at_work("loading"):
        for _ in range(40):
            now[0] += 1
            dog.look()
        pulse.beat()
        dog.look()
    (event,) = dog.stalled()
    assert event.seconds == 39  # the first look finds it at work
    assert (event.step, event.phase) == (0, "loading")
    told = capsys.readouterr().err
    assert told.count("anybatch: training has made no progress") == 1
    assert dog.stalled() == []


def test_the_word_says_where_a_rank_is(waiting: set[int]):
    scene = Scene(2, 20)
    scene.pulses[0].step = 5
    with scene.pulses[0].at_work("loading"):
        scene.live(3, 0)
    scene.walls[1].refresh(1)
    word = Word(**json.loads(scene.walls[1].words[0]))
    assert asdict(word) | {"number": 0, "time": 0.0} == {
        "number": 0,
        "step": 5,
        "phase": "loading",
        "waits": False,
        "still": 2.0,
        "limit": 20,
        "time": 0.0,
    }


def test_the_thread_ends_with_the_block():
    with Watchdog(20):
        assert any(one.name == "anybatch-watchdog" for one in threading.enumerate())
    assert not any(one.name == "anybatch-watchdog" for one in threading.enumerate())


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_deadline_that_is_none_is_refused(seconds: float):
    with pytest.raises(InputError, match="stall_seconds is"):
        Watchdog(seconds)


# ------------------------------------------------------------------------------------- stragglers


def test_a_slow_rank_is_told_of_once():
    stragglers = Stragglers(3)
    told = [stragglers.observe([1.0, 2.0, 1.1]) for _ in range(50)]
    assert [found for found in told if found] == [[(1, 2.0, 1.05)]]
    assert told[19]


def test_one_fast_step_begins_the_count_anew():
    stragglers = Stragglers(2)
    times = [[1.0, 2.0]] * 19 + [[1.0, 1.0]] + [[1.0, 2.0]] * 19
    assert not any(stragglers.observe(seconds) for seconds in times)


def test_what_costs_nothing_is_not_told():
    stragglers = Stragglers(2)
    assert not any(stragglers.observe([1e-3, 2e-3]) for _ in range(100))


def test_a_rank_with_nothing_to_do_is_no_measure():
    stragglers = Stragglers(3)
    assert not any(stragglers.observe([0.0, 2.0, 2.0]) for _ in range(50))
    assert not any(Stragglers(1).observe([2.0]) for _ in range(50))
