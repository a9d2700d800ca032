"""Log filter: silences logs of libraries that this package's own errors cover, or that users cannot
act on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def silenced(names: Iterable[str], up_to: int) -> Iterator[None]:
    """Suppress messages of the loggers with these `names` that are no more severe than `up_to` (a
    level of `logging`). The previous levels are restored afterwards."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(up_to + 1)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
