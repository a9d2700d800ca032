"""Context managers for planning: compiled code runs eagerly, and full garbage collections are
suspended.

Otherwise the compiler would compile the traces, with warnings for each limit that it reaches.
Anomaly mode is off, since it would find NaN in tensors that hold no values. Traces create hundreds
of thousands of small objects that stay alive, and each full collection would visit them again,
which takes a tenth of the planning time. Young objects are collected as usual.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def eagerly() -> Iterator[None]:
    """Context manager without compilation, in which compiled functions run eagerly and gradients
    are not checked for NaN."""
    with warnings.catch_warnings():
        # Caused by the hooks by which a trace attributes operations to modules.
        warnings.filterwarnings(
            "ignore", r"Using `torch\.compile\(module\)` when there are global hooks"
        )
        with torch.compiler.set_stance("force_eager"), torch.autograd.set_detect_anomaly(False):
            yield


_NEVER = 1 << 30

_lock = threading.Lock()
_num_inside = 0
_before = 0


@contextmanager
def few_collections() -> Iterator[None]:
    """Context manager that suspends automatic full garbage collections in all threads."""
    global _num_inside, _before
    with _lock:
        if not _num_inside:
            _before = gc.get_threshold()[2]
            _set_last(_NEVER)
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                _set_last(_before)


def _set_last(threshold: int) -> None:
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, threshold)
