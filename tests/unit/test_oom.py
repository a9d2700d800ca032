"""What counts as memory that ran out: a leaner plan is tried for it, and for nothing else."""

from __future__ import annotations

import errno

import pytest
import torch
from torch.distributed import DistBackendError

from anybatch.oom import as_memory_failure

CPU = (
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you"
    " tried to allocate 123 bytes. Error code 12 (Cannot allocate memory)"
)

BESIDE_TORCH_S_ALLOCATOR: list[tuple[type[RuntimeError], str]] = [
    # Pinned memory, segments that expand, kernels that are loaded.
    (torch.AcceleratorError, "CUDA error: out of memory\nSearch for ..."),
    (RuntimeError, "CUDA driver error: out of memory"),
    (torch.AcceleratorError, "HIP error: out of memory"),
    (RuntimeError, "Triton Error [CUDA]: out of memory"),
    # Workspaces.
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    (RuntimeError, "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    (RuntimeError, "GET was unable to find an engine to execute this computation"),
    (RuntimeError, "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling ..."),
    (RuntimeError, "cuFFT error: CUFFT_ALLOC_FAILED"),
    # Buffers of a communicator.
    (
        DistBackendError,
        "NCCL error in: ../NCCLUtils.cpp:94, unhandled cuda error\nCuda failure 2 'out of memory'",
    ),
    # That of the allocator, in another's.
    (RuntimeError, "InductorError: OutOfMemoryError: CUDA out of memory."),
]


@pytest.mark.parametrize(
    ("error", "requested", "marks"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), 2 << 20, False),
        (RuntimeError(CPU), 123, False),
        (MemoryError(), None, False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), None, False),
        *[(kind(text), None, False) for kind, text in BESIDE_TORCH_S_ALLOCATOR],
        (RuntimeError("could not create a primitive"), None, True),
        (RuntimeError("could not create a memory object"), None, True),
    ],
)
def test_memory_that_ran_out_is_told_from_what_was_raised(
    error: Exception, requested: int | None, marks: bool
):
    found = as_memory_failure(error)
    assert found is not None
    assert (found.requested_bytes, found.marks_thread) == (requested, marks)


@pytest.mark.parametrize(
    "error",
    [
        # oneDNN has no such kernel: no memory would help.
        RuntimeError(
            "could not create a primitive descriptor for the LSTM forward propagation primitive. Run"
            " workload with environment variable ONEDNN_VERBOSE=all to get additional diagnostic"
            " information."
        ),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(...)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        DistBackendError("NCCL error in: ..., remote process exited or there was a network error"),
        ValueError(CPU),
        OSError(errno.ENOENT, "No such file or directory"),
    ],
)
def test_other_errors_are_none(error: Exception):
    assert as_memory_failure(error) is None
