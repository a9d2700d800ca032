"""Everything that needs a GPU, in one command: `make gpu-check`.

Runs the tests marked `gpu`, then predicts and measures the cells of `benchmarks/memory`, and the loss
over a large vocabulary with its logits and without, and writes what it found to
benchmarks/results/gpu.json and gpu.md. Ends within ten minutes on one GPU.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from benchmarks.memory.models import KINDS
from benchmarks.memory.run import VARIANTS, cells_of, measure, others

import anybatch as ab
from anybatch.compute.lm_loss import Backend

RESULTS = Path(__file__).parent / "results"
NUM_CELLS = len(cells_of(KINDS))
_SECONDS = 510.0
"""After which no further cell is begun, so that all ends within ten minutes."""


def measured(
    names: Iterable[str] = KINDS, device: str = "cuda", until: float = math.inf
) -> list[dict[str, Any]]:
    """The cells of `benchmarks/memory` on this device, with what others tell of them beside; those that
    are begun `until` this time of the monotonic clock."""
    found: list[dict[str, Any]] = []
    for name, variant in cells_of(names):
        if time.monotonic() > until:
            break
        gc.collect()
        cell = measure(name, variant)
        if variant in VARIANTS and variant != "recomputed":
            cell |= others(name, variant, device)
        found.append(cell)
    return found


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
    accounts = list(dict.fromkeys(name for cell in cells for name in cell["measured_totals"]))
    lines = [
        f"# {device}",
        "",
        f"torch {torch.__version__}; tests marked `gpu`: {tests}",
        "",
        "Most MiB by each account, predicted / measured. Errors of torch's MemTracker and of",
        "Accelerate's estimator are against what was measured in tensors.",
        "",
        f"| model | variant | {' | '.join(accounts)} | MemTracker | Accelerate | step ms |",
        f"|---|---|{'---:|' * (len(accounts) + 3)}",
    ]
    for cell in cells:
        told, found = cell["predicted_totals"], cell["measured_totals"]
        figures = [
            f"{told.get(name, 0) / 2**20:.1f} / {found.get(name, 0) / 2**20:.1f}"
            for name in accounts
        ]
        for key in ("mem_tracker_bytes", "accelerate_bytes"):
            other = cell.get(key)
            figures.append("-" if other is None else f"{other / found[accounts[0]] - 1:+.0%}")
        seconds = [(cell[f"{kind}_seconds"] or 0) * 1e3 for kind in ("predicted", "measured")]
        figures.append(f"{seconds[0]:.1f} / {seconds[1]:.1f}")
        lines.append(f"| {cell['model']} | {cell['variant']} | {' | '.join(figures)} |")
    lines += ["", *summary(cells, accounts)]
    if len(cells) < NUM_CELLS:
        lines += [
            "",
            f"{NUM_CELLS - len(cells)} of {NUM_CELLS} cells were left out for want of time.",
        ]
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


def summary(cells: list[dict[str, Any]], accounts: list[str]) -> list[str]:
    """How near each account is, and whether the total is enough."""
    sentences: list[str] = []
    for name in accounts:
        pairs = [(c["predicted_totals"].get(name, 0), c["measured_totals"][name]) for c in cells]
        errors = [told / found - 1 for told, found in pairs]
        below = sum(error < 0 for error in errors)
        sentences.append(
            f"- {name}: median error {statistics.median(map(abs, errors)):.2%}, largest"
            f" {max(errors, key=abs):+.2%}; below the measured one in {below} of {len(cells)} cells."
        )
    return sentences


def main() -> int:
    """Run all of it; the exit status is that of the tests."""
    if not torch.cuda.is_available():
        print("gpu-check needs a CUDA device, and torch sees none here.", file=sys.stderr)
        return 2
    begun = time.monotonic()
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    print(tests.stdout)
    closing = tests.stdout.strip().splitlines()[-1] if tests.stdout.strip() else "no output"
    cells = measured(until=begun + _SECONDS)
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
