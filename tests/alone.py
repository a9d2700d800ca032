"""Tests of what a whole process holds, each in a process of its own.

What other tests have left in theirs, and when it goes, is no part of such a test: memory that is given
back while a budget is held, say, is there for those who are held to it.

    @alone
    def test_it(): ...        # without arguments
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.warm import Warm

from anybatch.engine import ladder

ROOT = Path(__file__).parents[1]


def alone(test: Callable[[], None]) -> Callable[[Warm], None]:
    """`test`, in a process that has done nothing but import torch; see `warm`. It fails with the
    traceback of what was raised there."""

    @functools.wraps(test)
    def apart(warm: Warm) -> None:
        names = test.__module__, test.__name__
        done = warm(["python", "-c", f"from tests.alone import run; run{names}"], ROOT)
        if done.returncode:
            pytest.fail(done.stdout + done.stderr, pytrace=False)

    parameter = inspect.Parameter("warm", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    apart.__signature__ = inspect.Signature([parameter])  # pyright: ignore[reportAttributeAccessIssue]
    return apart


def run(module: str, name: str) -> None:
    """Run a test that is marked `alone`, in this process."""
    ladder.WAITS = 0.01, 0.02, 0.05  # for memory that others give back; nobody does here
    getattr(importlib.import_module(module), name).__wrapped__()
