"""Saves, seeds and restores the process's default random generators (Python's, torch's, NumPy's) around
the fetching of samples.

What a sample draws may depend only on the sample, and what training draws (dropout) not on the samples
fetched in between. A fetch therefore borrows the generators and restores them afterwards. It detects
whether anything was drawn, so that data sets without randomness do not pay for seeding.
"""

from __future__ import annotations

import ctypes
import pickle
import random
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch

from anybatch.data.order import mix

_MT19937_BYTES = 625 * 4  # 624 words of state, then the position among them
_numpy_known: tuple[bytes, dict[str, Any]] | None = None


def seed_by(key: int) -> None:
    """Seeds all three generators with a 64-bit key."""
    random.seed(key)
    torch.default_generator.manual_seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the generator that old code draws from


def seed_each(generators: Sequence[Any], key: int) -> None:
    """Seeds the generators that a data set owns, each with a different stream."""
    for number, generator in enumerate(generators):
        own = mix(key, number)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, random.Random):
            generator.seed(own)
        elif isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)(own).state
        else:
            generator.seed(own & 0xFFFFFFFF)


def snapshot() -> tuple[Any, ...]:
    """Returns the state of all three generators, for `restore`."""
    return random.getstate(), torch.default_generator.get_state(), _numpy_now()[1]


def states_of(generators: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the states of the default generators, CUDA's included, and of `generators`, in a form
    that can be compared."""
    python, host, numpy = snapshot()
    tensors = [host, *(g.get_state() for g in generators if isinstance(g, torch.Generator))]
    if torch.cuda.is_initialized():
        tensors.append(torch.cuda.get_rng_state())
    others = [g for g in generators if not isinstance(g, torch.Generator)]
    return python, [one.tolist() for one in tensors], pickle.dumps((numpy, others))


def restore(state: tuple[Any, ...]) -> None:
    """Sets all three generators to what `snapshot` returned."""
    random.setstate(state[0])
    torch.default_generator.set_state(state[1])
    np.random.set_state(state[2])  # noqa: NPY002


@final
class PythonAndNumpy:
    """The state of Python's and NumPy's generators, used where torch restores its own."""

    def __init__(self) -> None:
        self._python: tuple[Any, ...] | None = random.getstate()
        self._print, self._numpy = _numpy_now()

    def drop_unchanged(self) -> None:
        """Discards the saved state of Python's generator if it is still the current one: it takes 25
        KiB."""
        if self._python == random.getstate():
            self._python = None

    def put_back(self) -> None:
        """Restores both generators."""
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy.get("has_gauss") or _numpy_fingerprint() != self._print:
            np.random.set_state(self._numpy)  # noqa: NPY002


@final
class Borrowed:
    """Context manager that restores all generators on exit, also after an error: `with Borrowed() as
    generators:`."""

    def __enter__(self) -> Borrowed:
        self._python = random.getstate()
        self._torch = torch.default_generator.get_state()
        self._numpy, self._numpy_state = _numpy_now()
        self._untouched = False
        return self

    def drawn(self) -> bool:
        """Returns whether any generator was drawn from, or seeded, since the block was entered.

        Must be the last call in the block: generators that were found untouched are not restored.
        """
        self._untouched = not self._changed()
        return not self._untouched

    def _changed(self) -> bool:
        if random.getstate() != self._python:
            return True
        if not torch.equal(torch.default_generator.get_state(), self._torch):
            return True
        if _numpy_fingerprint() != self._numpy:
            return True
        # NumPy returns a normal number that it cached from the last pair without a draw.
        kept = self._numpy_state.get("has_gauss")
        return bool(kept) and not np.random.get_state(legacy=False)["has_gauss"]  # noqa: NPY002

    def __exit__(self, *_error: object) -> None:
        if not self._untouched:
            restore((self._python, self._torch, self._numpy_state))


def _numpy_now() -> tuple[bytes, dict[str, Any]]:
    """Returns the fingerprint and the full state. Reading the state takes 35 us, so the last one is
    cached, and read again only if the fingerprint shows that something was drawn, or if it holds a
    normal number (`has_gauss`)."""
    global _numpy_known
    now = _numpy_fingerprint()
    if _numpy_known is None or _numpy_known[0] != now or _numpy_known[1].get("has_gauss"):
        _numpy_known = now, np.random.get_state(legacy=False)  # noqa: NPY002
    return _numpy_known


def _numpy_fingerprint() -> bytes:
    generator = np.random.get_bit_generator()  # pyright: ignore[reportAttributeAccessIssue]
    if type(generator) is np.random.MT19937:
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return pickle.dumps(np.random.get_state(legacy=False))  # noqa: NPY002
