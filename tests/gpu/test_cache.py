"""The model of torch's CUDA allocator against the allocator itself."""

from __future__ import annotations

import random

import pytest
import torch

from anybatch.engine.meter import CudaMeter
from anybatch.estimate.allocator import CudaCache, replay
from anybatch.estimate.trace import Block, Timeline
from anybatch.estimate.workspaces import workspaces_of
from anybatch.machine import Machine
from anybatch.process.cuda_driver import context_bytes, process_bytes_on, take_workspaces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("seed", range(5))
def test_reserved_and_allocated_are_those_of_torch(seed: int):
    draw = random.Random(seed)
    torch.cuda.empty_cache()
    # In a pool of its own, so that nothing finds room beside what other tests have left.
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        _compare(draw)


def _compare(draw: random.Random) -> None:
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    blocks: list[Block] = []
    alive: dict[int, torch.Tensor] = {}
    for moment in range(400):
        size = int(2 ** draw.uniform(6, 26))
        blocks.append(Block(size, moment, "compute"))
        alive[moment] = torch.empty(size, dtype=torch.uint8, device="cuda")
        if len(alive) > 20:
            gone = draw.choice(list(alive))
            blocks[gone].died = moment
            del alive[gone]
    taken = replay(Timeline(blocks=blocks, num_moments=400), CudaCache())
    assert taken.peak_bytes == torch.cuda.max_memory_reserved() - before[0]
    assert taken.allocated_bytes == torch.cuda.max_memory_allocated() - before[1]


def test_cublas_has_the_workspaces_that_are_predicted():
    torch._C._cuda_clearCublasWorkspaces()  # of what was run before
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    take_workspaces(torch.device("cuda", 0))
    taken = torch.cuda.max_memory_allocated() - before
    expected = sum(workspaces_of(Machine.here(device="cuda").device))
    assert expected <= taken <= expected + (16 << 10)  # with the tensors of the products


def test_the_meter_keeps_the_most_of_every_account():
    meter = CudaMeter(torch.device("cuda"))
    size = 64 << 20
    before = torch.cuda.memory_allocated()
    block = torch.empty(size, dtype=torch.uint8, device="cuda")
    del block
    meter.begin_lap()
    totals = meter.totals()
    assert totals["allocated"] == totals["active"] == before + size
    assert totals["allocated"] <= totals["reserved"] <= totals["total"] == meter.peak_bytes()


def test_the_context_is_measured_once_and_lies_beside_the_allocator():
    measured = context_bytes(0)
    assert 128 << 20 < measured < 2 << 30
    assert context_bytes(0) == measured
    beside = process_bytes_on(torch.device("cuda", 0)) - torch.cuda.memory_reserved()
    assert abs(measured - beside) < 512 << 20
