"""Environment variables that change what is computed, how fast, or how many bytes it takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from anybatch.doctor.finding import Facts, Finding, Level, note, problem, warning
from anybatch.doctor.gpus import VISIBLE
from anybatch.doctor.packages import ALLOCATORS
from anybatch.doctor.ranks import LAUNCHERS

_ON = r"(?i)(?!\s*(0|false|off|no|n)?\s*$).*"


class Rule(NamedTuple):
    """A variable and the values that lead to a finding.

    Attributes:
        pattern: of its name, which may end with `*`.
        values: regular expression for the whole value; by default any value that switches it on.
    """

    pattern: str
    level: Level
    meaning: str
    remedy: str = "unset it"
    values: str = _ON


_TF32 = "products are in TensorFloat-32 whatever precision says"
_USE_PRECISION = "unset it, and use --precision tf32"
_NO_TF32 = "nothing is in TensorFloat-32, even with --precision tf32"
_NO_COMPILER = "nothing is compiled, even with --compile"

RULES = (
    Rule(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "warning",
        "torch's allocator, which enforces a budget on CUDA and whose bytes are predicted, is off",
    ),
    Rule(
        "CUBLAS_WORKSPACE_CONFIG",
        "warning",
        "torch cannot read it, and uses workspaces of its default size",
        "write :4096:8 or :16:8, or unset it",
        r"(?!(:\d+:\d+)+$).*",
    ),
    Rule(
        "CUDA_LAUNCH_BLOCKING",
        "warning",
        "the CPU waits for each kernel of the GPU: training is slower, often by far",
        "unset it, unless you are looking for the kernel that fails",
    ),
    Rule("NVIDIA_TF32_OVERRIDE", "warning", _TF32, _USE_PRECISION, "1"),
    Rule("NVIDIA_TF32_OVERRIDE", "warning", _NO_TF32, _USE_PRECISION, "0"),
    Rule("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "warning", _TF32, _USE_PRECISION),
    Rule(
        "CUDA_MODULE_LOADING",
        "note",
        "all kernels are loaded at once: a process holds more of the GPU before it begins",
        values="EAGER",
    ),
    Rule("NCCL_P2P_DISABLE", "warning", "GPUs exchange by way of the host"),
    Rule("NCCL_SHM_DISABLE", "warning", "GPUs of one machine exchange slowly"),
    Rule("NCCL_IB_DISABLE", "note", "InfiniBand is not used between machines"),
    Rule("NCCL_DEBUG", "note", "NCCL logs what it does, and is slower", values="INFO|TRACE"),
    Rule(
        "TORCH_DISTRIBUTED_DEBUG",
        "note",
        "each collective is checked, which takes time",
        values="DETAIL",
    ),
    Rule("TORCHDYNAMO_DISABLE", "note", _NO_COMPILER),
    Rule("TORCH_COMPILE_DISABLE", "note", _NO_COMPILER),
    Rule("MALLOC_CHECK_", "warning", "the heap is checked at each call: slow"),
    Rule("MALLOC_PERTURB_", "warning", "all memory is written twice: slow"),
    Rule(
        "PYTHONMALLOC",
        "warning",
        "Python allocates its objects another way: slower, and with more memory",
        values="(malloc|pymalloc|mimalloc)(_debug)?|debug",
    ),
)

_SHOWN = ("NCCL_*", "TORCH_NCCL_*")
"""Variables that are shown without a judgement."""

_ELSEWHERE = (*LAUNCHERS, VISIBLE, "CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME")
"""Variables with findings of other groups."""

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that any finding is about. No other value is read or shown."""
    names = (*_own_names(), *_ELSEWHERE)
    return {
        name: value
        for name, value in sorted(environment.items())
        if any(fnmatchcase(name, pattern) for pattern in names)
    }


def _own_names() -> tuple[str, ...]:
    return (*(rule.pattern for rule in RULES), *_SHOWN, *ALLOCATORS, *_THREADS, "LD_PRELOAD")


def check(facts: Facts) -> Iterator[Finding]:
    is_any = False
    for name, value in facts["environment"].items():
        if any(fnmatchcase(name, pattern) for pattern in _own_names()):
            is_any = True
            yield _finding(name, value, facts) or Finding(name, repr(value))
    if not is_any:
        yield Finding("variables", "none is set that changes what is computed")


def _finding(name: str, value: str, facts: Facts) -> Finding | None:
    if name in ALLOCATORS:
        return _allocator(name, value, facts)
    if name in _THREADS:
        return _threads(name, value, facts)
    if name == "LD_PRELOAD":
        return _preload(name, value, facts)
    for rule in RULES:
        if fnmatchcase(name, rule.pattern) and re.fullmatch(rule.values, value):
            place = "environment"
            return Finding(name, repr(value), rule.level, place, rule.meaning, rule.remedy)
    return None


def _allocator(name: str, value: str, facts: Facts) -> Finding | None:
    later = facts["environment"].get(ALLOCATORS[0])
    if name == ALLOCATORS[1] and later and later != value:
        meaning = f"{ALLOCATORS[0]} is set too, to something else; torch uses that one"
        return warning(name, repr(value), meaning, "unset one", "environment")
    torch = facts["torch"] or {"fault": "unknown"}
    if torch["fault"] or not torch["allocator_fault"]:
        return None
    level = problem if torch["cuda"] or torch["hip"] else warning
    words = torch["allocator_fault"].partition(" INTERNAL ASSERT")[0].rstrip(".")
    meaning = f"it fails where CUDA is first used ({words})"
    remedy = "write option:value,option:value as in torch's documentation, or unset it"
    return level(name, repr(value), meaning, remedy, "environment")


def _threads(name: str, value: str, facts: Facts) -> Finding | None:
    first = value.split(",")[0].strip()
    cores = facts["host"]["own_cores"] if facts["host"] is not None else None
    if not first.isdecimal() or int(first) == 0:
        meaning, remedy = "it is not a number of threads, and ignored", "correct it, or unset it"
        return warning(name, repr(value), meaning, remedy, "environment")
    if cores is not None and int(first) > cores:
        meaning = f"these threads share {cores} core{'s' * (cores > 1)}, and wait for each other"
        remedy = f"set it to {cores}, or unset it"
        return warning(name, repr(value), meaning, remedy, "environment")
    # Launchers give each rank a part of the cores.
    if cores is not None and int(first) < cores and "WORLD_SIZE" not in facts["environment"]:
        return note(name, repr(value), f"part of {cores} cores stays unused", "", "environment")
    return None


def _preload(name: str, value: str, facts: Facts) -> Finding | None:
    """An allocator that could not be loaded; one that was is a finding among those on memory."""
    named = re.findall(r"lib(?:jemalloc|tcmalloc|mimalloc)[\w.+-]*", value)
    if named and facts["host"] is not None and not facts["host"]["mallocs"]:
        meaning, remedy = f"it could not be loaded ({named[0]})", "correct the path, or unset it"
        return warning(name, repr(value), meaning, remedy, "environment")
    return None
