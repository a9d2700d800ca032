"""What does `Step` change in a script? One command, no arguments needed:

    python benchmarks/ported/run.py

Prints the table and writes it to `benchmarks/results/ported.md` and `ported.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from tests.equivalence.ported import SCRIPTS, as_written, changed_lines, trained

RESULTS = Path(__file__).parents[1] / "results"
ROUNDS = 3


def deviation(name: str, cuttable: bool, **options: Any) -> float:
    """Of any parameter after ten steps, from those of the script's own loop."""
    script = SCRIPTS[name]
    difference = trained(script, cuttable, **options) - trained(script, cuttable)
    return float(difference.abs().max())


def first_seconds(name: str, by_step: bool) -> float:
    """Of the first batch, in this process."""
    script = SCRIPTS[name]
    work = script.make(cuttable=False)
    if "epochs" in vars(work):
        work.epochs = [work.epochs[0][:1]]
    else:
        work.batches = work.batches[:1]
    if "rates" in vars(work):
        work.rates = work.rates[:1]
    begun = time.perf_counter()
    if by_step:
        script.by_step(work, memory="1GiB")
    else:
        script.by_hand(work)
    return time.perf_counter() - begun


def in_a_process(name: str, by_step: bool) -> float:
    """`first_seconds` in a process of its own."""
    command = [sys.executable, __file__, "--first", name, *(["--by-step"] if by_step else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def measured(name: str) -> dict[str, Any]:
    """A row of the table."""
    script = SCRIPTS[name]
    gone, come = changed_lines(script)
    whole = deviation(name, cuttable=False, **as_written(script))
    torch.set_default_dtype(torch.float64)
    try:
        cut = deviation(name, cuttable=True, micro_batch=5)
    finally:
        torch.set_default_dtype(torch.float32)
    own, ours = ([in_a_process(name, way) for _ in range(ROUNDS)] for way in (False, True))
    return {
        "script": name,
        "lines_gone": gone,
        "lines_come": come,
        "whole": whole,
        "cut": cut,
        "own_seconds": statistics.median(own),
        "step_seconds": statistics.median(ours),
    }


def as_text(rows: list[dict[str, Any]]) -> str:
    """The table."""
    lines = [
        "## What `Step` changes in a script",
        "",
        f"torch {torch.__version__}, {torch.get_num_threads()} threads. GPT's own loop accumulates",
        "over micro-batches of 4, and so does `Step` in its first column.",
        "",
        "| script | lines | in one piece | cut in fives (float64) | first step | by `Step` |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['script']} | -{row['lines_gone']} +{row['lines_come']} | {row['whole']:.1e} |"
            f" {row['cut']:.1e} | {row['own_seconds']:.2f} s | {row['step_seconds']:.2f} s |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all, or one first step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", metavar="SCRIPT", help=argparse.SUPPRESS)
    parser.add_argument("--by-step", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.first:
        print(first_seconds(given.first, given.by_step))
        return
    rows = [measured(name) for name in SCRIPTS]
    (RESULTS / "ported.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    (RESULTS / "ported.md").write_text(as_text(rows), encoding="utf-8")
    print(as_text(rows))


if __name__ == "__main__":
    main()
