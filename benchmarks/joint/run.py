"""What becomes of a contrastive loss when the batch is cut? One command, no arguments needed:

    python benchmarks/joint/run.py

Prints the table and writes it to `benchmarks/results/joint.md` and `joint.json`.
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
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab

RESULTS = Path(__file__).parents[1] / "results"
GLOBAL_BATCH, HELD_OUT, STEPS, MEMORY = 512, 360, 120, "32MiB"
COMPARED = 20  # steps whose losses are compared: later on rounding has grown
WHOLE, NAIVE, PARTS, OURS, HELD = (
    "whole, by hand",
    "accumulated, by hand",
    "in two parts, by hand",
    "JointLoss, no limit",
    f"JointLoss, {MEMORY} enforced",
)


class Halves(nn.Module):
    """Images [N, 1, 8, 8] to encodings of their upper and their lower halves, two [N, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = encoder(), encoder()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        above, below = images.chunk(2, dim=2)
        return F.normalize(self.upper(above), dim=1), F.normalize(self.lower(below), dim=1)


def encoder(width: int = 128) -> nn.Module:
    """[N, 1, 4, 8] to [N, 32]."""
    layers: list[nn.Module] = []
    for before in (1, width, width):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * 4 * 8, 32))


def encode(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """One row for each sample."""
    return model(batch[0])


def compare(model: Any, encoded: tuple[Tensor, Tensor]) -> ab.Loss:
    """Each half against all others."""
    above, below = encoded
    scores = model.scale.exp() * above @ below.T
    own = torch.arange(len(scores))
    both = F.cross_entropy(scores, own, reduction="sum")
    both = both + F.cross_entropy(scores.T, own, reduction="sum")
    return ab.Loss(both / 2, len(scores))


def images() -> Tensor:
    """The digits in an order of chance."""
    digits: Any = load_digits()
    every = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]


def task(seed: int) -> ab.Task:
    """The task, in the order in which the loops by hand read."""
    return ab.Task(
        model=Halves,
        loss=ab.JointLoss(encode, compare),
        optimizer=adam,
        train=TensorDataset(images()[HELD_OUT:]),
        global_batch=GLOBAL_BATCH,
        steps=STEPS,
        shuffle=False,
        seed=seed,
        name="halves",
    )


def adam(params: Any) -> torch.optim.Optimizer:
    """Of every way."""
    return torch.optim.AdamW(params, lr=2e-3)


# ------------------------------------------------------------------------------------------ the ways


def whole(model: nn.Module, batch: Tensor, micro_batch: int) -> float:
    """The gradient of the batch in one piece; returns the mean loss."""
    loss = compare(model, encode(model, [batch])).sum / len(batch)
    loss.backward()
    return loss.item()


def accumulated(model: nn.Module, batch: Tensor, micro_batch: int) -> float:
    """That of each micro-batch as if it were the batch, averaged."""
    total = 0.0
    for piece in batch.split(micro_batch):
        loss = compare(model, encode(model, [piece])).sum / len(batch)
        loss.backward()
        total += loss.item()
    return total


def in_two_parts(model: nn.Module, batch: Tensor, micro_batch: int) -> float:
    """Encoded, compared, and once more."""
    pieces = batch.split(micro_batch)
    with torch.no_grad():
        encoded = [encode(model, [piece]) for piece in pieces]
    rows = [torch.cat(one).requires_grad_() for one in zip(*encoded, strict=True)]
    loss = compare(model, (rows[0], rows[1])).sum / len(batch)
    loss.backward()  # and with it the temperature's
    gradients = [one.grad.split(micro_batch) for one in rows if one.grad is not None]
    for piece, *given in zip(pieces, *gradients, strict=True):
        torch.autograd.backward(encode(model, [piece]), given)
    return loss.item()


BY_HAND: dict[str, Callable[[nn.Module, Tensor, int], float]] = {
    WHOLE: whole,
    NAIVE: accumulated,
    PARTS: in_two_parts,
}


@dataclass
class Run:
    """What a way leaves behind: the model, seconds and loss of each step, bytes at the peak, and the
    plan, if it had one."""

    model: nn.Module
    seconds: list[float]
    losses: list[float]
    peak: int
    plan: ab.Plan | None = None


def by_hand(way: str, seed: int, micro_batch: int) -> Run:
    """A plain loop."""
    model = task(seed).build_model()
    optimizer, batches = adam(model.parameters()), images()[HELD_OUT:].split(GLOBAL_BATCH)
    seconds: list[float] = []
    losses: list[float] = []
    before = begin_peak()
    for step in range(STEPS):
        begun = time.perf_counter()
        optimizer.zero_grad()
        losses.append(BY_HAND[way](model, batches[step % len(batches)], micro_batch))
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    return Run(model, seconds, losses, status("VmHWM") - before)


def ours(way: str, seed: int, micro_batch: int) -> Run:
    """`ab.Session`."""
    made = task(seed)
    plan = ab.plan(made, memory=MEMORY) if way == HELD else ab.plan(made, micro_batch=micro_batch)
    with ab.Session(made, plan) as session:
        steps = list(session.steps())
        seconds, losses = [one.seconds for one in steps], [one.loss for one in steps]
        return Run(session.model, seconds, losses, session.peak_bytes, session.plan)


def begin_peak() -> int:
    """Bytes that are there now, from which on the kernel is to count."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> int:
    """A figure of this process, in bytes."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found.group(1))


def run(way: str, seed: int, micro_batch: int, out: Path) -> None:
    """One way in this process."""
    made = by_hand(way, seed, micro_batch) if way in BY_HAND else ours(way, seed, micro_batch)
    with torch.no_grad():
        held_out = images()[:HELD_OUT]
        above, below = encode(made.model.eval(), [held_out])
        loss = compare(made.model, (above, below))
        found = (above @ below.T).argmax(1) == torch.arange(HELD_OUT)
    plan = made.plan
    told = {
        "seconds": statistics.median(made.seconds[10:]),
        "peak": made.peak,
        "loss": float(loss.sum) / HELD_OUT,
        "found": float(found.float().mean()),
        "micro_batch": plan.choice.micro_batch if plan else micro_batch,
        "predicted": plan.prediction.peak_bytes if plan and plan.prediction else None,
        "losses": made.losses[:COMPARED],
    }
    out.write_text(json.dumps(told))


# ----------------------------------------------------------------------------------------- the table


def measured(way: str, seed: int, micro_batch: int, folder: Path) -> dict[str, Any]:
    """What `run` found in a process of its own."""
    out = folder / "found.json"
    command = [sys.executable, __file__, "--way", way, "--seed", str(seed), "--out", str(out)]
    subprocess.run([*command, "--micro-batch", str(micro_batch)], check=True)
    return json.loads(out.read_text())


def deviation(one: list[float], other: list[float]) -> float:
    """The largest of any step's loss, relative."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def main() -> None:
    """Run one way, or all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--micro-batch", type=int, default=GLOBAL_BATCH)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.way:
        run(given.way, given.seed, given.micro_batch, given.out)
        return
    ways = (WHOLE, NAIVE, PARTS, OURS, HELD)
    every: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            size = GLOBAL_BATCH
            for way in (HELD, *ways[:-1]):  # the micro-batch of its plan is that of the others
                found = measured(way, seed, size, Path(folder))
                size = found["micro_batch"]
                every[way].append(found)
    table = told(every)
    print(table)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "joint.md").write_text(table)
    rows = [{"way": way, **one} for way, found in every.items() for one in found]
    (RESULTS / "joint.json").write_text(json.dumps(rows, indent=1) + "\n")


def told(every: dict[str, list[dict[str, Any]]]) -> str:
    """The table."""
    size, seeds = every[HELD][0]["micro_batch"], len(every[HELD])
    lines = [
        f"Global batch {GLOBAL_BATCH}, micro-batch {size}, {STEPS} steps, medians of {seeds} seeds.",
        "",
        "| way | held-out loss | found first | seconds per step | peak MiB | deviation |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for way, found in every.items():
        middle = {
            name: statistics.median(one[name] for one in found)
            for name in ("loss", "found", "seconds", "peak")
        }
        apart = max(
            deviation(one["losses"], plain["losses"])
            for one, plain in zip(found, every[WHOLE], strict=True)
        )
        lines.append(
            f"| {way} | {middle['loss']:.3f} | {middle['found']:.1%} | {middle['seconds']:.3f} |"
            f" {middle['peak'] / 2**20:.1f} | {apart:.0e} |"
        )
    predicted = every[HELD][0]["predicted"] / 2**20
    lines += ["", f"Predicted peak under the limit: {predicted:.1f} MiB."]
    lines += ["", f"{platform.machine()}, {os.cpu_count()} threads, torch {torch.__version__}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
