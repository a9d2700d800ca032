"""What a reproducible run turns on for CUDA, and off again."""

import os

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


def test_on_cuda(monkeypatch):
    """The size of cuBLAS's workspaces stays: a plan is made before, and counts them."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = settings()
    with deterministic(torch.device("cuda")):
        inside = settings()
    assert inside == (True, False, False, False, None, before[-1])
    assert settings() == before


def test_on_a_cpu_one_thread_is_enough():
    before = settings()
    with deterministic(torch.device("cpu")):
        assert settings() == (*before[:-1], 1)
    assert settings() == before
