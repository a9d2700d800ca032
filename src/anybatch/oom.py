"""Out of memory as a type: recognised in one place.

CUDA's allocator raises `torch.OutOfMemoryError`; its driver and libraries, which take memory beside it,
have errors of their own, and so have ROCm's. On CPU torch's allocator raises a plain RuntimeError and
Python a MemoryError; oneDNN says that it "could not create a primitive" when it finds no room for the
code it generates. That last one leaves a mark: the code generator keeps its error in a thread-local
variable that nothing clears, so every new kernel of that thread fails from then on (seen with oneDNN
3.12, which builds Xbyak without exceptions).
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
    # Of torch's allocator, where somebody has wrapped its error in one of theirs, as a compiler does.
    r"(CUDA|HIP) out of memory"
    # Of the driver: pinned memory, and kernels when they are first used.
    r"|(CUDA|HIP)( driver)? error: out of memory"
    r"|Triton Error \[(CUDA|HIP)\]: out of memory"
    # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED and their like.
    r"|\b(CU|HIP|ROC|MIOPEN)\w*ALLOC(ATION)?_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate"
    # Each of cuDNN's was refused its memory.
    r"|unable to find an engine to execute this computation"
    # NCCL's and RCCL's.
    r"|(Cuda|HIP) failure (\d+ )?'out of memory'"
)
_MARKING_SIGNS = re.compile(
    # That of a descriptor fails where oneDNN has no such kernel, on this processor or at all.
    r"could not create a (primitive(?! descriptor)|memory object)"
)
_REQUESTED = (
    re.compile(r"you tried to allocate (?P<size>\d+) (?P<unit>bytes)"),
    re.compile(r"Tried to allocate (?P<size>[\d.]+) (?P<unit>[KMG]?iB|bytes)"),
)
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class MemoryFailure:
    """What an allocator said when it refused. Holds text, never the error: its traceback would keep
    the tensors of the failed step alive.

    Attributes:
        message: the first line of the error.
        requested_bytes: what was asked for, or None where the allocator does not say.
        marks_thread: new kernels fail in this thread from now on.
    """

    message: str
    requested_bytes: int | None
    marks_thread: bool = False


def as_memory_failure(error: BaseException) -> MemoryFailure | None:
    """`error` as a memory failure, or None if it is something else."""
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
    """Whether memory ran out, which a leaner plan can mend."""
    return as_memory_failure(error) is not None


def is_limited() -> bool:
    """Whether the operating system holds this process to a limit, ours or somebody else's (`ulimit`),
    so that memory can be refused on the CPU. Without one the killer of processes comes instead."""
    if sys.platform == "win32":
        return False
    limits = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)


def _requested(text: str) -> int | None:
    for pattern in _REQUESTED:
        if match := pattern.search(text):
            return int(float(match["size"]) * _UNITS[match["unit"]])
    return None
