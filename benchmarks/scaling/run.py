"""What does a second machine bring, and what keeps it from bringing more? One command, as root on
Linux, with `ip` and `tc` (Debian: iproute2):

    python benchmarks/scaling/run.py

Trains a task on one machine and on two, which are network namespaces joined by a cable of several
speeds, with one rank of one thread each. Prints the table and writes it to
`benchmarks/results/scaling.md` and `scaling.json`.

    python benchmarks/scaling/run.py --link

asks instead how near the exchange is predicted, with what ranks measure when they join and without:
`scaling-link.md` and `scaling-link.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests.multiprocess.netns import slow_down, two_machines, why_not  # noqa: E402

from anybatch.estimate.seconds import tabulated_link  # noqa: E402
from anybatch.events import RunEnded  # noqa: E402
from anybatch.insight.scaling import what_limits  # noqa: E402
from anybatch.machine import Machine  # noqa: E402
from anybatch.plans import Plan  # noqa: E402
from anybatch.report import read  # noqa: E402

BATCHES = (64, 256, 1024)
RATES_MBIT = (None, 1000, 200)
MICRO_BATCH = 32
DEADLINE_SECONDS = 600.0

LINK_BATCH, LINK_STEPS = 256, 12
LINKS = (
    ("2 ranks, one machine", 2, None),
    ("3 ranks, one machine", 3, None),
    ("2 machines, as it is", 2, None),
    ("2 machines, 1000 Mbit/s", 2, 1000),
    ("2 machines, 200 Mbit/s", 2, 200),
    ("2 machines, 50 Mbit/s", 2, 50),
)


def command(global_batch: int, out: Path, *more: str) -> list[str]:
    """A line that trains, with as large a micro-batch on one rank as on two."""
    return [
        *(sys.executable, "-m", "anybatch", "train", str(HERE / "task.py")),
        *("--global-batch", str(global_batch), "--micro-batch", str(MICRO_BATCH)),
        *("--out", str(out), *more),
    ]


def wait_for(commands: list[list[str]]) -> None:
    """Run them at the same time; ends the program if one fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(one, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for one in commands
    ]
    try:
        told = [process.communicate(timeout=DEADLINE_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, errors in zip(processes, told, strict=True):
        if process.returncode:
            sys.exit(f"a rank failed with {process.returncode}: {errors.decode()[-2000:]}")


def ended(out: Path) -> RunEnded:
    """How the run in `out` ended."""
    last = read(out / "events.jsonl")[-1]
    assert isinstance(last, RunEnded)
    return last


def on_one(global_batch: int, folder: Path) -> RunEnded:
    """The task on one rank."""
    out = folder / f"one-{global_batch}"
    wait_for([command(global_batch, out)])
    return ended(out)


def on_two(global_batch: int, rate_mbit: int | None, folder: Path, *more: str) -> Path:
    """The task on two machines, each with a run folder of its own; that of rank 0."""
    with two_machines() as machines:
        for machine in machines:
            if rate_mbit is not None:
                slow_down(machine, rate_mbit)
        place = f"{machines[0].address}:29500"
        outs = [folder / f"two-{global_batch}-{rate_mbit}-{i}" for i in range(2)]
        joined = ("--ranks", "1", "--nodes", "2", "--rendezvous", place)
        os.environ["ANYBATCH_RENDEZVOUS_SECRET"] = secrets.token_hex()
        wait_for(
            [
                machine.command(*command(global_batch, out, *joined, *more))
                for machine, out in zip(machines, outs, strict=True)
            ]
        )
        return next(out for out in outs if (out / "events.jsonl").is_file())


def measure(rounds: int) -> list[dict[str, Any]]:
    """Every batch on every link, beside one rank; of several rounds the one with the shortest step."""
    found = []
    for global_batch in BATCHES:
        with tempfile.TemporaryDirectory() as name:
            ones, twos = [], {rate: [] for rate in RATES_MBIT}
            for number in range(rounds):
                folder = Path(name) / str(number)
                folder.mkdir()
                ones.append(on_one(global_batch, folder))
                for rate in RATES_MBIT:
                    twos[rate].append(ended(on_two(global_batch, rate, folder)))
            one = min(ones, key=_seconds)
            for rate, several in twos.items():
                two = min(several, key=_seconds)
                found.append(
                    {
                        "global_batch": global_batch,
                        "rate_mbit": rate,
                        "one_seconds": _seconds(one),
                        "two_seconds": _seconds(two),
                        "predicted_two_seconds": two.predicted_step_seconds,
                        "parts": dict(two.step_parts),
                        "predicted_parts": dict(two.predicted_step_parts),
                        "limited_by": what_limits(two.step_parts),
                    }
                )
                print(json.dumps(found[-1]), flush=True)
    return found


def measure_links(rounds: int) -> list[dict[str, Any]]:
    """The exchange over every link as predicted by what the ranks measured, and by the tables, beside
    that of the run; medians of the rounds, in which the links take turns."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name, _, _ in LINKS}
    more = ("--parallel", "replicate", "-s", f"steps={LINK_STEPS}")
    tabulated = tabulated_link(Machine.here(device="cpu").device)
    for _ in range(rounds):
        for name, num_ranks, rate in LINKS:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run"
                if name.startswith("2 machines"):
                    out = on_two(LINK_BATCH, rate, Path(folder), *more)
                else:
                    wait_for([command(LINK_BATCH, out, "--ranks", str(num_ranks), *more)])
                plan, run = Plan.load(out / "plan.json"), ended(out)
            assert plan.link is not None
            assert plan.link.measured
            crossing = 4 * plan.task.parameters
            seen[name].append(
                {
                    "bytes_per_second": plan.link.bytes_per_second,
                    "collective_seconds": plan.link.seconds(0, num_ranks),
                    "tabulated_exchange": sum(
                        tabulated.seconds(n, num_ranks) for n in (0, crossing)
                    ),
                    "predicted_exchange": run.predicted_step_parts["exchange"],
                    "measured_exchange": run.step_parts["exchange"],
                    "measured_step": _seconds(run),
                    "predicted_step": run.predicted_step_seconds or 0.0,
                }
            )
            print(json.dumps({"link": name, **seen[name][-1]}), flush=True)
    return [
        {
            "link": name,
            **{key: statistics.median(r[key] for r in runs) for key in runs[0]},
            "runs": runs,
        }
        for name, runs in seen.items()
    ]


def link_table(found: list[dict[str, Any]]) -> str:
    """The same as Markdown."""
    names = (
        *("link", "measured at the start", "exchange of the run (ms)", "by the tables"),
        *("by what was measured", "step of the run (ms)", "predicted"),
    )
    lines = [
        f"| {' | '.join(names)} |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        exchange = row["measured_exchange"]
        lines.append(
            f"| {row['link']} | {row['bytes_per_second'] / 1e6:.3g} MB/s,"
            f" {1e3 * row['collective_seconds']:.2g} ms a collective | {1e3 * exchange:.1f}"
            f" | {_beside(row['tabulated_exchange'], exchange)}"
            f" | {_beside(row['predicted_exchange'], exchange)}"
            f" | {1e3 * row['measured_step']:.1f} | {1e3 * row['predicted_step']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def _beside(predicted: float, measured: float) -> str:
    return f"{1e3 * predicted:.1f} ({predicted / measured:.2f} times)"


def _seconds(run: RunEnded) -> float:
    assert run.step_seconds is not None
    return run.step_seconds


def table(found: list[dict[str, Any]]) -> str:
    """The result as Markdown."""
    parts = list(found[0]["parts"])
    lines = [
        "| global batch | cable | one rank (ms) | two (ms) | predicted | faster by | "
        + " | ".join(f"{part} (ms)" for part in parts)
        + " | predicted exchange | limited by |",
        "|---:|---:|---:|---:|---:|---:|" + "---:|" * len(parts) + "---:|---|",
    ]
    for row in found:
        rate = "as it is" if row["rate_mbit"] is None else f"{row['rate_mbit']} Mbit/s"
        spent = " | ".join(f"{1e3 * row['parts'][part]:.1f}" for part in parts)
        lines.append(
            f"| {row['global_batch']} | {rate} | {1e3 * row['one_seconds']:.1f}"
            f" | {1e3 * row['two_seconds']:.1f} | {1e3 * row['predicted_two_seconds']:.1f}"
            f" | {row['one_seconds'] / row['two_seconds']:.2f} | {spent}"
            f" | {1e3 * row['predicted_parts']['exchange']:.1f}"
            f" | {row['limited_by'].split(' of a step')[0]} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each setting")
    parser.add_argument("--link", action="store_true", help="how near the exchange is predicted")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.exit(f"two machines cannot be made here: {reason}")
    rows = measure_links(options.rounds) if options.link else measure(options.rounds)
    result = {
        "rows": rows,
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": version("torch"),
            "rounds": options.rounds,
        },
    }
    told, name = (link_table(rows), "scaling-link") if options.link else (table(rows), "scaling")
    print(told)
    (options.out / f"{name}.md").write_text(told, encoding="utf-8")
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
