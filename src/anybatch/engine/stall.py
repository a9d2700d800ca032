"""How long a rank may stand still, and what follows once it has stood still for longer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from anybatch.engine.pulse import LEFT, Word
from anybatch.errors import PeerLost, Stuck
from anybatch.events import IN_STEP

LEAST_SECONDS = 300.0
"""Without progress, before a rank is called stuck."""

FIRST_SECONDS = 1800.0
"""The same for what is done for the first time: compilation, downloads, caches that are filled."""

TIMES_LONGEST = 20.0
"""Nothing is called stuck before this many times the longest that it ever stood still and went on."""

PATIENCE = 1.5
"""How much longer than its own deadline a rank waits for another: who hangs is to tell it first."""


@dataclass(frozen=True, slots=True)
class Heard:
    """The last word of a rank, and for how many seconds, by the hearer's clock, it has said no other
    although it was listened to."""

    rank: int
    word: Word | None
    silent: float


@final
class Stall:
    """How long a rank has made no progress, and how long it may.

    Args:
        given: the deadline in seconds; None: `LEAST_SECONDS` or `TIMES_LONGEST` times the longest so
            far, and `FIRST_SECONDS` for what is done for the first time.
    """

    def __init__(self, given: float | None = None) -> None:
        self.seconds: float = 0.0
        self._given = given
        self._longest = 0.0
        self._is_first = True
        self._last: tuple[int, str] = (-1, "")

    def observe(self, elapsed: float, num_beats: int, phase: str, is_first: bool = False) -> float:
        """Take in what is seen `elapsed` seconds after the last look. Returns the seconds that the rank
        had stood still if it has gone on since, else 0."""
        now = num_beats, phase
        if now == self._last:
            self.seconds += elapsed if phase else 0.0
            return 0.0
        ended, self.seconds, self._last = self.seconds, 0.0, now
        if not self._is_first:
            self._longest = max(self._longest, ended)
        self._is_first = is_first
        return ended

    @property
    def limit(self) -> float:
        """Seconds that it may stand still."""
        if self._given is not None:
            return self._given
        if self._is_first:
            return FIRST_SECONDS
        return max(LEAST_SECONDS, TIMES_LONGEST * self._longest)

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.seconds >= self.limit


def judged(
    name: str, mine: Word, others: Sequence[Heard], silence: float, slack: float = 0.0
) -> Stuck | PeerLost | None:
    """What a rank that has made no progress for longer than its deadline makes of it: that it hangs
    itself, which other rank does, or nothing yet.

    Args:
        name: of this rank, in words.
        mine: the word of this rank.
        others: what the other ranks have said.
        silence: seconds without a new word after which a process does not run.
        slack: how old words may be.
    """
    silent = [one for one in others if one.silent >= silence and not _has_left(one)]
    stuck = [
        one
        for one in others
        if one.word and one.word.is_busy and one.word.still >= one.word.limit - slack
    ]
    if not mine.waits and not any(_behind(one.word, mine) for one in (*silent, *stuck)):
        return Stuck(
            f"{name} has made no progress for {mine.still:.0f} s"
            f" {mine.where}, where at most {mine.limit:.0f} s are allowed: see below where it hangs; if"
            " it only needs longer, allow more (stall_seconds)."
        )
    if mine.still < PATIENCE * mine.limit:
        return None  # who hangs is about to say so
    waited = f"{name} has waited for {mine.still:.0f} s {mine.where}"
    if silent:
        names = " and ".join(map(_last_heard, silent))
        return PeerLost(
            f"{names}; {waited}: its process or its machine has stopped, or the network between."
        )
    if stuck:
        names = " and ".join(
            f"rank {one.rank} has made no progress for {one.word.still:.0f} s {one.word.where}"
            for one in stuck
            if one.word
        )
        return PeerLost(f"{names}; {waited}: its own output says where it hangs.")
    if all(one.word and one.word.waits and one.word.still >= one.word.limit for one in others):
        where = ", ".join(f"rank {one.rank} {one.word.where}" for one in others if one.word)
        return Stuck(
            f"all ranks wait for each other: {waited}, and so has {where}: a collective that not all of"
            " them call (in the model or the loss), or a network that loses what it is given."
        )
    return None


def _has_left(one: Heard) -> bool:
    return one.word is not None and one.word.phase == LEFT


def _behind(word: Word | None, mine: Word) -> bool:
    """Whether a rank that said `word` is not as far as this one, which may so wait for it."""
    return word is None or _place(word) < _place(mine)


def _place(word: Word) -> tuple[int, int]:
    """How far a rank is: what is no phase of a step comes after it."""
    return word.step, IN_STEP.index(word.phase) if word.phase in IN_STEP else len(IN_STEP)


def _last_heard(one: Heard) -> str:
    if one.word is None:
        return f"rank {one.rank} was never heard of"
    ago = max(one.silent, time.time() - one.word.time)
    return f"rank {one.rank} was last heard of {ago:.0f} s ago, {one.word.where}"
