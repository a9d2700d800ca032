"""What a rank does, as its watchdog sees it (`Pulse`), and as the watchdogs of the others hear of it
(`Word`)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, final

from anybatch.errors import PeerLost
from anybatch.events import whereabouts

_SILENT = ("saving", "resuming", "reading weights", "closing")
"""What may take long without a sign of life: checkpoints are as large as disks are slow. It gets the
time of what is done for the first time."""

LEFT = "left"
"""The phase of a rank that is done."""


class HasPhase(Protocol):
    """Says what is being done."""

    phase: str


@final
class Pulse:
    """What one rank is doing. Written by its own thread, read by the watchdog.

    Attributes:
        rank: whose it is.
        step: number of the one that is under way, or else was done last.
        num_beats: signs of life so far.
    """

    def __init__(
        self, rank: int = 0, explain: Callable[[PeerLost], PeerLost] = lambda error: error
    ) -> None:
        self.rank: int = rank
        self.step: int = 0
        self.num_beats: int = 0
        self._explain = explain
        self._source: HasPhase | None = None
        self._doing = self._work = ""
        self._done: set[str] = set()
        self._depth = 0
        self._home = self._thread = threading.get_ident()

    def follow(self, source: HasPhase) -> None:
        """From now on `source` knows the phase."""
        self._source = source

    @contextlib.contextmanager
    def at_work(self, what: str) -> Iterator[None]:
        """Around what is watched; `what` names its beginning. Between such blocks a rank may rest as
        long as it likes: the time is the script's own.

        Where another rank is lost that has said why, that is raised instead.
        """
        outer = self._work
        self._home = self._thread = threading.get_ident()
        self._doing = self._work = what
        self._depth += 1
        self.num_beats += 1
        try:
            yield
        except PeerLost as error:
            explained = error if self._depth > 1 else self._explain(error)
            if explained is error:
                raise
            raise explained from error
        finally:
            self._depth -= 1
            self._done.add(what)
            self._doing, self._work = "", outer
            self.num_beats += 1

    def beat(self) -> None:
        """A sign of life: a batch is there, or a pass is over."""
        self.num_beats += 1
        self._doing = ""
        self._thread = threading.get_ident()  # steps may have moved to another

    @property
    def phase(self) -> str:
        """What is being done; empty: nothing that is watched."""
        if not self._depth:
            return ""
        return self._doing or (self._source.phase if self._source else "set-up")

    @property
    def is_first(self) -> bool:
        """Whether such a block was never left before, or shows no sign of life inside."""
        return self._work not in self._done or self._work in _SILENT

    @property
    def threads(self) -> tuple[int, ...]:
        """Of the rank: the one that computes, and the one that asked for it if that is another."""
        return tuple(dict.fromkeys((self._thread, self._home)))


@dataclass(frozen=True, slots=True)
class Word:
    """What a rank tells the others of itself.

    Attributes:
        number: of the word: it is another one each time.
        step, phase: see `Pulse`.
        waits: whether it waits for other ranks.
        still: seconds without progress.
        limit: seconds without progress after which it counts as stuck.
        time: when it said so, in seconds since the epoch.
    """

    number: int = 0
    step: int = 0
    phase: str = ""
    waits: bool = False
    still: float = 0.0
    limit: float = 0.0
    time: float = 0.0

    def dumps(self) -> str:
        """As text, for `loads`."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> Word | None:
        """What `dumps` has written; None: nothing yet."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    @property
    def where(self) -> str:
        """Step and phase, in words."""
        return whereabouts(self.step, self.phase)

    @property
    def is_busy(self) -> bool:
        """Whether others may have to wait for it."""
        return self.phase not in ("", LEFT) and not self.waits
