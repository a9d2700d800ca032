"""A machine where all is well, made up; tests break one thing of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anybatch.doctor.facts import (
    CudaDevice,
    Enforcement,
    Facts,
    Folder,
    Folders,
    Gpu,
    Gpus,
    Host,
    Interface,
    Limit,
    Network,
    Package,
    Pair,
    Python,
    Step,
    Torch,
)

GIB = 1 << 30

GPUS = Gpus(
    driver="580.82.07",
    cuda="13.0",
    on_bus=2,
    module="580.82.07",
    gpus=tuple(
        Gpu(i, "NVIDIA A100 80GB", f"GPU-{i}a", 80 * GIB, 79 * GIB, "8.0", True, 0, False)
        for i in range(2)
    ),
)
TORCH = Torch(
    version="2.13.0+cu130",
    folder="/venv/lib/python3.11/site-packages/torch",
    cuda="13.0",
    architectures=("sm_75", "sm_80", "sm_90", "compute_90"),
    cpu="AVX512",
    libraries=("mkl", "mkldnn", "openmp"),
    threads=8,
    backends=("gloo", "nccl"),
    nccl="2.28.9",
    devices=tuple(CudaDevice("NVIDIA A100 80GB", "8.0", 80 * GIB) for _ in range(2)),
)
HOST = Host(
    system="linux",
    cores=8,
    own_cores=8,
    total_bytes=64 * GIB,
    available_bytes=60 * GIB,
    overcommit=0,
    huge_pages="madvise",
    limits={
        "RLIMIT_DATA": Limit(),
        "RLIMIT_AS": Limit(),
        "RLIMIT_MEMLOCK": Limit(8 << 20, 8 << 20),
        "RLIMIT_NOFILE": Limit(1024, 1 << 20),
    },
    shm_bytes=32 * GIB,
    shm_free_bytes=32 * GIB,
)
NETWORK = Network(
    name="node1",
    address="10.0.0.1",
    interfaces=(Interface("lo", ("127.0.0.1",)), Interface("eth0", ("10.0.0.1",))),
)
FOLDERS = Folders(*(Folder(f"/home/me/{name}", "", 500 * GIB) for name in ("cache", "runs", "tmp")))
PYTHON = Python(
    version="3.11.7",
    executable="/venv/bin/python",
    prefix="/venv",
    anybatch="0.1.0",
    folder="/venv/lib/python3.11/site-packages/anybatch",
    system="Linux 6.8 x86_64",
    libc="glibc 2.39",
    compiler="/usr/bin/g++",
    packages=(
        Package("torch", "", "2.11", "2.13.0"),
        Package("numpy", "", "", "2.4.0"),
        Package("submitit", "slurm", "", "1.5"),
    ),
)
WELL = Facts(
    python=PYTHON,
    torch=TORCH,
    steps=(Step("cpu"), Step("cuda:0"), Step("cuda:1")),
    gpus=GPUS,
    host=HOST,
    enforcement=Enforcement(),
    network=NETWORK,
    pair=Pair("lo"),
    folders=FOLDERS,
)


def with_(facts: Facts, **changes: Any) -> Facts:
    """`facts` with these changes: those of a dict are made within the record, other values replace."""
    return replace(
        facts,
        **{
            name: replace(getattr(facts, name), **change)
            if isinstance(change, dict) and name != "environment"
            else change
            for name, change in changes.items()
        },
    )
