"""What a process holds of a CUDA device beside its tensors, by what the driver tells."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from anybatch.engine.meter import CudaMeter
from anybatch.process import cuda_driver

MIB = 1 << 20


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what the driver tells of this process, where torch has reserved 100 MiB."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 * MIB)
    return lambda size: monkeypatch.setattr(cuda_driver, "process_bytes_on", lambda device: size)


@pytest.mark.parametrize(
    ("process", "beside"),
    [
        (400 * MIB, 300 * MIB),
        (4096 * MIB, cuda_driver.TYPICAL_CONTEXT_BYTES),  # other processes, seen from a container
        (0, cuda_driver.TYPICAL_CONTEXT_BYTES),
    ],
)
def test_other_processes_are_not_taken_for_this_one(
    process: int,
    beside: int,
    told: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
):
    told(process)
    assert cuda_driver.beside_bytes(torch.device("cuda", 0)) == beside
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr("anybatch.engine.meter.release_workspaces", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    assert CudaMeter(torch.device("cuda", 0)).beside_bytes == beside


def test_what_will_be_loaded_yet_is_added_to_what_was_measured_alone(
    told: Callable[[int], None],
):
    told(400 * MIB)
    assert cuda_driver.beside_bytes(torch.device("cuda", 0), later=7) == 300 * MIB + 7
    told(4096 * MIB)
    assert (
        cuda_driver.beside_bytes(torch.device("cuda", 0), later=7)
        == cuda_driver.TYPICAL_CONTEXT_BYTES
    )
