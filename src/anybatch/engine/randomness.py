"""Random state as a function of the step, or as it was found.

A run that anybatch owns seeds every generator at the beginning of each attempt of a step, from (seed,
step, rank): then a redone step draws what the first attempt drew, and a resumed run needs no saved
state. A reproducible run seeds them for every pass, from what does not depend on the ranks.
Around an existing script the generators are the user's: they are left alone, and only put back when a
step is redone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from anybatch.data import mix, restore, seed_by, snapshot


class Randomness(ABC):
    """What the generators of Python, NumPy and torch hold when a step is computed."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """Called before the first attempt of `step`."""

    @abstractmethod
    def redo(self, step: int) -> None:
        """Called before every further attempt of `step`."""

    def begin_grain(self, step: int, grain: int) -> None:  # noqa: B027
        """Called before the pass over `grain` of a reproducible step."""

    def begin_update(self, step: int) -> None:  # noqa: B027
        """Called before the update of `step`."""

    @abstractmethod
    def close(self) -> None:
        """Training is over."""


class Keyed(Randomness):
    """Seeded from (seed, step, rank); after the run the generators are as they were before it."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self._found = Ambient(device)
        self._found.begin(0)
        self._seed = seed
        self._rank = rank
        self._cuda = device if device.type == "cuda" else None

    def begin(self, step: int) -> None:
        """Seed all generators for `step`."""
        self._seed_by(mix(self._seed, step, self._rank))

    redo = begin

    def close(self) -> None:
        """Put the generators back."""
        self._found.redo(0)

    def _seed_by(self, key: int) -> None:
        seed_by(key)
        if self._cuda is not None:
            with torch.cuda.device(self._cuda):
                torch.cuda.manual_seed(key)


class KeyedByGrain(Keyed):
    """Seeded from (seed, step, grain) for each pass, and from (seed, step) for the update: whichever
    rank runs a grain draws the same."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, 0, device)

    def begin_grain(self, step: int, grain: int) -> None:
        """See `Randomness`."""
        self._seed_by(mix(self._seed, step, 0, grain))

    def begin_update(self, step: int) -> None:
        """See `Randomness`."""
        self.begin(step)


class Ambient(Randomness):
    """Whatever the user's script left in the generators."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._before: tuple[Any, ...] = ()
        self._cuda_before: torch.Tensor | None = None

    def begin(self, step: int) -> None:
        """Remember the generators' states."""
        self._before = snapshot()
        if self._cuda is not None:
            self._cuda_before = torch.cuda.get_rng_state(self._cuda)

    def redo(self, step: int) -> None:
        """Put the remembered states back."""
        restore(self._before)
        if self._cuda is not None and self._cuda_before is not None:
            torch.cuda.set_rng_state(self._cuda_before, self._cuda)

    def close(self) -> None:
        """Leave the generators where training brought them, as a plain loop would."""
