"""Randomness: random state as a function of the step, or as left by the user's script.

A run that anybatch owns seeds every generator at the beginning of each attempt of a step, from (seed,
index, rank), where the index is the number of steps before it. So a redone step draws the same numbers
as the first attempt, and a resumed run needs no saved state. A reproducible run seeds the generators
for every pass, from values that do not depend on the ranks.
Around an existing script the generators belong to the user: they are left alone, and only restored when
a step is redone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import torch

from anybatch.data import mix, restore, seed_by, snapshot

_States: TypeAlias = "tuple[tuple[Any, ...], torch.Tensor | None]"


class Randomness(ABC):
    """Controls the state of the generators of Python, NumPy and torch when a step is computed."""

    @abstractmethod
    def begin(self, index: int) -> None:
        """Called before the first attempt of the step `index`."""

    @abstractmethod
    def redo(self, index: int) -> None:
        """Called before every further attempt of the step."""

    def begin_grain(self, index: int, grain: int) -> None:  # noqa: B027
        """Called before the pass over `grain` of a reproducible step."""

    def begin_update(self, index: int) -> None:  # noqa: B027
        """Called before the update of a step."""

    @abstractmethod
    def begin_pass(self, index: int, number: int) -> None:
        """Called before both runs of a pass that is run twice, so that they draw the same numbers."""

    @abstractmethod
    def close(self) -> None:
        """Called at the end of training."""


class Keyed(Randomness):
    """Seeds from (seed, index, rank). The state of the generators is restored after the run."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self._found = Ambient(device)
        self._found.begin(0)
        self._seed = seed
        self._rank = rank
        self._cuda = device if device.type == "cuda" else None

    def begin(self, index: int) -> None:
        """Seed all generators for the step `index`."""
        self._seed_by(mix(self._seed, index, self._rank))

    redo = begin

    def begin_pass(self, index: int, number: int) -> None:
        self._seed_by(mix(self._seed, index, self._rank, number))

    def close(self) -> None:
        self._found.redo(0)

    def _seed_by(self, key: int) -> None:
        _seed(key, self._cuda)


class KeyedByGrain(Keyed):
    """Seeds from (seed, index, grain) for each pass, and from (seed, index) for the update, so that a
    grain draws the same numbers on any rank."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, 0, device)

    def begin_grain(self, index: int, grain: int) -> None:
        self._seed_by(mix(self._seed, index, 0, grain))

    def begin_pass(self, index: int, number: int) -> None:
        """See `Randomness`. Does nothing: the pass is seeded as a grain."""

    def begin_update(self, index: int) -> None:
        self.begin(index)


class Ambient(Randomness):
    """Uses the state that the user's script left in the generators."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._before: _States | None = None
        self._after: _States | None = None  # state to restore after seeded passes
        self._key = 0

    def begin(self, index: int) -> None:
        self._before, self._after = self._now(), None

    def redo(self, index: int) -> None:
        self._put_back(self._before)
        self._after = None

    def begin_pass(self, index: int, number: int) -> None:
        """See `Randomness`. Seeds from a number that is drawn once per attempt; the generators continue
        from the state after that draw when the passes are over."""
        if self._after is None:
            self._key = int(torch.randint(1 << 62, ()))
            self._after = self._now()
        _seed(mix(self._key, number), self._cuda)

    def begin_update(self, index: int) -> None:
        self._put_back(self._after)
        self._after = None

    def close(self) -> None:
        """Leave the generators in the state that training left, as a plain loop would."""

    def _now(self) -> _States:
        return snapshot(), None if self._cuda is None else torch.cuda.get_rng_state(self._cuda)

    def _put_back(self, states: _States | None) -> None:
        if states is None:
            return
        restore(states[0])
        if self._cuda is not None and states[1] is not None:
            torch.cuda.set_rng_state(states[1], self._cuda)


def _seed(key: int, cuda: torch.device | None) -> None:
    seed_by(key)
    if cuda is not None:
        with torch.cuda.device(cuda):
            torch.cuda.manual_seed(key)
