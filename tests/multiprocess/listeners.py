"""What listens: every listening TCP socket of a process and all its descendants."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
from torch import distributed

from anybatch.launch import find, join

ROOT = "TEST_LISTENERS_ROOT"
"""The environment variable with the process from which a rank looks down."""


def below(root: int) -> list[str]:
    """Addresses at which `root` or one of its descendants listens."""
    top = psutil.Process(root)
    found = []
    for process in (top, *top.children(recursive=True)):
        try:
            connections = process.net_connections("inet")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        found += [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
    return sorted(found)


def survey(folder: str) -> None:
    """Join the other ranks and write down what listens while all are joined."""
    membership = find()
    assert membership is not None
    with join(membership, "cpu", timeout_seconds=60):
        distributed.barrier()
        write(folder, membership.rank)
        distributed.barrier()


def write(folder: str, rank: int) -> None:
    """Write down what listens, as this rank sees it; all ranks are joined."""
    Path(folder, f"{rank}.json").write_text(json.dumps(below(int(os.environ[ROOT]))))


if __name__ == "__main__":
    survey(*sys.argv[1:])
