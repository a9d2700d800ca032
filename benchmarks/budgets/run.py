"""Do runs keep to any budget, and do they use it? One command:

    python benchmarks/budgets/run.py [--large] [--pairs 100] [--seeds 3,7] [--dry]

Random tasks under random budgets (`pairs.py`), each in a fresh process:
three steps and, in half of them, an evaluation. Counts what ran out of memory, checks what the planner
refuses, and compares the measured peak with the budget. Prints the tables, writes them to
`benchmarks/results/budgets.md` and `.json` (`budgets-large.*` of `--large`), and ends with status 1 if
a run met an out-of-memory error or a refusal was not true.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
AMPLE = "8GiB"
FASTER = 1.01
"""A plan that is predicted to be faster by less than this counts as just as fast, as in the planner."""
ABOUT = 0.15
"""Fraction by which two measurements of the least budget of a task may differ."""


def run(seed: int, large: bool) -> dict[str, Any]:
    """One pair; called in a process of its own."""
    from pairs import draw

    import anybatch as ab
    from anybatch.errors import NoPlanFits

    pair = draw(seed, large)
    task = pair.task()
    try:
        ab.plan(task, memory="64KiB", precision=pair.precision)
        raise SystemExit(f"pair {seed} fits 64 KiB")
    except NoPlanFits as error:
        least = error.least_bytes or 0
    whole = ab.plan(
        task,
        memory=AMPLE,
        precision=pair.precision,
        micro_batch=task.global_batch,
        recompute="none",
    )
    assert whole.prediction is not None
    needed = whole.prediction.peak_bytes
    budget = pair.budget(least, needed)
    found = {"pair": pair.to_dict(), "least": least, "whole": needed, "budget": budget}
    if pair.below:
        return found | _refused(task, pair.precision, budget, least)
    return found | trained(task, pair.precision, budget)


def _refused(task: Any, precision: str, budget: int, least: int) -> dict[str, Any]:
    """A budget below the least: whether it is refused with the right status and about the same figure,
    and whether the figure is true: what is planned for it runs, and needs more than was refused. The
    least is measured, so two processes name figures that differ."""
    import anybatch as ab
    from anybatch.errors import NoPlanFits
    from anybatch.planner.ranks import reserve_of

    try:
        ab.plan(task, memory=budget, precision=precision)
    except NoPlanFits as error:
        named = error.least_bytes or 0
        told = error.exit_status == 3 and abs(named / least - 1) <= ABOUT
    else:
        named, told = None, False
    done = trained(task, precision, least)
    needed = done["measured"]
    true = told and not done["failures"] and needed > budget - reserve_of(budget, "cpu")
    return {**done, "budget": least, "refused": budget, "named": named, "refusal_is_true": true}


def trained(task: Any, precision: str, budget: int) -> dict[str, Any]:
    """`task` under a budget: what was predicted and measured, and each time that memory ran out."""
    import anybatch as ab
    from anybatch.events import Event, OutOfMemory, Replanned

    plan = ab.plan(task, memory=budget, precision=precision)
    assert plan.prediction is not None
    failures: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, OutOfMemory | Replanned):
            failures.append(str(event))

    ended = ab.train(task, plan=plan, progress=False, sinks=[note]).ended
    seconds, peak = plan.prediction.step_seconds, plan.prediction.peak_bytes
    faster = [
        candidate.peak_bytes
        for candidate in plan.rejected
        if candidate.step_seconds * FASTER < seconds and candidate.peak_bytes > peak
    ]
    return {
        "enforced": plan.enforced,
        "choice": plan.choice.describe(),
        "passes": -(-task.global_batch // plan.choice.micro_batch),
        "predicted": peak,
        "measured": ended.measured_peak_bytes,
        "predicted_totals": dict(ended.predicted_totals),
        "measured_totals": dict(ended.measured_totals),
        "steps": ended.steps,
        "failures": failures,
        "next": min(faster, default=None),
        "by_kind": plan.prediction.by_kind,
    }


def _in_process(seed: int, large: bool, cache: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--one", str(seed), *(["--large"] if large else [])],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": cache},
        timeout=900,
        check=False,
    )
    if done.returncode:
        return {"seed": seed, "error": f"status {done.returncode}: {done.stderr[-1500:]}"}
    return {"seed": seed, **json.loads(done.stdout.splitlines()[-1])}


def above(found: Iterable[dict[str, Any]]) -> list[str]:
    """Runs that took more than was predicted, though not more than the budget, in sentences. The
    kernel's counters are late by up to a quarter of a MiB, so that some do by chance."""
    return [
        f"pair {one['seed']} was measured {(one['measured'] - one['predicted']) >> 10} KiB above its"
        " prediction"
        for one in found
        if "error" not in one and one["measured"] > one["predicted"]
    ]


def wrong(found: Iterable[dict[str, Any]]) -> list[str]:
    """What must not be, in sentences."""
    sentences: list[str] = []
    for one in found:
        name = f"pair {one['seed']}"
        if "error" in one:
            sentences.append(f"{name} did not end: {one['error']}")
            continue
        if one["failures"]:
            sentences.append(f"{name} ran out of memory: {one['failures'][0]}")
        if not one.get("refusal_is_true", True):
            sentences.append(f"{name} was refused {one['refused']} bytes, and not truly")
    return sentences


def lines_of(found: Sequence[dict[str, Any]], seconds: float) -> list[str]:
    """The result as lines of Markdown."""
    ended = [one for one in found if "error" not in one]
    refused = [one for one in ended if "refused" in one]
    short = [one for one in ended if one["next"] is not None and "refused" not in one]
    used = sorted(one["measured"] / one["budget"] for one in short)
    errors = sorted(one["predicted"] / one["measured"] - 1 for one in ended)
    failed = sum(bool(one["failures"]) for one in ended)
    below = sum(error < 0 for error in errors)
    rows = [
        ("pairs", len(found)),
        ("runs that met an out-of-memory error", failed + len(found) - len(ended)),
        ("budgets refused, below the least", len(refused)),
        ("of these, refused truly", sum(one["refusal_is_true"] for one in refused)),
        ("runs measured above the prediction", below),
        ("predicted over measured", _spread(errors, "+.1%")),
        ("runs that more memory would have made faster", len(short)),
        ("measured over budget in these", _spread(used, ".0%")),
        ("of these, 85% and more", sum(part >= 0.85 for part in used)),
        (
            "of these, whose next faster plan is predicted to need no more than the budget",
            sum(one["next"] <= one["budget"] for one in short),
        ),
    ]
    machine = (
        f"In {seconds / 60:.0f} minutes on {platform.machine()}, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}, torch {version('torch')}. Of several figures: the least, the"
        " quartiles and the most."
    )
    lines = [
        "## Random tasks under random budgets",
        "",
        machine,
        "",
        "| | |",
        "|---|---:|",
        *(f"| {what} | {figure} |" for what, figure in rows),
        "",
        *_table(ended),
    ]
    if sentences := [*wrong(found), *above(found)]:
        lines += ["", "What went wrong:", "", *(f"- {one}" for one in sentences)]
    return lines


def _spread(values: Sequence[float], form: str) -> str:
    if len(values) < 2:
        return ", ".join(format(value, form) for value in values) or "-"
    quarters = statistics.quantiles(values, n=4, method="inclusive")
    return ", ".join(format(value, form) for value in (values[0], *quarters, values[-1]))


def _table(ended: Iterable[dict[str, Any]]) -> list[str]:
    def mebibytes(size: int | None) -> str:
        return "-" if size is None else f"{size / 2**20:.1f}"

    lines = [
        "| pair | family | budget MiB | predicted | measured | of the budget | passes | next plan |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in ended:
        sizes = (one["predicted"], one["measured"])
        cells = (
            one["seed"],
            f"{one['pair']['family']}, {one['pair']['precision']}",
            mebibytes(one["budget"]),
            *map(mebibytes, sizes),
            f"{one['measured'] / one['budget']:.0%}",
            one["passes"],
            mebibytes(one["next"]),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def main() -> None:
    """Run the pairs, print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="of hundreds of MiB, not of tens")
    parser.add_argument("--pairs", type=int, default=100, help="how many")
    parser.add_argument("--seeds", help="these pairs, separated by commas")
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(run(given.one, given.large)))
        return
    seeds = [int(s) for s in given.seeds.split(",")] if given.seeds else list(range(given.pairs))
    found: list[dict[str, Any]] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="budgets-") as cache:
        for seed in seeds:
            one = _in_process(seed, given.large, cache)
            found.append(one)
            print(_line(one), file=sys.stderr, flush=True)
    text = "\n".join(lines_of(found, time.monotonic() - begun)) + "\n"
    print(text)
    if not given.dry:
        RESULTS.mkdir(exist_ok=True)
        name = "budgets-large" if given.large else "budgets"
        (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
        (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(wrong(found)))


def _line(one: dict[str, Any]) -> str:
    if "error" in one:
        return f"{one['seed']}: {one['error']}"
    error = one["predicted"] / one["measured"] - 1
    return (
        f"{one['seed']}: {one['pair']['family']}, measured {one['measured'] / 2**20:.1f} MiB,"
        f" predicted {error:+.1%}, of the budget {one['measured'] / one['budget']:.0%},"
        f" {one['passes']} passes, out of memory {len(one['failures'])}"
    )


if __name__ == "__main__":
    main()
