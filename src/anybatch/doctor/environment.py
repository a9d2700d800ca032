"""Environment variables that change what is computed, how fast, or how many bytes it takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

from anybatch.doctor.finding import Facts, Finding, note, problem, warning
from anybatch.doctor.gpus import VISIBLE
from anybatch.doctor.packages import ALLOCATORS
from anybatch.doctor.ranks import LAUNCHERS

_ELSEWHERE = (*LAUNCHERS, VISIBLE, "CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables with findings of other groups."""

OPTIONS = {
    *("backend", "expandable_segments", "garbage_collection_threshold", "large_segment_size_mb"),
    *("graph_capture_record_stream_reuse", "max_non_split_rounding_mb", "max_split_size_mb"),
    *("per_process_memory_fraction", "pinned_max_cached_size_mb", "pinned_max_power2_size_mb"),
    *(
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
    ),
    *(
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
    ),
    *("pinned_use_host_register", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc"),
    *("release_lock_on_device_malloc", "roundup_power2_divisions", "throw_on_cudamalloc_oom"),
}
"""Of torch's allocator on CUDA, in versions 2.11 to 2.14."""

Level: TypeAlias = Callable[[str, str, str, str, str], Finding]
Said: TypeAlias = tuple[Level, str, str]
"""Level, meaning and remedy of a value."""


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that any finding is about. No other's value is looked at or shown."""
    names = (*(name for name, *_ in RULES), *_ELSEWHERE)
    return {
        name: value
        for name, value in sorted(environment.items())
        if any(fnmatchcase(name, pattern) for pattern in names)
    }


def check(facts: Facts) -> Iterator[Finding]:
    count = 0
    for name, value in facts["environment"].items():
        rule = next((rule for rule in RULES if fnmatchcase(name, rule[0])), None)
        if rule is None:
            continue
        count += 1
        said = None if name in _ELSEWHERE else _said(rule, value, facts)
        if said is None:
            yield Finding(name, repr(value))
        else:
            level, meaning, remedy = said
            yield level(name, repr(value), meaning, remedy, "environment")
    if not count:
        yield Finding("variables", "none is set that changes what is computed")


def _said(rule: Rule, value: str, facts: Facts) -> Said | None:
    if len(rule) == 2:
        return rule[1](value, facts)
    _, values, level, meaning, remedy = rule
    if values == _ON:
        matches = value.strip().lower() not in ("", "0", "false", "off", "no", "n")
    else:
        matches = value in values.split("|")
    return (level, meaning, remedy) if matches else None


def _allocator(value: str, facts: Facts) -> Said | None:
    torch = facts["torch"] if facts["torch"] is not None and not facts["torch"]["fault"] else None
    on_gpus = torch is not None and bool(torch["cuda"] or torch["hip"])
    remedy = "write option:value,option:value as in torch's documentation, or unset it"
    if torch is not None and torch["allocator_fault"]:
        words = torch["allocator_fault"].partition(" INTERNAL ASSERT")[0].rstrip(".")
        level = problem if on_gpus else warning
        return level, f"it fails where CUDA is first used ({words})", remedy
    names = re.findall(r"(?:^|,)\s*(\w+)\s*:", re.sub(r"\[[^]]*\]", "", value))
    unknown = [repr(name) for name in names if name not in OPTIONS]
    if unknown and not on_gpus:  # else torch has looked at the names of options, too
        return warning, f"on CUDA it fails at {' and '.join(unknown)}", remedy
    return None


def _former_allocator(value: str, facts: Facts) -> Said | None:
    later = facts["environment"].get(ALLOCATORS[0])
    if later and later != value:
        meaning = f"{ALLOCATORS[0]} is set too, and otherwise; torch goes by that"
        return warning, meaning, "unset one"
    return None if later else _allocator(value, facts)


def _threads(value: str, facts: Facts) -> Said | None:
    first = value.split(",")[0].strip()
    if not first.isdecimal() or int(first) == 0:
        return warning, "it is no number of threads, and passed over", "correct it, or unset it"
    cores = facts["host"]["own_cores"] if facts["host"] is not None else None
    if cores is None or int(first) == cores:
        return None
    if int(first) > cores:
        meaning = (
            f"that many threads share {cores} core{'s' * (cores > 1)}, and wait for each other"
        )
        return warning, meaning, f"set it to {cores}, or unset it"
    if "WORLD_SIZE" in facts["environment"]:  # each rank has its part
        return None
    meaning = (
        f"it leaves part of {cores} cores unused; anybatch does not change it for several ranks"
    )
    return note, meaning, ""


def _workspace(value: str, facts: Facts) -> Said | None:
    if re.fullmatch(r"(:\d+:\d+)+", value):
        return None
    meaning = "torch cannot read it, and takes workspaces of its own size"
    return warning, meaning, "write :4096:8 or :16:8, or unset it"


def _tf32(value: str, facts: Facts) -> Said | None:
    meanings = {"1": _TF32, "0": "nothing is in TensorFloat-32, with --precision tf32 neither"}
    meaning = meanings.get(value)
    return (warning, meaning, "unset it, and use --precision") if meaning else None


def _preload(value: str, facts: Facts) -> Said | None:
    """A malloc that is loaded is a finding among those on memory."""
    named = re.findall(r"lib(?:jemalloc|tcmalloc|mimalloc)[\w.+-]*", value)
    if named and facts["host"] is not None and not facts["host"]["mallocs"]:
        return warning, f"it could not be loaded ({named[0]})", "correct the path, or unset it"
    return None


def _glibc(value: str, facts: Facts) -> Said | None:
    return _HEAP if "glibc.malloc" in value else None


_TF32 = "products are in TensorFloat-32 whatever precision says"
_HEAP = (
    note,
    "the C library's heap keeps other amounts: on the CPU without --memory predictions may be off",
    "unset it where they matter; under --memory anybatch sets the heap itself",
)
_UNCACHED = "torch's allocator, which holds a budget on CUDA and whose bytes are predicted, is off"
_BLOCKING = "the CPU waits for each kernel of the GPU: training is slower, often by far"
_EAGER = "all kernels are loaded at once: a process holds more of the GPU before it begins"
_MALLOC = "Python takes memory for its objects otherwise: slower, and more than is predicted"
_MALLOC_NAMES = "malloc|debug|malloc_debug|pymalloc_debug|mimalloc|mimalloc_debug"
_NO_COMPILER = (note, "nothing is compiled, with --compile neither", "unset it")
_HOST, _SLOWLY = "GPUs exchange by way of the host", "GPUs of one machine exchange slowly"

_ON = "on"
"""Any value that switches it on."""

Rule: TypeAlias = (
    tuple[str, Callable[[str, Facts], "Said | None"]] | tuple[str, str, Level, str, str]
)

RULES: tuple[Rule, ...] = (
    (ALLOCATORS[0], _allocator),
    (ALLOCATORS[1], _former_allocator),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, warning, _UNCACHED, "unset it"),
    ("OMP_NUM_THREADS", _threads),
    ("MKL_NUM_THREADS", _threads),
    ("CUBLAS_WORKSPACE_CONFIG", _workspace),
    (
        *("CUDA_LAUNCH_BLOCKING", _ON, warning, _BLOCKING),
        "unset it, unless you look for the kernel that fails",
    ),
    ("NVIDIA_TF32_OVERRIDE", _tf32),
    (
        *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _ON, warning, _TF32),
        "unset it, and use --precision tf32",
    ),
    ("CUDA_MODULE_LOADING", "EAGER", note, _EAGER, "unset it"),
    ("NCCL_P2P_DISABLE", _ON, warning, _HOST, "unset it"),
    ("NCCL_SHM_DISABLE", _ON, warning, _SLOWLY, "unset it"),
    ("NCCL_IB_DISABLE", _ON, note, "InfiniBand is not used between machines", "unset it"),
    ("NCCL_DEBUG", "INFO|TRACE", note, "NCCL writes what it does, and is slower", "unset it"),
    ("NCCL_*", lambda value, facts: None),
    ("TORCH_NCCL_*", lambda value, facts: None),
    (
        *("TORCH_DISTRIBUTED_DEBUG", "DETAIL", note),
        *("each collective is checked, which takes time", "unset it"),
    ),
    ("TORCHDYNAMO_DISABLE", _ON, *_NO_COMPILER),
    ("TORCH_COMPILE_DISABLE", _ON, *_NO_COMPILER),
    ("MALLOC_CHECK_", _ON, warning, "the heap is checked at each call: slow", "unset it"),
    ("MALLOC_PERTURB_", _ON, warning, "all memory is written twice: slow", "unset it"),
    ("MALLOC_*", _ON, *_HEAP),
    ("GLIBC_TUNABLES", _glibc),
    ("PYTHONMALLOC", _MALLOC_NAMES, warning, _MALLOC, "unset it"),
    ("LD_PRELOAD", _preload),
)
"""Name, which may end with `*`, and either values, level, meaning and remedy, or a function that says
them."""
