"""Sums: flat tensors added up over the ranks, in the background."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch.distributed as dist
from torch import Tensor


class Sums(ABC):
    """The way in which flat tensors become their sums over the ranks. Every rank starts the same ones
    in the same order."""

    @property
    @abstractmethod
    def num_started(self) -> int:
        """Tensors started since the last `finish`."""

    def reserve(self, flats: Sequence[Tensor]) -> None:  # noqa: B027
        """Take the memory that `start` needs for `flats`, which are started in this order."""

    @abstractmethod
    def start(self, flat: Tensor) -> None:
        """Begin to make `flat`, 1-D, its sum over the ranks, in place. Does not wait."""

    @abstractmethod
    def finish(self, then: Callable[[int], None] | None = None) -> None:
        """Wait until all that were started are sums; `then` is called with the number of each as it
        is one, in their order. Raises `RuntimeError` if a rank is gone."""


@final
class Exact(Sums):
    """In the dtype of the tensors."""

    def __init__(self) -> None:
        self._works: list[Any] = []

    @property
    def num_started(self) -> int:
        """See `Sums`."""
        return len(self._works)

    def start(self, flat: Tensor) -> None:
        """See `Sums`."""
        self._works.append(dist.all_reduce(flat, async_op=True))

    def finish(self, then: Callable[[int], None] | None = None) -> None:
        """See `Sums`."""
        for number, work in enumerate(self._works):
            work.wait()
            if then is not None:
                then(number)
        self._works.clear()
