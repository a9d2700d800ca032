"""Recompute leaves nothing behind in the process, however much goes through it."""

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

class First(nn.Module):
    def forward(self, *tensors):  # each of them is kept for the second run
        return tensors[0].square()

model = nn.Sequential(First())
install(model, Recompute(blocks=("0",)))
given = [torch.ones(1, requires_grad=True)] * 100

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

def run(num_passes):
    for _ in range(num_passes):
        model[0](*given).sum().backward()

run(10)
before = peak()
run(1200)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from Linux's books")
def test_a_hundred_thousand_tensors_kept_for_a_second_run_leave_nothing_in_the_process():
    words = [sys.executable, "-c", MANY]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    assert int(done.stdout) < 2048
