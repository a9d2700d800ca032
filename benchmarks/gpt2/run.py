"""GPT-2 124 M through the recipe and by hand. One command, no arguments needed:

    python benchmarks/gpt2/run.py

Prints the table and writes it to `benchmarks/results/gpt2.md` and `gpt2.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import random
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import anybatch as ab
from anybatch.data import Steps, permutation
from anybatch.estimate import identify
from anybatch.plans import Choice
from anybatch.recipes.text import decay_groups, loss, text
from anybatch.recipes.text_model import Decoder, Shape

RESULTS = Path(__file__).parents[1] / "results"
CONTEXT, GLOBAL_BATCH, MICRO_BATCH = 128, 8, 4
GPT2 = Shape(50_257, CONTEXT, 768, 12, 12)


def task(steps: int) -> ab.Task:
    """That of the recipe, with GPT-2's vocabulary."""
    made = text(
        limit="200kB",
        context=CONTEXT,
        width=GPT2.width,
        depth=GPT2.depth,
        heads=GPT2.heads,
        global_batch=GLOBAL_BATCH,
        steps=steps,
    )
    return dataclasses.replace(made, model=partial(Decoder, GPT2), valid=None, metrics=None)


def by_hand(given: ab.Task, steps: int) -> Iterator[float]:
    """The loss of each step."""
    model = given.build_model().train()
    optimizer = given.optimizer(decay_groups(model, 0.1), fused=True)
    base = [group["lr"] for group in optimizer.param_groups]
    windows = given.train
    layout = Steps(len(windows), GLOBAL_BATCH, steps=steps)
    order = permutation(given.seed, 0, len(windows))
    seen = 0
    for number in range(steps):
        total, count = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        indices = order[number * GLOBAL_BATCH : (number + 1) * GLOBAL_BATCH]
        for part in indices.split(MICRO_BATCH):
            samples = [windows[i] for i in part.tolist()]
            tokens, sizes = (torch.stack(column) for column in zip(*samples, strict=True))
            found = loss(model, (tokens, sizes))
            found.sum.backward()
            total += found.sum.detach()
            count += found.weight
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= count
        torch.nn.utils.clip_grad_norm_(model.parameters(), given.clip_norm)
        progress = ab.Progress(number, seen, 0, steps, layout.total_samples)
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * given.schedule(progress)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += len(indices)
        yield float(total / count)


def through_anybatch(given: ab.Task) -> Iterator[float]:
    """The same, by a session."""
    plan = ab.Plan(
        task=identify(given, given.build_model()),
        device="cpu",
        choice=Choice(micro_batch=MICRO_BATCH, evaluation_batch=MICRO_BATCH, update="fused"),
    )
    with ab.Session(given, plan) as session:
        for done in session.steps():
            yield done.loss


def measure(rounds: int) -> dict[str, Any]:
    """Seconds of each step of both, and how far their losses are apart."""
    steps = rounds + 1
    given = task(steps)
    ways = {"anybatch": through_anybatch(given), "by hand": by_hand(given, steps)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, list[float]] = {way: [] for way in ways}
    draw = random.Random(0)
    for _ in range(steps):
        for way in draw.sample(sorted(ways), len(ways)):
            begun = time.perf_counter()
            losses[way].append(next(ways[way]))
            seconds[way].append(time.perf_counter() - begun)
    apart = max(abs(a - b) / b for a, b in zip(losses["anybatch"], losses["by hand"], strict=True))
    return {
        "parameters": sum(p.numel() for p in given.build_model().parameters()),
        "seconds": {way: taken[1:] for way, taken in seconds.items()},
        "deviation": apart,
    }


def table(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    ours, theirs = found["seconds"]["anybatch"], found["seconds"]["by hand"]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    title = (
        f"{found['parameters']:,} parameters, {GLOBAL_BATCH} windows of {CONTEXT} tokens per step in"
        f" micro-batches of {MICRO_BATCH}; {len(ours)} rounds."
    )
    lines = [
        title,
        "",
        "| | seconds per step, median |",
        "|---|---:|",
        f"| anybatch | {statistics.median(ours):.2f} |",
        f"| by hand | {statistics.median(theirs):.2f} |",
        f"| ratio by round, median (quartiles) | **{middle:.3f}** ({low:.3f} to {high:.3f}) |",
        "",
        f"Largest relative distance of their losses: {found['deviation']:.0e}.",
    ]
    machine = platform.processor() or platform.machine()
    where = (
        f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__},"
        f" {platform.platform()}."
    )
    return "\n".join([*lines, "", where]) + "\n"


def main() -> None:
    """Run all, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    found = measure(given.rounds)
    written = table(found)
    print(written)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gpt2.md").write_text(written, encoding="utf-8")
    (RESULTS / "gpt2.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
