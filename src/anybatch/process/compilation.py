"""Compilation: notices when `torch.compile` compiles code in this process.

It does so within the first pass that runs the code.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

_DYNAMO = "torch._dynamo"


def is_loaded() -> bool:
    """Whether the compiler is loaded, which takes a second and tens of MiB."""
    return _DYNAMO in sys.modules


def num_compilations() -> int:
    """Returns how many compilations have ended since the compiler was loaded by `load`, or else since
    this function first found it loaded."""
    return len(_ended()) if is_loaded() else 0


def load() -> None:
    """Load the compiler."""
    _ended()


def on_compilation(start: Callable[[], None], end: Callable[[], None]) -> None:
    """Call `start` before each compilation from now on, and `end` after it. Loads the compiler."""
    handler = _handler()
    handler.register_start_callback(lambda _: start())
    handler.register_end_callback(lambda _: end())


@functools.cache
def _ended() -> list[object]:
    """Returns a list to which each compilation is added when it ends. Loads the compiler."""
    ended: list[object] = []
    _handler().register_end_callback(ended.append)
    return ended


def _handler() -> Any:
    return importlib.import_module(f"{_DYNAMO}.callback").callback_handler
