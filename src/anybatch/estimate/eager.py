"""Eager: what a user has compiled by `torch.compile` runs as it is written while it is traced.

The compiler would else compile what traces, with warnings for each limit that this meets, and its time
would be spent on tensors that hold no numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def eagerly() -> Iterator[None]:
    """Nothing is compiled inside, and nothing that was compiled runs."""
    with warnings.catch_warnings():
        # Of the hooks by which a trace knows whose an operation is.
        warnings.filterwarnings(
            "ignore", r"Using `torch\.compile\(module\)` when there are global hooks"
        )
        with torch.compiler.set_stance("force_eager"):
            yield
