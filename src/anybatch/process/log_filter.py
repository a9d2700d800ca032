"""Silence: what libraries log and this package tells in its own errors, or nobody could mend."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def silenced(names: Iterable[str], up_to: int) -> Iterator[None]:
    """The loggers of these `names` tell nothing that is no more severe than `up_to` (a level of
    `logging`). Afterwards they are as they were."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(up_to + 1)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
