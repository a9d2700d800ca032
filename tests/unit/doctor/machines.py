"""A machine where all is well, made up; tests break one thing of it."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30

Facts = dict[str, Any]


def package(
    name: str, extra: str = "", least: str = "", version: Any = None, fault: str = ""
) -> Facts:
    return {"name": name, "extra": extra, "least": least, "version": version, "fault": fault}


def step(device: str, fault: str = "") -> Facts:
    return {"device": device, "fault": fault}


def cuda_device(name: str, capability: str) -> Facts:
    return {"name": name, "capability": capability, "total_bytes": 80 * GIB}


def user(pid: int, name: str, num_bytes: int | None) -> Facts:
    return {"pid": pid, "name": name, "num_bytes": num_bytes}


def folder(path: str, fault: str = "", free_bytes: int | None = None) -> Facts:
    return {"path": path, "fault": fault, "free_bytes": free_bytes}


def pair(interface: str, fault: str = "") -> Facts:
    return {"interface": interface, "fault": fault}


def broken_torch(fault: str, folder: str = "") -> Facts:
    return {"fault": fault, "folder": folder}


def master(
    host: str = "", port: int | None = None, fault: str = "", is_taken: bool = False
) -> Facts:
    place = f"{host or 'this machine'}:{port}" if port else host
    return {
        "host": host,
        "port": port,
        "host_fault": fault,
        "here": not fault,
        "port_free": not is_taken if port else None,
        "place": place,
    }


def no_gpus(fault: str = "NVML Shared Library Not Found", on_bus: int = 0) -> Facts:
    return {"driver": "", "cuda": "", "fault": fault, "on_bus": on_bus, "gpus": []}


GPUS: Facts = {
    "driver": "580.82.07",
    "cuda": "13.0",
    "fault": "",
    "on_bus": 2,
    "gpus": [
        {
            "index": index,
            "name": "NVIDIA A100 80GB",
            "uuid": f"GPU-{index}a",
            "total_bytes": 80 * GIB,
            "free_bytes": 79 * GIB,
            "ecc": True,
            "errors": 0,
            "mig": False,
            "compute_mode": "default",
            "users": [],
        }
        for index in range(2)
    ],
}
TORCH: Facts = {
    "fault": "",
    "version": "2.13.0+cu130",
    "folder": "/venv/lib/python3.11/site-packages/torch",
    "cuda": "13.0",
    "hip": "",
    "cpu": "AVX512",
    "cudnn": "",
    "libraries": ["mkl", "mkldnn", "openmp"],
    "threads": 8,
    "backends": ["gloo", "nccl"],
    "nccl": "2.28.9",
    "devices": [cuda_device("NVIDIA A100 80GB", "8.0") for _ in range(2)],
    "cuda_fault": "",
    "allocator_fault": "",
}
HOST: Facts = {
    "system": "linux",
    "cores": 8,
    "own_cores": 8,
    "total_bytes": 64 * GIB,
    "available_bytes": 60 * GIB,
    "swap_bytes": 0,
    "quota_cores": None,
    "group_bytes": None,
    "group_used_bytes": 0,
    "group_file": "",
    "oom_kills": None,
    "limits": {
        "RLIMIT_DATA": (None, None),
        "RLIMIT_AS": (None, None),
        "RLIMIT_NOFILE": (1024, 1 << 20),
    },
    "shm_bytes": 32 * GIB,
    "shm_free_bytes": 32 * GIB,
    "mallocs": [],
}
NETWORK: Facts = {
    "name": "node1",
    "address": "10.0.0.1",
    "name_fault": "",
    "loopback_fault": "",
    "interfaces": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]},
    "master": master(),
    "launcher": "",
    "rank": None,
    "world_size": None,
    "launcher_fault": "",
}
PYTHON: Facts = {
    "version": "3.11.7",
    "executable": "/venv/bin/python",
    "prefix": "/venv",
    "anybatch": "0.1.0",
    "folder": "/venv/lib/python3.11/site-packages/anybatch",
    "system": "Linux 6.8 x86_64",
    "libc": "glibc 2.39",
    "compiler": "/usr/bin/g++",
    "packages": [
        package("torch", "", "2.11", "2.13.0"),
        package("numpy", "", "", "2.4.0"),
        package("submitit", "slurm", "", "1.5"),
    ],
}
WELL: Facts = {
    "environment": {},
    "python": PYTHON,
    "torch": TORCH,
    "steps": [step("cpu"), step("cuda:0"), step("cuda:1")],
    "gpus": GPUS,
    "host": HOST,
    "enforcement": {"fault": ""},
    "network": NETWORK,
    "pair": pair("lo"),
    "folders": {
        name: folder(f"/home/me/{name}", "", 500 * GIB) for name in ("runs", "cache", "temporary")
    },
}


def with_(facts: Facts, **changes: Any) -> Facts:
    """`facts` with these changes, each made within the subject where that is a dictionary."""
    changed = {
        name: {**facts[name], **change}
        if isinstance(change, dict) and isinstance(facts[name], dict)
        else change
        for name, change in changes.items()
    }
    return {**facts, **changed}
