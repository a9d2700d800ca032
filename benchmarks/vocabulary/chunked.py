"""What the loss in chunks gives a task that knows nothing of it. One command:

    python benchmarks/vocabulary/chunked.py

A decoder over 8,000 words whose loss is a plain `F.cross_entropy` of all logits, a global batch of 64
sequences of 128 tokens with AdamW, under a budget that is held; the best plan with the loss as it is
written, and in chunks. Each in a process of its own, with the machine's calibration and nothing that
earlier runs have taught. Writes `benchmarks/results/chunked.md` and `.json`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.memory import models

import anybatch as ab
from anybatch.events import OutOfMemory, StepDone

RESULTS = Path(__file__).parents[1] / "results"
BUDGETS = ("200MiB",)
PRECISIONS = ("fp32", "bf16")
STEPS = 6


def task() -> ab.Task:
    torch.manual_seed(0)
    return ab.Task(
        model=partial(models.LanguageModel, 8000, 256, 4, 128, tied=True),
        loss=models.token_loss,
        optimizer=models.adamw,
        train=TensorDataset(*models.tokens(8000, 129, 512)),
        global_batch=64,
        steps=STEPS,
        name="decoder",
    )


def measure(memory: str, precision: str, chunked: bool) -> dict[str, Any]:
    """One cell; called in a process of its own."""
    plan = ab.plan(task(), memory=memory, precision=precision, chunked_loss=chunked)
    events: list[Any] = []
    ended = ab.train(task(), plan=plan, progress=False, sinks=[events.append]).ended
    seconds = [event.seconds for event in events if isinstance(event, StepDone)]
    return {
        "budget": memory,
        "precision": precision,
        "chunked": chunked,
        "choice": plan.choice.describe(),
        "micro_batch": plan.choice.micro_batch,
        "predicted_bytes": ended.predicted_peak_bytes,
        "measured_bytes": ended.measured_peak_bytes,
        "predicted_seconds": plan.prediction and plan.prediction.step_seconds,
        "measured_seconds": statistics.median(seconds[1:]),
        "out_of_memory": sum(isinstance(event, OutOfMemory) for event in events),
    }


def table(cells: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "| budget | precision | loss | samples | predicted MiB | measured | predicted s | measured |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for cell in cells:
        lines.append(
            f"| {cell['budget']} | {cell['precision']} | {'in chunks' if cell['chunked'] else 'whole'}"
            f" | {cell['micro_batch']} | {cell['predicted_bytes'] / 2**20:.1f}"
            f" | {cell['measured_bytes'] / 2**20:.1f} | {cell['predicted_seconds']:.2f}"
            f" | {cell['measured_seconds']:.2f} |"
        )
    failed = sum(cell["out_of_memory"] for cell in cells)
    machine = platform.processor() or platform.machine()
    threads, version = torch.get_num_threads(), torch.__version__
    last = f"Out of memory: {failed} times. {machine}, {threads} threads, torch {version}."
    lines += ["", last]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run every cell, or the one that the arguments name."""
    if len(sys.argv) > 1:
        memory, precision, chunked = sys.argv[1:]
        print(json.dumps(measure(memory, precision, chunked == "True")))
        return
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for memory, precision, chunked in product(BUDGETS, PRECISIONS, (False, True)):
            folder = Path(cache) / f"{memory}-{precision}-{chunked}"
            done = subprocess.run(
                [sys.executable, __file__, memory, precision, str(chunked)],
                capture_output=True,
                text=True,
                env={**os.environ, "XDG_CACHE_HOME": str(folder)},
                check=False,
            )
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            cells.append(json.loads(done.stdout.splitlines()[-1]))
            print(cells[-1]["choice"], flush=True)
    text = table(cells)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "chunked.md").write_text(text, encoding="utf-8")
    (RESULTS / "chunked.json").write_text(json.dumps(cells, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
