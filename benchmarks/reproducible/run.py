"""What does a reproducible run cost, and has it the same bits? One command, no arguments needed:

    python benchmarks/reproducible/run.py

Trains recipes on 1, 2 and 4 ranks, each as they are planned and as reproducible runs. Prints the table
and writes it to `benchmarks/results/reproducible.md` and `reproducible.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RANKS = (1, 2, 4)
SKIPPED = 3
"""Steps at the beginning that are not counted."""

TASKS = {
    "digits": ["digits", "--global-batch", "512", "-s", "epochs=10"],
    "text": ["text", "--global-batch", "32", "-s", "steps=12", "-s", "limit=64KiB"],
}
WAYS = {
    "as planned": [],
    "as planned, one thread": [],
    "reproducible": ["--reproducible"],
}


def run(arguments: list[str], ranks: int, one_thread: bool) -> dict[str, Any]:
    """Seconds of a step (median), the peak of the leanest account, and what was learned, as a hash."""
    environment = dict(os.environ) | ({"OMP_NUM_THREADS": "1"} if one_thread else {})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = ["train", *arguments, "--ranks", str(ranks), "--out", str(out)]
        subprocess.run(
            [sys.executable, "-m", "anybatch", *command, "--memory", "600MiB"],
            check=True,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        weights = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    steps = [event for event in events if event["kind"] == "step"]
    (ended,) = (event for event in events if event["kind"] == "run_ended")
    return {
        "step_seconds": statistics.median(step["seconds"] for step in steps[SKIPPED:]),
        "peak_bytes": ended["measured_peak_bytes"],
        "sha256": weights,
    }


def measure() -> dict[str, Any]:
    """All tasks in all ways on all numbers of ranks."""
    found: dict[str, Any] = {}
    for task, arguments in TASKS.items():
        for ranks in RANKS:
            for way, more in WAYS.items():
                one = run([*arguments, *more], ranks, "thread" in way)
                found.setdefault(task, {}).setdefault(way, {})[str(ranks)] = one
                print(f"{task}, {ranks} ranks, {way}: {one['step_seconds']:.3f} s", flush=True)
    return found


def table(found: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| task | way | step on "
        + " | ".join(f"{ranks} (ms)" for ranks in RANKS)
        + " | peak on "
        + " | ".join(f"{ranks} (MiB)" for ranks in RANKS)
        + " | different weights |",
        "|---|---|" + "---:|" * (2 * len(RANKS) + 1),
    ]
    for task, ways in found.items():
        for way, runs in ways.items():
            seconds = [f"{1e3 * runs[str(ranks)]['step_seconds']:.0f}" for ranks in RANKS]
            peaks = [f"{runs[str(ranks)]['peak_bytes'] / 2**20:.0f}" for ranks in RANKS]
            different = len({one["sha256"] for one in runs.values()})
            lines.append(
                f"| {task} | {way} | {' | '.join(seconds)} | {' | '.join(peaks)} | {different} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    options = parser.parse_args()
    found = measure()
    result = {
        "tasks": found,
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": version("torch"),
        },
    }
    told = table(found)
    print(told)
    (options.out / "reproducible.md").write_text(told, encoding="utf-8")
    text = json.dumps(result, indent=1) + "\n"
    (options.out / "reproducible.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
