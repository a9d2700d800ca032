"""How long does planning take, and how much memory? One command:

    python benchmarks/planning/run.py [--only NAME] [--root FOLDER]

Each model is planned in a process of its own, for a device that is described (the digits: for this
machine's CPU under a budget), so nothing is measured and nothing is remembered. CPU seconds count:
other processes change them less than seconds on the clock. `--root` plans with the sources of another
checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Case:
    """A model and a place: `memory` of this machine's CPU, or `count` devices of a kind that is
    described."""

    device: str | None = None
    count: int = 1
    memory: str | None = None
    precision: str = "fp32"


CASES = {
    "gpt2": Case(device="24GiB"),
    "llama-7b": Case(device="h200", precision="bf16"),
    "llama-7b-8": Case(device="h200", count=8, precision="bf16"),
    "llama-70b-64": Case(device="h200", count=64, precision="bf16"),
    "llama-405b-512": Case(device="h200", count=512, precision="bf16"),
    "resnet": Case(device="24GiB"),
    "digits": Case(memory="16MiB"),
}


def task_of(name: str) -> Any:
    """The task; called where it is planned."""
    if name == "digits":
        from anybatch.recipes import resolve

        return resolve("digits", {"global_batch": "512"})
    from models import gpt2, language_task, llama_task, resnet_task

    if name == "resnet":
        return resnet_task(1024)
    if name == "gpt2":
        return language_task(gpt2, 50257, 1024, 512)
    return llama_task(name.split("-")[1], 256 if "7b" in name else 1024)


def measure(name: str) -> dict[str, Any]:
    """Plan one model; called in a process of its own."""
    begun = time.perf_counter(), time.process_time()
    import torch

    import anybatch as ab
    from anybatch.estimate.calibration import nominal
    from anybatch.planner import setting

    case = CASES[name]
    # Measuring this machine is another matter.
    setting.speeds_of = nominal
    task = task_of(name)
    loaded = time.perf_counter(), time.process_time()
    machine = ab.Machine.describe(case.device, case.count) if case.device else None
    plan = ab.plan(task, machine, memory=case.memory, precision=case.precision)
    done = time.perf_counter(), time.process_time()
    return {
        "model": name,
        "parameters": plan.task.parameters,
        "where": f"{case.count} x {case.device}" if case.device else f"CPU, {case.memory}",
        "import_cpu_seconds": loaded[1] - begun[1],
        "plan_cpu_seconds": done[1] - loaded[1],
        "plan_seconds": done[0] - loaded[0],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "choice": plan.choice.describe(),
        "torch": torch.__version__,
    }


def _apart(name: str, root: Path) -> dict[str, Any]:
    paths = [str(root / "src"), str(root), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, __file__, "--cell", name],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=3600,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "| model | parameters | for | CPU s | s | import CPU s | peak MiB | plan |",
        "|---|---:|---|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {r['model']} | {r['parameters']:,} | {r['where']} | {r['plan_cpu_seconds']:.1f}"
        f" | {r['plan_seconds']:.1f} | {r['import_cpu_seconds']:.1f} | {r['peak_mib']:.0f}"
        f" | {r['choice']} |"
        for r in rows
    ]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    where = f"{platform.machine()}, {os.cpu_count()} cores, torch {rows[0]['torch']}"
    return "\n".join([*lines, "", f"{where}; load at the end {load:.1f}."]) + "\n"


def main() -> None:
    """Run all cases, print the table, and write benchmarks/results/planning.md and .json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cell:
        print(json.dumps(measure(given.cell)))
        return
    rows: list[dict[str, Any]] = []
    for name in [given.only] if given.only else CASES:
        rows.append(_apart(name, given.root))
        print(table(rows[-1:]).splitlines()[2], flush=True)
    text = table(rows)
    print(text)
    if not given.only:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "planning.md").write_text(text, encoding="utf-8")
        (RESULTS / "planning.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
