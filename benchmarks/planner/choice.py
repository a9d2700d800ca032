"""Is the plan that is chosen the fastest that fits? One command, no arguments needed:

    python benchmarks/planner/choice.py

For each task and budget, every micro-batch in powers of two (and the chosen one) is tried under every
way to recompute, the loss whole and in chunks, for real, under the enforced budget. What ran out of
memory did not fit. What fits is run in several rounds, in a new random order each, so that what
disturbs the machine disturbs all; the median of a candidate's steps counts, beside that of the fastest.
The fastest of many in a few rounds is so by luck too: if it is not the plan, both run again, in turns,
and what they take then counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import anybatch as ab
from anybatch.estimate import subject_of
from anybatch.events import OutOfMemory, StepDone
from anybatch.plans import Choice, Plan, Recompute
from anybatch.recipes import resolve

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.models import tasks

RESULTS = Path(__file__).parents[1] / "results"
DUEL_ROUNDS = 12
PAIRS = (
    ("mlp", "9MiB"),
    ("mlp", "64MiB"),
    ("convolutional", "24MiB"),
    ("convolutional", "200MiB"),
    ("decoder", "40MiB"),
    ("decoder", "160MiB"),
    ("digits", "8MiB"),
    ("digits", "32MiB"),
)


@dataclass
class Tried:
    """One candidate: its measured steps, or that it did not fit."""

    choice: Choice
    seconds: list[float]
    fits: bool = True


class Steps:
    """A sink that keeps the times of steps and whether memory ran out."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.ran_out = False

    def __call__(self, event: object) -> None:
        if isinstance(event, StepDone):
            self.seconds.append(event.seconds)
        self.ran_out |= isinstance(event, OutOfMemory)


def task_of(name: str, steps: int) -> ab.Task:
    task = resolve("digits", {"global_batch": "256"}) if name == "digits" else tasks(1)[name]
    return replace(task, steps=steps, epochs=None, valid=None)


def candidates(task: ab.Task, chosen: Plan) -> Iterator[Choice]:
    """Everything that a person could try."""
    subject = subject_of(task)
    ways = [Recompute()]
    if subject.blocks:
        ways += [Recompute(blocks=subject.blocks, keep=keep) for keep in ("matmuls", "nothing")]
    if subject.chains:
        ways.append(Recompute(blocks=subject.chains, nested=True))
    unit = min(subject.identity.ghost_batch or 1, task.global_batch)
    sizes = [unit * 2**k for k in range(20) if unit * 2**k < task.global_batch]
    found = {chosen.choice: None}
    for way, head in product(ways, heads(task)):
        for size in (task.global_batch, *reversed(sizes)):
            # Fewer samples than fill a vector are never the fastest, and take long to try.
            if size >= min(4, task.global_batch):
                changes = {"micro_batch": size, "recompute": way, "chunked_head": head}
                found[chosen.choice.model_copy(update=changes)] = None
    return iter(found)


def heads(task: ab.Task) -> tuple[str, ...]:
    """The loss as it is written, and in chunks where it can be."""
    try:
        return "", ab.plan(task, chunked_loss=True).choice.chunked_head
    except ab.InputError:
        return ("",)


def run(task: ab.Task, plan: Plan) -> Steps:
    steps = Steps()
    try:
        ab.train(task, plan=plan, progress=False, sinks=[steps])
    except ab.NoPlanFits:
        steps.ran_out = True
    return steps


def measure(task: ab.Task, chosen: Plan, rounds: int) -> tuple[list[Tried], float]:
    """What each candidate takes, and how long it took to find out which ones fit."""
    tried = [Tried(choice, []) for choice in candidates(task, chosen)]
    begun = time.perf_counter()
    for one in tried:
        one.fits = not run(task, taking(chosen, one.choice)).ran_out
    seconds = time.perf_counter() - begun
    in_turns(task, chosen, [one for one in tried if one.fits], rounds)
    return tried, seconds


def in_turns(task: ab.Task, chosen: Plan, tried: Sequence[Tried], rounds: int) -> None:
    """Measure each of these candidates anew."""
    order = random.Random(0)
    for one in tried:
        one.seconds.clear()
    for _ in range(rounds):
        for one in order.sample(tried, len(tried)):
            one.seconds += run(task, taking(chosen, one.choice)).seconds[1:]


def taking(chosen: Plan, choice: Choice) -> Plan:
    """The plan of another choice. What is predicted is of the one that the planner made, and no run is
    to be judged by it."""
    return chosen.model_copy(update={"choice": choice, "ladder": (), "prediction": None})


def compare(name: str, memory: str, steps: int, rounds: int) -> dict[str, Any]:
    task = task_of(name, steps)
    ab.plan(task, memory=memory)  # libraries are loaded, the device is measured
    begun = time.perf_counter()
    chosen = ab.plan(task, memory=memory)
    planning = time.perf_counter() - begun
    tried, searching = measure(task, chosen, rounds)
    fitting = [one for one in tried if one.fits]
    own = tried[0]
    if not own.fits:
        return {"task": name, "memory": memory, "chosen": own.choice.describe(), "fits": False}
    best = min(fitting, key=lambda one: statistics.median(one.seconds))
    if best is not own:
        in_turns(task, chosen, [own, best], DUEL_ROUNDS)
    own_seconds, best_seconds = (statistics.median(one.seconds) for one in (own, best))
    told = chosen.prediction.step_seconds if chosen.prediction else math.nan
    return {
        "task": name,
        "memory": memory,
        "fits": True,
        "chosen": own.choice.describe(),
        "fastest": best.choice.describe(),
        "num_tried": len(tried),
        "num_fitting": len(fitting),
        "regret": own_seconds / best_seconds - 1,
        "spread": statistics.quantiles(own.seconds, n=4)[2] / own_seconds - 1,
        "predicted_seconds": told,
        "measured_seconds": own_seconds,
        "planning_seconds": planning,
        "searching_seconds": searching,
    }


def table(rows: list[dict[str, Any]]) -> str:
    titles = ["task, budget", "chosen", "fastest found", "slower by", "predicted step"]
    titles += ["measured step", "planning", "trying"]
    lines = [f"| {' | '.join(titles)} |", "|---|---|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        head = f"| {row['task']}, {row['memory']} | {row['chosen']} "
        if not row["fits"]:
            lines.append(f"{head}| **ran out of memory** | | | | | |")
            continue
        same = row["chosen"] == row["fastest"]
        lines.append(
            f"{head}| {'the same' if same else row['fastest']} | {row['regret']:.1%}"
            f" | {row['predicted_seconds'] * 1e3:.0f} ms | {row['measured_seconds'] * 1e3:.0f} ms"
            f" | {row['planning_seconds']:.1f} s"
            f" | {row['searching_seconds']:.0f} s for {row['num_tried']} |"
        )
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> str:
    """How many pairs are within 3% of the fastest."""
    near = sum(row["fits"] and row["regret"] <= 0.03 for row in rows)
    return f"Within 3% of the fastest: {near} of {len(rows)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pair", action="append", help="TASK:BUDGET; default: all")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pairs = [tuple(pair.split(":")) for pair in args.pair or ()] or PAIRS
    rows = []
    for name, memory in pairs:
        rows.append(compare(name, memory, args.steps, args.rounds))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {args.threads} threads, torch"
    head = f"## Planner\n\nMeasured on {machine} {torch.__version__}; load at the end {load:.1f}.\n"
    text = f"{head}\n{table(rows)}\n\n{summary(rows)}\n"
    print(text)
    if not args.pair:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "planner.md").write_text(text, encoding="utf-8")
        record = json.dumps({"load": load, "rows": rows}, indent=2)
        (RESULTS / "planner.json").write_text(record + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
