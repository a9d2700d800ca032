"""Detection of out-of-memory errors, in one place.

The CUDA allocator raises `torch.OutOfMemoryError`. The CUDA driver and libraries, which allocate memory
outside of it, raise other errors, as do those of ROCm. On CPU, torch's allocator raises a plain
RuntimeError and Python a MemoryError; oneDNN reports that it "could not create a primitive" if there is
no memory for the code it generates. This error has a lasting effect: the code generator keeps its error
in a thread-local variable that is never cleared, so every new kernel of that thread fails from then on
(observed with oneDNN 3.12, which builds Xbyak without exceptions).
"""

from __future__ import annotations

import errno
import re
import sys
from dataclasses import dataclass

import torch

if sys.platform != "win32":
    import resource

_ALLOCATOR_SIGNS = ("DefaultCPUAllocator", "allocate memory", "std::bad_alloc", "not enough memory")
_DEVICE_SIGNS = re.compile(
    # torch's allocator, if its error was wrapped in another one, as a compiler does.
    r"(CUDA|HIP) out of memory"
    # The driver: pinned memory, and kernels on first use.
    r"|(CUDA|HIP)( driver)? error: out of memory"
    r"|Triton Error \[(CUDA|HIP)\]: out of memory"
    # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED and similar.
    r"|\b(CU|HIP|ROC|MIOPEN)\w*ALLOC(ATION)?_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate"
    # cuDNN: every engine failed to allocate its memory.
    r"|unable to find an engine to execute this computation"
    # NCCL and RCCL.
    r"|(Cuda|HIP) failure (\d+ )?'out of memory'"
)
_MARKING_SIGNS = re.compile(
    # A primitive descriptor fails if oneDNN has no such kernel, on this processor or at all.
    r"could not create a (primitive(?! descriptor)|memory object)"
)
_REQUESTED = (
    re.compile(r"you tried to allocate (?P<size>\d+) (?P<unit>bytes)"),
    re.compile(r"Tried to allocate (?P<size>[\d.]+) (?P<unit>[KMG]?iB|bytes)"),
)
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class MemoryFailure:
    """Description of a failed allocation. Holds text instead of the exception, whose traceback would
    keep the tensors of the failed step alive.

    Attributes:
        message: first line of the error message.
        requested_bytes: size of the failed allocation, or None if the allocator does not report it.
        marks_thread: new kernels fail in this thread from now on.
    """

    message: str
    requested_bytes: int | None
    marks_thread: bool = False


def as_memory_failure(error: BaseException) -> MemoryFailure | None:
    """`error` as a `MemoryFailure`, or None if it is another kind of error."""
    text = str(error)
    runtime = isinstance(error, RuntimeError)
    marks_thread = runtime and _MARKING_SIGNS.search(text) is not None
    is_one = (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (runtime and any(sign in text for sign in _ALLOCATOR_SIGNS))
        or (runtime and _DEVICE_SIGNS.search(text) is not None)
        or marks_thread
    )
    if not is_one:
        return None
    first = text.splitlines()[0] if text else type(error).__name__
    return MemoryFailure(first, _requested(text), marks_thread)


def is_memory_error(error: BaseException) -> bool:
    """Whether `error` means that memory ran out, which a leaner plan can avoid."""
    return as_memory_failure(error) is not None


def is_limited() -> bool:
    """Whether the operating system limits the memory of this process (set by anybatch or by others,
    such as `ulimit`), so that CPU allocations can fail. Without a limit, the out-of-memory killer ends
    the process instead."""
    if sys.platform == "win32":
        return False
    limits = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)


def _requested(text: str) -> int | None:
    for pattern in _REQUESTED:
        if match := pattern.search(text):
            return int(float(match["size"]) * _UNITS[match["unit"]])
    return None
