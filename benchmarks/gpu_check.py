"""Everything that needs a GPU, in one command: `make gpu-check`.

Runs the tests marked `gpu`, then predicts and measures a few tasks under several choices, and the loss
over a large vocabulary with its logits and without, and writes what it found to
benchmarks/results/gpu.json and gpu.md. Ends within ten minutes on one GPU.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.models import tasks

import anybatch as ab
from anybatch.compute.lm_loss import Backend

RESULTS = Path(__file__).parent / "results"
CELLS = (("fp32", None), ("bf16", None), ("fp16", None), ("bf16", "all"))


def measure(task: ab.Task, precision: str, recompute: str | None) -> dict[str, Any]:
    """Predicted and measured bytes and seconds of one task under one choice."""
    plan = ab.plan(task, precision=precision, recompute=recompute)
    result = ab.train(task, plan=plan, progress=False)
    ended = result.ended
    return {
        "task": task.name,
        "choice": result.plan.choice.describe(),
        "predicted_peak_bytes": ended.predicted_peak_bytes,
        "measured_peak_bytes": ended.measured_peak_bytes,
        "predicted_totals": dict(ended.predicted_totals),
        "measured_totals": dict(ended.measured_totals),
        "predicted_step_seconds": ended.predicted_step_seconds,
        "measured_step_seconds": ended.step_seconds,
    }


def vocabulary(rounds: int = 5) -> list[dict[str, Any]]:
    """Bytes and seconds of the loss of 8,192 tokens over 256,000 words of width 2,304 in bfloat16
    (Gemma 2's), forward and backward. To be had: at most 1.3 GB, 1.18 of which are the weight's
    gradient, at no more than the seconds of the plain loss."""
    generator = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "generator": generator, "dtype": torch.bfloat16}
    hidden = torch.randn(8_192, 2_304, **options).requires_grad_()
    weight = torch.randn(256_000, 2_304, **options).mul_(0.02).requires_grad_()
    targets = torch.randint(256_000, (8_192,), device="cuda", generator=generator)
    backends: tuple[Backend, ...] = ("plain", "auto")
    taken: dict[str, list[float]] = {backend: [] for backend in backends}
    extra: dict[str, int] = {}
    for _ in range(rounds + 1):
        for backend in backends:
            hidden.grad = weight.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, start = torch.cuda.memory_allocated(), time.perf_counter()
            ab.lm_loss(hidden, weight, targets, backend=backend).sum.backward()
            torch.cuda.synchronize()
            taken[backend].append(time.perf_counter() - start)
            extra[backend] = torch.cuda.max_memory_allocated() - before
    return [
        {
            "backend": backend,
            "extra_bytes": extra[backend],
            "seconds": statistics.median(taken[backend][1:]),
        }
        for backend in backends
    ]


def table(
    device: str, cells: list[dict[str, Any]], losses: list[dict[str, Any]], tests: str
) -> str:
    """The results as Markdown."""
    lines = [
        f"# {device}",
        "",
        f"torch {torch.__version__}; tests marked `gpu`: {tests}",
        "",
        "| task | choice | predicted MiB | measured MiB | predicted ms | measured ms |",
        "|---|---|---|---|---|---|",
    ]
    for cell in cells:
        figures = [
            (cell["predicted_peak_bytes"] or 0) / 2**20,
            cell["measured_peak_bytes"] / 2**20,
            (cell["predicted_step_seconds"] or 0) * 1e3,
            (cell["measured_step_seconds"] or 0) * 1e3,
        ]
        row = " | ".join(f"{figure:.1f}" for figure in figures)
        lines.append(f"| {cell['task']} | {cell['choice']} | {row} |")
    names = list(dict.fromkeys(name for cell in cells for name in cell["measured_totals"]))
    lines += [
        "",
        "Most MiB by each account, predicted / measured:",
        "",
        f"| task | choice | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for cell in cells:
        told, found = cell["predicted_totals"], cell["measured_totals"]
        pairs = [f"{told.get(n, 0) / 2**20:.1f} / {found.get(n, 0) / 2**20:.1f}" for n in names]
        lines.append(f"| {cell['task']} | {cell['choice']} | {' | '.join(pairs)} |")
    lines += [
        "",
        "Loss of 8,192 tokens over 256,000 words, width 2,304, bfloat16:",
        "",
        "| backend | extra GB | ms |",
        "|---|---|---|",
    ]
    for cell in losses:
        gigabytes, milliseconds = cell["extra_bytes"] / 1e9, cell["seconds"] * 1e3
        lines.append(f"| {cell['backend']} | {gigabytes:.2f} | {milliseconds:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all of it; the exit status is that of the tests."""
    if not torch.cuda.is_available():
        print("gpu-check needs a CUDA device, and torch sees none here.", file=sys.stderr)
        return 2
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    print(tests.stdout)
    closing = tests.stdout.strip().splitlines()[-1] if tests.stdout.strip() else "no output"
    cells = [
        measure(task, precision, recompute)
        for task in tasks(scale=8).values()
        for precision, recompute in CELLS
        if recompute is None or task.name == "decoder"
    ]
    device = torch.cuda.get_device_name(0)
    # The plain loss needs some 30 GB.
    roomy = torch.cuda.get_device_properties(0).total_memory > 40e9
    losses = vocabulary() if roomy else []
    text = table(device, cells, losses, closing)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gpu.md").write_text(text, encoding="utf-8")
    record = {
        "device": device,
        "torch": torch.__version__,
        "tests": closing,
        "cells": cells,
        "vocabulary": losses,
    }
    (RESULTS / "gpu.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
