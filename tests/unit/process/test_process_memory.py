"""What the process holds before a baseline is taken, so that a run does not take it by chance; what is
no part of a run; and what a budget leaves behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMON = """
import torch
from anybatch.process.process_memory import status, trim

torch.set_num_threads(1)
torch.ones(4).sum()

"""

FIRST_USES = """
from anybatch.engine.limit import CpuLimit

meter = CpuLimit().enter()
model = torch.nn.Sequential(
    torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.GELU(), torch.nn.Linear(64, 3)
)
optimizer = torch.optim.AdamW(model.parameters())
loss = torch.nn.functional.cross_entropy(model(torch.randn(100, 20)), torch.zeros(100).long())
loss.backward()
optimizer.step()
assert meter.peak_bytes() < 4 << 20, meter.peak_bytes()  # of which 0.1 MiB are training's
"""

ASIDE = """
from anybatch.engine.meter import CpuMeter

meter = CpuMeter()
with meter.aside():
    torch.ones(1 << 23)
    kept = torch.ones(1 << 21)
assert 8 << 20 <= meter.peak_bytes() < 12 << 20, meter.peak_bytes()
"""

BUDGET = """
import resource
from anybatch.engine.limit import CpuLimit


def faults():
    for _ in range(3):
        torch.empty(6 << 20).fill_(1)  # the first ones may take new pages
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.empty(6 << 20).fill_(1)  # 24 MiB: more than any hole in the heap
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


limits = [CpuLimit(64 << 20), CpuLimit(32 << 20)]
for limit in limits:
    limit.enter()
limits[1].leave()
limits[0].follow("returned")
assert faults() >= 10 * 4, faults()  # returned each time, if only in pages of 2 MiB
limits[0].follow("kept")
assert faults() < 10, faults()  # for reuse, as without a budget
limits[0].leave()
assert faults() < 10, faults()
"""

HOLES = """
from anybatch.process.process_memory import free_in_heap, keep_freed_memory, return_freed_memory

MIB = 1 << 20
keep_freed_memory()
blocks = [torch.ones(4 << 20) for _ in range(4)]  # of 16 MiB each, in the heap
small = [torch.ones(1 << 14) for _ in range(64)]  # some of them behind those
del blocks
assert free_in_heap() > 60 * MIB
return_freed_memory()
assert free_in_heap() > 60 * MIB  # still free, for whoever asks how much the process needs
before = status("RssAnon")
for _ in range(4):
    torch.ones(3 << 20)
    assert status("RssAnon") - before < MIB, status("RssAnon") - before
data = status("VmData")
keep_freed_memory()
kept = torch.ones(3 << 20)
assert status("VmData") <= data  # in a hole again
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(FIRST_USES, id="first uses", marks=pytest.mark.nightly),
        pytest.param(ASIDE, id="aside", marks=pytest.mark.nightly),
        pytest.param(BUDGET, id="budget"),
        pytest.param(HOLES, id="holes", marks=pytest.mark.nightly),
    ],
)
def test_what_a_process_holds(what: str):
    done = subprocess.run(
        [sys.executable, "-c", COMMON + what], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
