"""A model too large for one rank, each rank under a real limit: `python -m ... SIZE BUDGET_MIB`.

Prints one line of JSON: the losses, or that memory ran out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from functools import partial

import torch
import torch.distributed as dist
from tests.equivalence.decoder import Decoder, next_word
from torch import multiprocessing

from anybatch.compute import Replica
from anybatch.engine.limit import CpuLimit
from anybatch.estimate.sharding import Division, parts_of
from anybatch.oom import as_memory_failure
from anybatch.parallel import SingleDevice
from anybatch.parallel.shard import Shard
from anybatch.plans import Choice

MIB = 1 << 20
CPU = torch.device("cpu")
STEPS, PASSES, WORDS = 3, 2, 1000
BUILD = partial(Decoder, 512, 6, WORDS, torch.float32)


def train(rank, size, budget):
    """Losses of a few steps, and the peak of memory."""
    group = Shard((1.0,) * size, CPU) if size > 1 else SingleDevice()
    limit = CpuLimit(budget)
    meter = limit.enter()
    limit.follow("returned")  # what is gathered comes and goes
    try:
        torch.manual_seed(0)
        model = group.build(BUILD) if isinstance(group, Shard) else BUILD()
        replica = Replica(
            model,
            lambda: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
            next_word,
            Choice(micro_batch=1, evaluation_batch=1),
            CPU,
            size * PASSES,
        )
        draw = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(STEPS):
            tokens = torch.randint(0, WORDS, (2 * PASSES, 9), generator=draw)
            mine = tokens if size == 1 else tokens[rank::size]
            group.begin()
            totals = torch.zeros(2, dtype=torch.float64)
            for batch in mine.split(1):
                with limit.watched("pass", batch):
                    loss = replica.accumulate((batch,), 1)
                totals += torch.tensor([float(loss.sum), float(loss.weight)])
            group.gather(failed=False)
            loss_sum, weight = group.agree(totals).totals
            replica.finish(weight, None)
            replica.apply()
            losses.append(loss_sum / weight)
        return losses, meter.peak_bytes()
    finally:
        limit.leave()
        group.close()


def as_rank(rank, size, folder, budget):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    losses, peak = train(rank, size, budget)
    parts = parts_of(BUILD())
    state = Division(parts, size, by_gloo=True).state(optimizer_bytes=2 * parts.whole)
    told = {
        "losses": losses,
        "peak": peak,
        "predicted": sum(state.values()),
    }
    if rank == 0:
        print(json.dumps(told), flush=True)
    dist.destroy_process_group()


def alone(budget):
    try:
        losses, peak = train(0, 1, budget)
        print(json.dumps({"losses": losses, "peak": peak}))
    except Exception as error:
        if as_memory_failure(error) is None:
            raise
        print(json.dumps({"memory ran out": str(error)}))


if __name__ == "__main__":
    size, budget = int(sys.argv[1]), int(sys.argv[2]) * MIB
    if size == 1:
        torch.set_num_threads(1)
        alone(budget)
    else:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(as_rank, (size, folder, budget), nprocs=size)
