"""Around planning: compiled code runs as it is written, and full garbage collections wait.

The compiler would else compile what traces, with warnings for each limit that this meets. Nor does
torch's anomaly mode look for NaN among tensors that hold no numbers: it would find some. And traces
make hundreds of thousands of small objects that stay, of which full collections would look at each
again: a tenth of the time of planning. Young garbage is collected as ever.
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
    """Nothing is compiled inside, nothing that was compiled runs, and gradients are not looked at."""
    with warnings.catch_warnings():
        # Of the hooks by which a trace knows whose an operation is.
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
    """No full collection comes by itself inside, in whatever thread."""
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
