"""Do unequal ranks end together once shares follow their speed? One command, no arguments needed:

    python benchmarks/shares/run.py

Ranks are processes with one thread each, over gloo. Some are made slow for every sample that they take.
Prints the table and writes it to `benchmarks/results/shares.md` and `shares.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.estimate import identify
from anybatch.events import Event, Rebalanced, StepDone
from anybatch.plans import Choice, Plan

HERE = Path(__file__).parent
STEPS, LAST, MICRO_BATCH = 60, 30, 8
HEADER = (
    "| | slowest / fastest rank, fixed | measured | step, fixed (ms) | measured (ms) | ratio |"
    " ideal | changes after steps | deviation |"
)


@dataclass(frozen=True)
class Setting:
    """Ranks and what a sample costs them.

    Attributes:
        waits: milliseconds that a sample takes on each rank, asleep, as where a device computes.
        repeats: how often each rank computes its layer, for ranks with a core each.
    """

    waits: tuple[float, ...] = ()
    repeats: tuple[int, ...] = ()
    global_batch: int = 192

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.waits or self.repeats)


SETTINGS = {
    "2 ranks, 1 : 2 (waiting)": Setting(waits=(1.0, 2.0)),
    "3 ranks, 1 : 2 : 4 (waiting)": Setting(waits=(0.5, 1.0, 2.0)),
    # Longer, since four ranks have to share the cores of a small machine for what they compute.
    "4 ranks, one at a third (waiting)": Setting(waits=(2.0, 2.0, 2.0, 6.0)),
    "2 ranks, 1 : 2 (computing)": Setting(repeats=(10, 20)),
}


class Slowed(nn.Module):
    """A perceptron in which each sample costs this rank what the setting says."""

    def __init__(self, wait_ms: float, repeats: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(256, 256)
        self.last = nn.Linear(256, 10)
        self._wait_ms, self._repeats = wait_ms, repeats
        self.register_buffer("product", torch.randn(256, 512), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self._wait_ms:
            time.sleep(self._wait_ms * len(x) / 1e3)
        with torch.no_grad():
            for _ in range(self._repeats * len(x)):
                self.product @ self.product.T
        return self.last(torch.relu(self.first(x)))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(rank: int, setting: Setting, balance: str, store: str, target: str) -> None:
    """One rank of a run; rank 0 writes what happened."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=setting.size
    )
    draw = torch.Generator().manual_seed(1)
    count = 8 * setting.global_batch

    def build() -> nn.Module:
        return Slowed(
            setting.waits[rank] if setting.waits else 0.0,
            setting.repeats[rank] if setting.repeats else 0,
        ).double()

    task = ab.Task(
        model=build,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train=TensorDataset(
            torch.randn(count, 256, generator=draw, dtype=torch.float64),
            torch.randint(10, (count,), generator=draw),
        ),
        global_batch=setting.global_batch,
        steps=STEPS,
    )
    plan = Plan(
        task=identify(task, build()),
        parallel="replicate",
        shares=(1.0,) * setting.size,
        balance=balance,
        device="cpu",
        choice=Choice(micro_batch=MICRO_BATCH, evaluation_batch=MICRO_BATCH),
    )
    events: list[Event] = []
    with ab.Session(task, plan, [events.append]) as session:
        for _ in session.steps():
            pass
    if rank == 0:
        done = [one for one in events if isinstance(one, StepDone)]
        result = {
            "step_seconds": [one.seconds for one in done],
            # Those that a step tells are of the step before, on every kind of device.
            "rank_seconds": [list(one.rank_seconds) for one in done],
            "shares": [list(one.after) for one in events if isinstance(one, Rebalanced)],
            "changed_after_steps": [one.step - 1 for one in events if isinstance(one, Rebalanced)],
        }
        Path(target).write_text(json.dumps(result))
        weights = nn.utils.parameters_to_vector(session.model.parameters()).detach()
        torch.save(weights, f"{target}.weights")
    dist.barrier()
    dist.destroy_process_group()


def run(setting: Setting, balance: str) -> dict[str, Any]:
    """What rank 0 saw, summed up over the last steps."""
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/result.json"
        multiprocessing.spawn(
            train, (setting, balance, f"{folder}/store", target), nprocs=setting.size
        )
        result = json.loads(Path(target).read_text())
        result["weights"] = torch.load(f"{target}.weights")
    ratios = [max(ranks) / min(ranks) for ranks in result["rank_seconds"][-LAST:]]
    result["slowest_to_fastest"] = statistics.median(ratios)
    result["ratio_quartiles"] = statistics.quantiles(ratios, n=4)[::2]
    result["seconds"] = statistics.median(result["step_seconds"][-LAST:])
    return result


def measure() -> dict[str, Any]:
    """All settings, with shares fixed and measured."""
    found: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        fixed, measured = run(setting, "fixed"), run(setting, "measured")
        one, other = fixed.pop("weights"), measured.pop("weights")
        cost = setting.waits or setting.repeats
        # All ranks at full speed for the whole step, against the slowest with an even share.
        ideal = len(cost) / sum(1 / each for each in cost) / max(cost)
        found[name] = {
            "fixed": fixed,
            "measured": measured,
            "ideal": ideal,
            "deviation": float((one - other).norm() / one.norm()),
        }
        print(f"{name}: {measured['slowest_to_fastest']:.3f}", flush=True)
    return found


def table(found: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f"Medians of the last {LAST} of {STEPS} steps; quartiles of the ratio in brackets.",
        "",
        HEADER,
        "|---|---:|---:|---:|---:|---:|---:|---|---:|",
    ]
    for name, one in found.items():
        fixed, measured = one["fixed"], one["measured"]
        low, high = measured["ratio_quartiles"]
        changes = ", ".join(map(str, measured["changed_after_steps"]))
        lines.append(
            f"| {name} | {fixed['slowest_to_fastest']:.2f} |"
            f" {measured['slowest_to_fastest']:.3f} ({low:.3f}–{high:.3f}) |"
            f" {1e3 * fixed['seconds']:.0f} | {1e3 * measured['seconds']:.0f} |"
            f" {measured['seconds'] / fixed['seconds']:.2f} | {one['ideal']:.2f} | {changes} |"
            f" {one['deviation']:.0e} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    options = parser.parse_args()
    found = measure()
    result = {
        "settings": found,
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": version("torch"),
        },
    }
    told = table(found)
    print(told)
    (options.out / "shares.md").write_text(told, encoding="utf-8")
    (options.out / "shares.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
