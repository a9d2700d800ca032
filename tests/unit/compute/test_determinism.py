"""What a reproducible run turns on for CUDA, and off again."""

import os

import pytest
import torch

from anybatch.compute.determinism import deterministic


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        torch.get_num_threads(),
    )


@pytest.mark.parametrize("chosen", [None, ":16:8"])
def test_on_cuda(monkeypatch, chosen):
    if chosen is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", chosen)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = settings()
    with deterministic(torch.device("cuda")):
        inside = settings()
    assert inside == (True, False, False, False, chosen or ":4096:8", before[-1])
    assert settings() == before


def test_on_a_cpu_one_thread_is_enough():
    before = settings()
    with deterministic(torch.device("cpu")):
        assert settings() == (*before[:-1], 1)
    assert settings() == before
