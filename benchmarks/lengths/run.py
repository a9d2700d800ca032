"""What do unequal lengths cost? One command, no arguments needed:

    python benchmarks/lengths/run.py

Prints the table and writes it to `benchmarks/results/lengths.md` and `lengths.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab

RESULTS = Path(__file__).parents[1] / "results"
SHORTEST, LONGEST, NUM_SAMPLES = 5, 2_000, 4_000
GLOBAL_BATCH, STEPS, MEMORY = 200, 5, "96MiB"
IGNORED = -100
OURS, OWN, ALL = (
    "by padded size",
    "fixed number, padded to its own longest",
    "fixed number, padded to the longest of all",
)


class Block(nn.Module):
    """One layer of a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attend(self.norms[0](x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """Bytes (B, T) to logits (B, T, 256). Causal, so padding after a text changes nothing in it."""

    def __init__(self, width: int = 96, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@cache
def paragraphs() -> list[Tensor]:
    """Of Python's library, in the order of the names of its files."""
    found: list[Tensor] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for text in re.split(rb"\n\s*\n", file.read_bytes()):
            if SHORTEST <= len(text) <= LONGEST:
                found.append(torch.tensor(list(text)))
    step = max(1, len(found) // NUM_SAMPLES)
    return found[::step][:NUM_SAMPLES]


def collate(samples: list[Tensor], length: int | None = None) -> tuple[Tensor, Tensor]:
    """Bytes, and the next ones, padded to the longest or to `length`."""
    length = length or max(map(len, samples))
    tokens = torch.zeros(len(samples), length, dtype=torch.int64)
    targets = torch.full((len(samples), length), IGNORED)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample)] = sample
        targets[row, : len(sample) - 1] = sample[1:]
    return tokens, targets


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ab.Loss:
    """Over the bytes that have a next one."""
    tokens, targets = batch
    total = F.cross_entropy(
        model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return ab.Loss(total, (targets != IGNORED).sum())


def task(way: str) -> ab.Task:
    """The task, for each way of cutting it."""
    data = paragraphs()
    longest = max(map(len, data))
    return ab.Task(
        model=Decoder,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=data,
        collate=(lambda samples: collate(samples, longest)) if way == ALL else collate,
        lengths=[len(sample) for sample in data] if way == OURS else None,
        global_batch=GLOBAL_BATCH,
        steps=STEPS,
        clip_norm=1.0,
        name="paragraphs",
    )


def train(way: str, plan: ab.Plan, weights: Path) -> list[float]:
    """Seconds of the steps."""
    if way != OURS:
        plan = plan.model_copy(update={"task": plan.task.model_copy(update={"longest": None})})
    with ab.Session(task(way), plan) as session:
        seconds = [done.seconds for done in session.steps()]
        torch.save(session.model.state_dict(), weights)
    return seconds


def deviation(one: Path, other: Path) -> float:
    """Largest of any parameter, relative."""
    first, second = (torch.load(path) for path in (one, other))
    return max(float((first[name] - second[name]).norm() / second[name].norm()) for name in second)


def measure(rounds: int, threads: int) -> dict[str, Any]:
    """The figures of all ways."""
    plan = ab.plan(task(OURS), memory=MEMORY)
    found: dict[str, list[float]] = {way: [] for way in (OURS, OWN, ALL)}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        plan.save(place / "plan.json")
        for number in range(rounds):
            for way in found if number % 2 == 0 else reversed(found):
                told = subprocess.run(
                    [sys.executable, __file__, "--part", way, folder],
                    capture_output=True,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                    check=False,
                )
                if told.returncode:
                    raise SystemExit(f"{way}: {told.stderr[-2000:]}")
                found[way] += json.loads(told.stdout.splitlines()[-1])[1:]
        deviations = {way: deviation(place / f"{way}.pt", place / f"{OURS}.pt") for way in found}
    lengths = sorted(map(len, paragraphs()))
    return {
        "lengths": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
        "num_samples": len(lengths),
        "plan": plan.model_dump(mode="json", include={"choice", "prediction", "budget_bytes"}),
        "ways": {
            way: {"seconds": statistics.median(taken), "deviation": deviations[way]}
            for way, taken in found.items()
        },
    }


def table(found: dict[str, Any], threads: int) -> str:
    """The results as Markdown."""
    low, middle, high = found["lengths"]
    choice = found["plan"]["choice"]
    title = (
        f"{found['num_samples']:,} paragraphs of {low} to {high:,} bytes, the median {middle}; a global"
        f" batch of {GLOBAL_BATCH}; {MEMORY}, enforced. The plan: {choice['micro_batch']} x {high:,},"
        f" {len(choice['recompute']['blocks'])} blocks recomputed."
    )
    lines = [
        title,
        "",
        "| micro-batches | seconds per step | samples per second | throughput | deviation |",
        "|---|---:|---:|---:|---:|",
    ]
    base = found["ways"][OWN]["seconds"]
    for way, cell in found["ways"].items():
        taken = cell["seconds"]
        lines.append(
            f"| {way} | {taken:.2f} | {GLOBAL_BATCH / taken:,.1f} | {base / taken:.2f} |"
            f" {cell['deviation']:.0e} |"
        )
    machine = platform.processor() or platform.machine()
    where = f"{machine}, {threads} threads, torch {torch.__version__}, {platform.platform()}."
    return "\n".join([*lines, "", where]) + "\n"


def main() -> None:
    """Run all, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        way, folder = given.part
        plan = ab.Plan.load(Path(folder) / "plan.json")
        print(json.dumps(train(way, plan, Path(folder) / f"{way}.pt")))
        return
    found = measure(given.rounds, given.threads)
    text = table(found, given.threads)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "lengths.md").write_text(text, encoding="utf-8")
    (RESULTS / "lengths.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
