"""Determinism: kernels with bitwise reproducible results, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Context manager that selects kernels on `device` whose results depend only on their arguments. On
    a CPU, results depend on the number of threads that sums are divided over, so one thread is used.

    cuBLAS needs no setting: its results vary only if several streams share a workspace, and torch gives
    each stream a separate one (cuBLAS's documentation, "Results reproducibility").

    An operation without such a kernel on `device` raises torch's `RuntimeError`, which names it.
    """
    if device.type == "cpu":
        with one_thread():
            yield
    else:
        with _algorithms():
            yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager that runs CPU operations on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _algorithms() -> Iterator[None]:
    filling: Any = torch.utils.deterministic  # its attribute is not in torch's types
    algorithms = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills, tunes = filling.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False  # slow, and only finds errors in kernels
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warns)
        filling.fill_uninitialized_memory = fills
        torch.backends.cudnn.benchmark = tunes
