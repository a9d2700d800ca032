"""One rank of the benchmark; `run.py` starts two of them, each on a machine of its own.

    python rank.py INTERFACE RESULT.json [ROUNDS]

Both ranks do the same in the same order: bytes over accumulation, then tuning, then interleaved rounds.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from contenders import BUCKETS_MIB, EXACT, RELAXED, Work, by_hand
from torch import nn

MICRO_BATCHES = {"communication dominates": 8, "computing takes about as long": 160}
ACCUMULATIONS = (1, 2, 4, 8)
MOST_STEPS = 8  # a round of local steps is 8 long

Contender = Callable[[Work, ExitStack], tuple[nn.Module, Callable[[], None]]]


class Bench:
    """Contenders side by side on one network."""

    def __init__(self, interface: str, rounds: int) -> None:
        self._sent = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
        self._rounds = rounds
        self._random = random.Random(0)  # the same order on both ranks

    def sent(self) -> int:
        """Bytes that this machine has put on the cable."""
        return int(self._sent.read_text())

    def measure(
        self, work: Work, contenders: dict[str, Contender], rounds: int, steps: int
    ) -> dict[str, dict[str, object]]:
        """Seconds and bytes per step of each, in rounds of `steps` steps of everyone in random order,
        and how far their parameters are from those of the first."""
        with ExitStack() as stack:
            ready = {name: make(work, stack) for name, make in contenders.items()}
            seconds: dict[str, list[float]] = {name: [] for name in ready}
            sent: dict[str, list[float]] = {name: [] for name in ready}
            for number in range(-1, rounds):  # one round is to warm up
                for name in self._random.sample(sorted(ready), len(ready)):
                    dist.barrier()
                    before, begun = self.sent(), time.perf_counter()
                    for _ in range(steps):
                        ready[name][1]()
                    took = time.perf_counter() - begun
                    dist.barrier()
                    if number >= 0:
                        seconds[name].append(took / steps)
                        sent[name].append((self.sent() - before) / steps)
            vectors = {
                name: torch.nn.utils.parameters_to_vector(model.parameters()).detach()
                for name, (model, _) in ready.items()
            }
        first = next(iter(vectors.values()))
        return {
            name: {
                "seconds": statistics.median(seconds[name]),
                "quartiles": statistics.quantiles(seconds[name], n=4)[::2],
                "all_seconds": seconds[name],
                "bytes": statistics.median(sent[name]),
                "deviation": float((vectors[name] - first).norm() / first.norm()),
            }
            for name in ready
        }

    def best_bucket(self, work: Work) -> tuple[int, dict[str, float]]:
        """The bucket size, in MiB, that makes the loop by hand fastest."""
        contenders = {f"{mib}": partial(by_hand, bucket=mib) for mib in BUCKETS_MIB}
        found = self.measure(work, contenders, max(3, self._rounds // 3), 3)
        times = {name: float(str(one["seconds"])) for name, one in found.items()}
        # Rank 0 decides, since both must take the same.
        best = [min(times, key=lambda name: times[name])]
        dist.broadcast_object_list(best, src=0)
        return int(best[0]), times

    def run(self) -> dict[str, object]:
        """All of it."""
        result: dict[str, object] = {"bytes": {}, "tuning": {}, "exact": {}, "relaxed": {}}
        for accumulation in ACCUMULATIONS:
            work = Work(8, accumulation)
            contenders = {n: EXACT[n] for n in ("anybatch, replicate", "DDP by hand, naive")}
            result["bytes"][accumulation] = self.measure(work, contenders, 3, 2)
        for setting, micro_batch in MICRO_BATCHES.items():
            for accumulation in (1, 4):
                work, key = (
                    Work(micro_batch, accumulation),
                    f"{setting}, accumulation {accumulation}",
                )
                bucket, times = self.best_bucket(work)
                result["tuning"][key] = {"bucket_mib": bucket, "seconds": times}
                tuned = {"DDP by hand, tuned": partial(by_hand, bucket=bucket)}
                steps = 3 if micro_batch < 100 else 2
                found = self.measure(work, tuned | EXACT, self._rounds, steps)
                result["exact"][key] = found
                if dist.get_rank() == 0:
                    told = {n: round(float(str(f["seconds"])), 4) for n, f in found.items()}
                    print(f"{key}: bucket {bucket} MiB, {told}", flush=True)
        for setting, micro_batch in MICRO_BATCHES.items():
            work = Work(micro_batch, 1)
            rounds = max(3, self._rounds // 2)
            result["relaxed"][setting] = self.measure(work, RELAXED, rounds, MOST_STEPS)
        return result


def main() -> None:
    interface, target = sys.argv[1:3]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 15
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = Bench(interface, rounds).run()
    if dist.get_rank() == 0:
        Path(target).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
