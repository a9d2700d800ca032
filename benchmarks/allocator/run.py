"""How near are the predicted bytes to those of torch's own allocator, where no GPU is? One command:

    python benchmarks/allocator/run.py [--only NAME ...] [--jobs N] [--pairs 60]

torch's CUDA build runs here on a runtime that has memory and computes nothing: its operators, what they
take beside their results, its choice of kernels, its autocast and its caching allocator are the real
ones; only the kernels are none. Each cell of `benchmarks/memory` trains on it, in a process of its
own, and is predicted twice: as where such a device is present, and as on any other machine."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.memory.models import KINDS
from benchmarks.memory.run import BUDGET, cells_of, task_and_plan
from tests.standin.build import build

RESULTS = Path(__file__).parents[1] / "results"
ACCOUNTS = "allocated", "reserved"
WAYS = "there", "elsewhere"


def measure(name: str, variant: str) -> dict[str, Any]:
    """One cell; called in a process that has the libraries preloaded."""
    import anybatch as ab
    from anybatch.engine.totals import Totals
    from anybatch.estimate import footprint, subject_of
    from anybatch.machine import Machine

    read = Totals.tensor
    Totals.tensor = lambda self: _one(read(self))  # type: ignore[method-assign]
    task, plan = task_and_plan(name, variant)
    here = Machine.here(memory=BUDGET, device="cuda").device
    found = {
        way: footprint(subject_of(task), plan.choice, device).peak.totals
        for way, device in (("there", here), ("elsewhere", replace(here, present=False)))
    }
    ended = ab.train(task, plan=plan, progress=False).ended
    return {"model": name, "variant": variant, "measured": dict(ended.measured_totals), **found}


def under_budget(seed: int) -> dict[str, Any]:
    """One pair of a task and a budget, between the least and somewhat more than the whole batch
    needs."""
    from benchmarks.budgets.pairs import draw
    from benchmarks.budgets.run import trained

    import anybatch as ab
    from anybatch.engine.totals import Totals
    from anybatch.errors import NoPlanFits

    read = Totals.tensor
    Totals.tensor = lambda self: _one(read(self))  # type: ignore[method-assign]
    pair = draw(seed)
    task = pair.task()
    try:
        ab.plan(task, memory="1MiB", precision=pair.precision)
        raise SystemExit(f"pair {seed} fits 1 MiB")
    except NoPlanFits as error:
        least = error.least_bytes or 0
    whole = ab.plan(task, memory=BUDGET, precision=pair.precision, micro_batch=task.global_batch)
    assert whole.prediction is not None
    budget = least + int(pair.place * 1.1 * max(0, whole.prediction.peak_bytes - least))
    return {"pair": pair.to_dict(), "budget": budget, **trained(task, pair.precision, budget)}


def _one(totals: Any) -> Any:
    """Kernels yield zeros, and a step that weighs nothing is not made: a loss and a weight of 1."""
    import torch

    return torch.tensor(
        [1.0, 1.0, *[0.0] * (totals.numel() - 2)], dtype=totals.dtype, device=totals.device
    )


def table(cells: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    titles = ["model", "variant"]
    for account in ACCOUNTS:
        titles += [f"{account} MiB", "there", "elsewhere"]
    lines = [f"| {' | '.join(titles)} |", f"|---|---|{'---:|' * (len(titles) - 2)}"]
    for cell in cells:
        row = [cell["model"], cell["variant"]]
        for account in ACCOUNTS:
            row.append(f"{cell['measured'][account] / 2**20:.1f}")
            row += [f"{_error(cell, way, account):+.2%}" for way in WAYS]
        lines.append(f"| {' | '.join(row)} |")
    lines.append("")
    for account in ACCOUNTS:
        for way in WAYS:
            errors = [_error(cell, way, account) for cell in cells]
            lines.append(
                f"{account}, predicted {way}: median error {statistics.median(map(abs, errors)):.2%},"
                f" largest {max(errors, key=abs):+.2%}, lowest {min(errors):+.2%}; below the measured"
                f" one in {sum(error < 0 for error in errors)} of {len(errors)} cells.\n"
            )
    return "\n".join(lines)


def of_budgets(pairs: Sequence[dict[str, Any]]) -> str:
    """What became of the pairs, in sentences."""
    failed = [str(pair["pair"]["seed"]) for pair in pairs if pair["failures"]]
    totals = [(pair["measured_totals"], pair["predicted_totals"]) for pair in pairs]
    above = [
        (measured["reserved"] - predicted["reserved"]) / 2**20
        for measured, predicted in totals
        if measured["reserved"] > predicted["reserved"]
    ]
    errors = [predicted["allocated"] / measured["allocated"] - 1 for measured, predicted in totals]
    return (
        f"{len(pairs)} random tasks under random budgets: memory ran out in {len(failed)}"
        f" ({', '.join(failed) or 'none'}). Allocated: median error"
        f" {statistics.median(map(abs, errors)):.2%}, from {min(errors):+.2%} to {max(errors):+.2%}."
        f" Reserved more than predicted: {len(above)}, by {max(above, default=0):.0f} MiB at most.\n"
    )


def _error(cell: dict[str, Any], way: str, account: str) -> float:
    return cell[way][account] / cell["measured"][account] - 1


def main() -> None:
    """Run all cells, print the table, and write it to benchmarks/results/allocator.md and .json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models alone")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument("--pairs", type=int, default=60, help="random tasks under budgets")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--pair", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cell:
        print(json.dumps(measure(*given.cell)))
        return
    if given.pair is not None:
        print(json.dumps(under_budget(given.pair)))
        return
    import torch

    if torch.version.cuda is None or torch.cuda.is_available():
        print(
            "Nothing is measured: this needs torch's CUDA build, on a machine without a CUDA device."
        )
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        libraries = os.pathsep.join(map(str, build(Path(folder))))

        def cell_of(named: tuple[str, str]) -> dict[str, Any]:
            cell = _in_process(libraries, "--cell", *named)
            errors = (f"{a} {w} {_error(cell, w, a):+.2%}" for a in ACCOUNTS for w in WAYS)
            print(f"{', '.join(named)}: {', '.join(errors)}", flush=True)
            return cell

        def pair_of(seed: int) -> dict[str, Any]:
            pair = _in_process(libraries, "--pair", str(seed))
            print(f"pair {seed}: {pair['measured_totals']}, {pair['predicted_totals']}", flush=True)
            return pair

        cells = list(pool.map(cell_of, cells_of(given.only or KINDS)))
        pairs = [] if given.only else list(pool.map(pair_of, range(given.pairs)))
    text = table(cells)
    print(text)
    if pairs:
        text += "\n" + of_budgets(pairs)
        (RESULTS / "allocator.md").write_text(text, encoding="utf-8")
        found = json.dumps({"cells": cells, "pairs": pairs}, indent=2) + "\n"
        (RESULTS / "allocator.json").write_text(found, encoding="utf-8")


def _in_process(libraries: str, *what: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, *what],
            capture_output=True,
            text=True,
            env={**os.environ, "LD_PRELOAD": libraries, "XDG_CACHE_HOME": cache},
            timeout=300,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{', '.join(what)}: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
