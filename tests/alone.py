"""Tests of what a whole process holds, each in a process of its own.

What other tests have left in theirs, and when it goes, is no part of such a test: memory that is given
back while a budget is held, say, is there for those who are held to it.

    @alone
    def test_it(): ...        # without arguments
"""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from anybatch.engine import ladder


def alone(test: Callable[[], None]) -> Callable[[], None]:
    """`test`, in a new interpreter. It fails with the traceback of what was raised there."""

    @functools.wraps(test)
    def apart() -> None:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            raised = pool.submit(_raised, test.__module__, test.__name__).result()
        if raised is not None:
            pytest.fail(raised, pytrace=False)

    return apart


def _raised(module: str, name: str) -> str | None:
    ladder.WAITS = 0.01, 0.02, 0.05  # for memory that others give back; nobody does here
    try:
        getattr(importlib.import_module(module), name).__wrapped__()
    except BaseException:  # what pytest itself raises is none of `Exception`
        return traceback.format_exc()
    return None
