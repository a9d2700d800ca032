"""Does a run survive memory that is refused at any moment? One command, no arguments needed:

    python benchmarks/survival/memory.py

Trains small tasks in every way of being parallel while real limits on the memory of random ranks are
lowered at random moments (`tests/faults/campaign.py`), and compares each run with one that nothing
disturbed. Prints the tables and writes them to `benchmarks/results/survival-memory.md` and `.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.faults import campaign

RESULTS = Path(__file__).parents[1] / "results"


def rows(judged: list[campaign.Judged], seconds: float) -> list[str]:
    """The result as lines of Markdown."""
    done = f"{sum(j.num_lowered for j in judged)} limits lowered in {len(judged)} runs"
    columns = (
        *("way", "runs", "limits lowered", "met as a failure", "runs that ended otherwise"),
        *("largest deviation", "recovery, in steps: median (largest)", "in seconds: largest"),
    )
    lines = [
        "## Memory refused at random moments",
        "",
        f"{done}, in {seconds / 60:.0f} minutes. {_machine()}",
        "",
        f"| {' | '.join(columns)} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for way in dict.fromkeys(str(j.trial.way) for j in judged):
        lines.append(_row(way, [j for j in judged if str(j.trial.way) == way]))
    lines.append(_row("all", judged))
    phases = Counter(phase for j in judged for phase, n in j.by_phase for _ in range(n))
    lines += [
        "",
        "| phase | limits lowered |",
        "|---|---:|",
        *(f"| {phase} | {count} |" for phase, count in sorted(phases.items())),
    ]
    if failed := [j for j in judged if not _fine(j)]:
        lines += ["", "Runs that did not end as the undisturbed one:", ""]
        lines += [f"- {j.trial.number}, {j.trial.way}: {j.error or j.deviation}" for j in failed]
    return lines


def _fine(judged: campaign.Judged) -> bool:
    return not judged.error and judged.deviation <= campaign.TOLERANCE


def _row(name: str, judged: list[campaign.Judged]) -> str:
    steps = [one / j.step_seconds for j in judged for one in j.recoveries]
    longest = [one for j in judged for one in j.recoveries]
    ended = [j for j in judged if not j.error]
    cells = (
        name,
        len(judged),
        sum(j.num_lowered for j in judged),
        sum(j.num_met for j in judged),
        sum(not _fine(j) for j in judged),
        f"{max((j.deviation for j in ended), default=float('nan')):.1e}",
        f"{statistics.median(steps):.1f} ({max(steps):.1f})" if steps else "-",
        f"{max(longest):.2f}" if longest else "-",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _machine() -> str:
    return (
        f"Measured on {platform.machine()}, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}, torch {version('torch')}, anybatch {version('anybatch')}."
    )


def _plain(judged: campaign.Judged) -> dict[str, object]:
    return {
        "run": judged.trial.number,
        "way": str(judged.trial.way),
        "task": judged.trial.task,
        "error": judged.error,
        "deviation": judged.deviation,
        "lowered": judged.num_lowered,
        "by_phase": dict(judged.by_phase),
        "met": judged.num_met,
        "told": judged.num_told,
        "plan_changes": dict(Counter(judged.replanned)),
        "recovery_seconds": judged.recoveries,
        "step_seconds": judged.step_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--refusals", type=int, default=200, help="limits to lower, at least")
    parser.add_argument("--way", default="", help="only ways whose name holds this")
    parser.add_argument("--dry", action="store_true", help="write no results")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    ways = [way for way in campaign.WAYS if options.way in str(way)]
    begun, judged, lowered = time.perf_counter(), [], 0
    with campaign.crew_of_one_heap() as crew:
        # Not every refusal that is planned comes to pass: a step may have fewer passes.
        for trial in campaign.draw(options.seed, 4 * options.refusals, ways):
            if lowered >= options.refusals and trial.number % len(ways) == 0:
                break
            found = campaign.judge(crew, trial)
            judged.append(found)
            lowered += found.num_lowered
            end = "as undisturbed" if _fine(found) else found.error or f"off by {found.deviation}"
            print(f"{trial.number:3} {trial.way}: {found.num_lowered} lowered, {end}", flush=True)
    lines = rows(judged, time.perf_counter() - begun)
    print("\n".join(lines))
    if not options.dry:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "survival-memory.md").write_text("\n".join(lines) + "\n")
        data = [_plain(one) for one in judged]
        (RESULTS / "survival-memory.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
