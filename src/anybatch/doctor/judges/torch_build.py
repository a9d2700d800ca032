"""torch: whether it can be imported, its version, its build, and whether it computes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from anybatch.doctor.facts import Facts, Host, Limit, Torch
from anybatch.doctor.finding import Finding
from anybatch.doctor.judges.packages import with_folder
from anybatch.doctor.judges.versions import is_before, numbers_of

LEAST, TESTED = "2.11", "2.13"
"""The first version that will do, and the last that anybatch was tested with."""

_REINSTALL = (
    "install torch anew, with one of the commands of https://pytorch.org/get-started/locally"
)

# What the loader of libraries says, and what to do.
_CAUSES = (
    (r"No module named 'torch'", "pip install torch"),
    (
        r"failed to map segment|[Cc]annot allocate memory|MemoryError",
        "memory ran out while it was loaded: raise the limits of this process (ulimit -v, ulimit -d)",
    ),
    (
        r"lib(?:cud|cublas|nccl|nv|cufft|curand|cusolver|cusparse)[\w.-]*\.so",
        f"a library of CUDA is missing, or LD_LIBRARY_PATH leads astray: unset it, or {_REINSTALL}",
    ),
    (
        r"undefined symbol",
        f"several versions are mixed: unset LD_LIBRARY_PATH and LD_PRELOAD, or {_REINSTALL}",
    ),
)


def judge(facts: Facts) -> Iterator[Finding]:
    """Findings on `Facts.torch` and `Facts.steps`."""
    torch = facts.torch
    if torch is None:
        return
    if torch.fault:
        yield _not_there(torch, facts.host)
        return
    yield _version(torch, facts)
    yield Finding("build", _build(torch))
    if facts.python is not None:
        yield _compiler(facts.python.compiler)
    for step in facts.steps:
        if step.fault:
            yield Finding(
                f"steps on {step.device}",
                "wrong or failed",
                "problem",
                meaning=f"two small steps of training failed ({step.fault})",
                remedy=_remedy_of_step(step.device),
            )
        else:
            yield Finding(f"steps on {step.device}", "two small ones came out right")


def _not_there(torch: Torch, host: Host | None) -> Finding:
    if torch.folder:
        return Finding(
            "torch",
            "not torch",
            "problem",
            place=torch.folder,
            meaning="another module has its name",
            remedy="rename that, or run anybatch from another folder",
        )
    limits = host.limits if host is not None else {}
    tight = [
        name for name in ("RLIMIT_AS", "RLIMIT_DATA") if limits.get(name, Limit()).soft is not None
    ]
    found = [remedy for pattern, remedy in _CAUSES if re.search(pattern, torch.fault)]
    if tight and not found:
        found = [f"raise {' and '.join(tight)} of this process, under which libraries may fail so"]
    meaning = torch.fault.rstrip(".")
    remedy = found[0] if found else _REINSTALL
    return Finding("torch", "cannot be imported", "problem", meaning=meaning, remedy=remedy)


def _version(torch: Torch, facts: Facts) -> Finding:
    value = with_folder(torch.version, torch.folder, facts.python)
    if is_before(torch.version, LEAST):
        meaning, remedy = f"anybatch needs {LEAST} or later", f"pip install 'torch>={LEAST}'"
        return Finding("torch", value, "problem", meaning=meaning, remedy=remedy)
    if numbers_of(TESTED) < numbers_of(torch.version)[:2]:
        meaning = f"tested are {LEAST} to {TESTED}: predictions may be further off"
        return Finding("torch", value, "note", meaning=meaning)
    return Finding("torch", value)


def _build(torch: Torch) -> str:
    target = f"for CUDA {torch.cuda}" * bool(torch.cuda) or f"for ROCm {torch.hip}" * bool(
        torch.hip
    )
    names = {"mkl": "MKL", "mkldnn": "oneDNN", "openmp": "OpenMP"}
    cudnn = f"cuDNN {torch.cudnn}" if torch.cudnn else ""
    libraries = [names[name] for name in torch.libraries]
    return ", ".join(filter(None, (target or "for CPUs", cudnn, torch.cpu, *libraries)))


def _compiler(compiler: str) -> Finding:
    if compiler:
        return Finding("C++ compiler", compiler)
    return Finding(
        "C++ compiler",
        "none",
        "note",
        meaning="--compile needs one on a CPU",
        remedy="if you want that, install g++, or name one in CXX",
    )


def _remedy_of_step(device: str) -> str:
    if device == "cpu":
        return _REINSTALL
    return (
        "see the group GPUs for the cause; if there is none, run it again with"
        " CUDA_LAUNCH_BLOCKING=1, look at dmesg for lines with Xid, and restart the machine"
    )
