"""Environment variables that change what is computed, how fast, or how many bytes it takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from anybatch.doctor.facts import Facts, Torch
from anybatch.doctor.finding import Finding, Level

ALLOCATOR, FORMER_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"

LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_TASK"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE"),
)
"""What starters of ranks leave behind. Told with the ranks, not here."""

_ELSEWHERE = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)
"""Judged with what they are about."""

OPTIONS = frozenset(
    {
        *(
            "backend",
            "expandable_segments",
            "garbage_collection_threshold",
            "large_segment_size_mb",
        ),
        *("graph_capture_record_stream_reuse", "max_non_split_rounding_mb", "max_split_size_mb"),
        *("per_process_memory_fraction", "pinned_max_cached_size_mb", "pinned_max_power2_size_mb"),
        *("pinned_max_round_threshold_mb", "pinned_num_register_threads"),
        *("pinned_reserve_segment_size_mb", "pinned_use_background_threads"),
        *(
            "pinned_use_cuda_host_register",
            "pinned_use_hip_host_register",
            "pinned_use_host_register",
        ),
        *(
            "release_lock_on_cudamalloc",
            "release_lock_on_hipmalloc",
            "release_lock_on_device_malloc",
        ),
        *("roundup_power2_divisions", "throw_on_cudamalloc_oom"),
    }
)
"""Of torch's allocator on CUDA, in versions 2.11 to 2.14."""

Told: TypeAlias = tuple[Level, str, str]
"""Level, meaning and remedy of a value that has to be told of."""

Look: TypeAlias = Callable[[str, Facts], Told | None]
"""Says what there is to tell of a value; None: all is well."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What to say of a variable, whose `name` may end with `*`."""

    name: str
    look: Look


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that any finding is about. No other's value is looked at or shown."""
    names = (*(rule.name for rule in RULES), *LAUNCHERS, *_ELSEWHERE)
    return {
        name: value
        for name, value in sorted(environment.items())
        if any(fnmatchcase(name, pattern) for pattern in names)
    }


def judge(facts: Facts) -> Iterator[Finding]:
    """Findings on `Facts.environment`."""
    count = 0
    for name, value in facts.environment.items():
        rule = next((rule for rule in RULES if fnmatchcase(name, rule.name)), None)
        if rule is None:
            continue
        count += 1
        told = rule.look(value, facts)
        if told is None:
            yield Finding(name, repr(value))
        else:
            level, meaning, remedy = told
            yield Finding(name, repr(value), level, "environment", meaning, remedy)
    if not count:
        yield Finding("variables", "none is set that changes what is computed")


# -------------------------------------------------------------------------------------------- rules


def _if_on(*told: *Told) -> Look:
    """For a switch that is on."""

    def look(value: str, facts: Facts) -> Told | None:
        return None if value.strip().lower() in ("", "0", "false", "off", "no", "n") else told

    return look


def _if_any_of(values: tuple[str, ...], *told: *Told) -> Look:
    """For a variable that has one of these values."""
    return lambda value, facts: told if value in values else None


def _never(value: str, facts: Facts) -> Told | None:
    """For a variable that is shown, and no more."""
    return None


_SHAPE = (
    "write option:value,option:value, as torch's documentation has them under 'Optimizing memory"
    " usage', or unset it"
)


def _allocator(value: str, facts: Facts) -> Told | None:
    torch = facts.torch or Torch()
    computes_on_gpus = bool(torch.cuda or torch.hip)
    if torch.allocator_fault:
        words = torch.allocator_fault.partition(" INTERNAL ASSERT")[0].rstrip(".")
        level: Level = "problem" if computes_on_gpus else "warning"
        return level, f"it fails where CUDA is first used ({words})", _SHAPE
    names = re.findall(r"(?:^|,)\s*(\w+)\s*:", re.sub(r"\[[^]]*\]", "", value))
    unknown = [repr(name) for name in names if name not in OPTIONS]
    if unknown and not computes_on_gpus:  # else it has looked at the names of options, too
        return "warning", f"on CUDA it fails at {' and '.join(unknown)}", _SHAPE
    return None


def _former_allocator(value: str, facts: Facts) -> Told | None:
    later = facts.environment.get(ALLOCATOR)
    if later:
        if later == value:
            return None
        return "warning", f"{ALLOCATOR} is set too, and otherwise; torch goes by that", "unset one"
    return _allocator(value, facts)


def _threads(value: str, facts: Facts) -> Told | None:
    first = value.split(",")[0].strip()
    if not first.isdecimal() or int(first) == 0:
        return "warning", "it is no number of threads, and passed over", "correct it, or unset it"
    cores = facts.host.own_cores if facts.host is not None else None
    if cores is None or int(first) == cores:
        return None
    if int(first) > cores:
        return (
            "warning",
            f"so many threads share {cores} core{'s' if cores > 1 else ''}, and wait for each other",
            f"set it to {cores}, or unset it",
        )
    if "WORLD_SIZE" in facts.environment:  # each rank has its part
        return None
    meaning = (
        f"of {cores} cores so many compute; anybatch leaves it as it is, with several ranks too"
    )
    return "note", meaning, ""


def _workspace(value: str, facts: Facts) -> Told | None:
    if not re.fullmatch(r"(:\d+:\d+)+", value):
        return (
            "warning",
            "torch cannot read it, and takes workspaces of its own size",
            "write :4096:8 or :16:8, or unset it",
        )
    return None


def _tf32(value: str, facts: Facts) -> Told | None:
    meanings = {"1": _TF32, "0": "nothing is in TensorFloat-32, with --precision tf32 neither"}
    meaning = meanings.get(value)
    return ("warning", meaning, "unset it, and use --precision") if meaning else None


def _preload(value: str, facts: Facts) -> Told | None:
    """A malloc that is loaded is told of with the memory."""
    found = facts.host.mallocs if facts.host is not None else ()
    named = re.findall(r"lib(?:jemalloc|tcmalloc|mimalloc)[\w.+-]*", value)
    if named and facts.host is not None and not found:
        return "warning", f"it could not be loaded ({named[0]})", "correct the path, or unset it"
    return None


def _glibc(value: str, facts: Facts) -> Told | None:
    return _HEAP if "glibc.malloc" in value else None


_HEAP: Told = (
    "note",
    "the C library's heap keeps other amounts: on the CPU without --memory predictions may be off",
    "unset it where they matter; under --memory anybatch sets the heap itself",
)
_TF32 = "products are in TensorFloat-32 whatever precision says"
_NO_COMPILER: Told = ("note", "nothing is compiled, with --compile neither", "unset it")

RULES = (
    Rule(ALLOCATOR, _allocator),
    Rule(FORMER_ALLOCATOR, _former_allocator),
    Rule(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _if_on(
            "warning",
            "torch's allocator, which holds a budget on CUDA and whose bytes are predicted, is off",
            "unset it",
        ),
    ),
    Rule("OMP_NUM_THREADS", _threads),
    Rule("MKL_NUM_THREADS", _threads),
    Rule("CUBLAS_WORKSPACE_CONFIG", _workspace),
    Rule(
        "CUDA_LAUNCH_BLOCKING",
        _if_on(
            "warning",
            "the CPU waits for each kernel of the GPU: training is slower, often by far",
            "unset it, unless you look for the kernel that fails",
        ),
    ),
    Rule("NVIDIA_TF32_OVERRIDE", _tf32),
    Rule(
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        _if_on("warning", _TF32, "unset it, and use --precision tf32"),
    ),
    Rule(
        "CUDA_MODULE_LOADING",
        _if_any_of(
            ("EAGER",),
            "note",
            "all kernels are loaded at once: a process holds more of the GPU before it begins",
            "unset it",
        ),
    ),
    Rule("NCCL_P2P_DISABLE", _if_on("warning", "GPUs exchange by way of the host", "unset it")),
    Rule("NCCL_SHM_DISABLE", _if_on("warning", "GPUs of one machine exchange slowly", "unset it")),
    Rule("NCCL_IB_DISABLE", _if_on("note", "InfiniBand is not used between machines", "unset it")),
    Rule(
        "NCCL_DEBUG",
        _if_any_of(
            ("INFO", "TRACE"), "note", "NCCL writes what it does, and is slower", "unset it"
        ),
    ),
    Rule("NCCL_*", _never),
    Rule("TORCH_NCCL_*", _never),
    Rule(
        "TORCH_DISTRIBUTED_DEBUG",
        _if_any_of(("DETAIL",), "note", "each collective is checked, which takes time", "unset it"),
    ),
    Rule("TORCHDYNAMO_DISABLE", _if_on(*_NO_COMPILER)),
    Rule("TORCH_COMPILE_DISABLE", _if_on(*_NO_COMPILER)),
    Rule("MALLOC_CHECK_", _if_on("warning", "the heap is checked at each call: slow", "unset it")),
    Rule("MALLOC_PERTURB_", _if_on("warning", "all memory is written twice: slow", "unset it")),
    Rule("MALLOC_*", _if_on(*_HEAP)),
    Rule("GLIBC_TUNABLES", _glibc),
    Rule(
        "PYTHONMALLOC",
        _if_any_of(
            ("malloc", "debug", "malloc_debug", "pymalloc_debug", "mimalloc", "mimalloc_debug"),
            "warning",
            "Python takes memory for its objects otherwise: slower, and more than is predicted",
            "unset it",
        ),
    ),
    Rule("LD_PRELOAD", _preload),
)
