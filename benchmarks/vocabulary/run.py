"""What does the loss over a large vocabulary take, with its logits and without? One command:

    python benchmarks/vocabulary/run.py [--rounds N] [--threads N]

Memory: each backend in a process of its own, by the kernel's peak of resident memory over forward and
backward. Seconds: all backends in one process, in turn, so that whatever else the machine does falls on
all of them alike; the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anybatch as ab
from anybatch.errors import InputError

RESULTS = Path(__file__).parents[1] / "results"
WORDS, LENGTH, BATCH, WIDTH = 40_000, 250, 32, 256
BACKENDS = ("plain", "tokens", "vocabulary")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALL = ((64, 1_000), (256, 1_000), (1_024, 1_000), (512, 4_000), (2_048, 4_000), (1_024, 16_000))
"""Tokens and words, around where `auto` changes from plain to chunks."""


def problem(precision: str, tokens: int, words: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and targets."""
    torch.manual_seed(0)
    dtype = PRECISIONS[precision]
    hidden = torch.randn(tokens, WIDTH).mul_(0.5).to(dtype).requires_grad_()
    weight = torch.randn(words, WIDTH).mul_(0.05).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(words, (tokens,))


def step(given: tuple[Tensor, Tensor, Tensor], backend: Any) -> None:
    """Forward and backward."""
    hidden, weight, targets = given
    hidden.grad = weight.grad = None
    ab.lm_loss(hidden, weight, targets, backend=backend).sum.backward()


def peak_bytes(precision: str, backend: str) -> int:
    """In a process of its own: the most memory above what was there before."""
    given = problem(precision, LENGTH * BATCH, WORDS)
    step(tuple(problem(precision, 8, 64)), backend)  # what libraries take once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(given, backend)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def seconds(precision: str, tokens: int, words: int, rounds: int) -> dict[str, float]:
    """Median of the rounds, for each backend that can."""
    given, taken = problem(precision, tokens, words), {}
    for backend in BACKENDS:
        try:
            step(given, backend)
            taken[backend] = []
        except InputError as error:
            print(f"{backend}: {error}", file=sys.stderr)
    for _ in range(rounds):
        for backend, own in taken.items():
            start = time.perf_counter()
            step(given, backend)
            own.append(time.perf_counter() - start)
    return {backend: statistics.median(own) for backend, own in taken.items()}


def in_process(threads: int, *arguments: str) -> Any:
    """What a part of this command prints, run alone."""
    done = subprocess.run(
        [sys.executable, __file__, "--part", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        timeout=1800,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, Any], threads: int) -> str:
    """The results as Markdown."""
    logits = WORDS * LENGTH * BATCH * 4
    title = (
        f"{WORDS:,} words x {LENGTH} tokens x {BATCH} sequences, width {WIDTH}: logits of"
        f" {logits / 1e9:.2f} GB in float32. Forward and backward; MB above what was there before."
    )
    lines = [
        title,
        "",
        "| precision | backend | peak MB | less than plain | seconds | times plain |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for precision, cells in found["large"].items():
        plain = cells["plain"]
        for backend, (peak, taken) in cells.items():
            lines.append(
                f"| {precision} | {backend} | {peak / 1e6:,.0f} | {(plain[0] - peak) / 1e6:,.0f}"
                f" | {taken:.2f} | {taken / plain[1]:.2f} |"
            )
    lines += [
        "",
        "Small losses, milliseconds (times plain):",
        "",
        "| precision | tokens x words | plain | by tokens | by vocabulary |",
        "|---|---|---:|---:|---:|",
    ]
    for precision, tokens, words, taken in found["small"]:
        row = " | ".join(
            f"{taken[b] * 1e3:.2f} ({taken[b] / taken['plain']:.2f})" for b in BACKENDS[1:3]
        )
        lines.append(
            f"| {precision} | {tokens:,} x {words:,} | {taken['plain'] * 1e3:.2f} | {row} |"
        )
    machine = platform.processor() or platform.machine()
    where = f"{machine}, {threads} threads, torch {torch.__version__}, {platform.platform()}."
    return "\n".join([*lines, "", where]) + "\n"


def main() -> None:
    """Run all, print the table, and write it to benchmarks/results/vocabulary.md and .json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        what, precision, *rest = given.part
        if what == "peak":
            print(json.dumps(peak_bytes(precision, rest[0])))
        else:
            print(json.dumps(seconds(precision, *map(int, rest))))
        return
    found: dict[str, Any] = {"large": {}, "small": []}
    for precision in PRECISIONS:
        rounds = str(given.rounds)
        sizes = (str(LENGTH * BATCH), str(WORDS))
        taken = in_process(given.threads, "seconds", precision, *sizes, rounds)
        found["large"][precision] = {
            backend: (in_process(given.threads, "peak", precision, backend), own)
            for backend, own in taken.items()
        }
        for tokens, words in SMALL:
            sizes = (str(tokens), str(words))
            taken = in_process(given.threads, "seconds", precision, *sizes, str(given.rounds * 5))
            found["small"].append((precision, tokens, words, taken))
    text = table(found, given.threads)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "vocabulary.md").write_text(text, encoding="utf-8")
    (RESULTS / "vocabulary.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
