"""Recompute leaves nothing behind in the process, however many blocks go through it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MANY = """
import torch
from torch import nn
from anybatch.compute.recompute import install
from anybatch.plans import Recompute

model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(16)))
install(model, Recompute(blocks=tuple(map(str, range(16)))))

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

def run(num_passes):
    for _ in range(num_passes):
        model(torch.ones(1, 1)).sum().backward()

run(200)
before = peak()
run(6000)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from Linux's books")
def test_a_hundred_thousand_blocks_that_are_recomputed_leave_nothing_in_the_process():
    words = [sys.executable, "-c", MANY]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    assert int(done.stdout) < 2048
