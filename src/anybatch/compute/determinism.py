"""Determinism: kernels that give the same bits each time, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Compute on `device` by kernels whose results depend on their arguments alone. On a CPU it is
    threads that make the difference, over which sums are divided, so there is one.

    cuBLAS needs nothing for it: what differs is where several streams share a workspace, and torch
    gives each its own (cuBLAS's documentation, "Results reproducibility").

    An operation that has no such kernel on `device` raises torch's `RuntimeError`, which names it.
    """
    if device.type == "cpu":
        with one_thread():
            yield
    else:
        with _algorithms():
            yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Operations on the CPU run on one thread."""
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
    filling.fill_uninitialized_memory = False  # it takes time, and finds mistakes of kernels alone
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warns)
        filling.fill_uninitialized_memory = fills
        torch.backends.cudnn.benchmark = tunes
