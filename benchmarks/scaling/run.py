"""What does a second machine bring, and what keeps it from bringing more? One command, as root on
Linux, with `ip` and `tc` (Debian: iproute2):

    python benchmarks/scaling/run.py

Trains a task on one machine and on two, which are network namespaces joined by a cable of several
speeds, with one rank of one thread each. Prints the table and writes it to
`benchmarks/results/scaling.md` and `scaling.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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

from anybatch.events import RunEnded  # noqa: E402
from anybatch.insight.scaling import what_limits  # noqa: E402
from anybatch.report import read  # noqa: E402

BATCHES = (64, 256, 1024)
RATES_MBIT = (None, 1000, 200)
MICRO_BATCH = 32
DEADLINE_SECONDS = 600.0


def command(global_batch: int, out: Path, *more: str) -> list[str]:
    """A line that trains, with as large a micro-batch on one rank as on two."""
    return [
        *(sys.executable, "-m", "anybatch", "train", str(HERE / "task.py"), "--no-trial"),
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


def on_two(global_batch: int, rate_mbit: int | None, folder: Path) -> RunEnded:
    """The task on two machines, each with a run folder of its own; told by the one of rank 0."""
    with two_machines() as machines:
        for machine in machines:
            if rate_mbit is not None:
                slow_down(machine, rate_mbit)
        place = f"{machines[0].address}:29500"
        outs = [folder / f"two-{global_batch}-{rate_mbit}-{i}" for i in range(2)]
        joined = ("--ranks", "1", "--nodes", "2", "--rendezvous", place)
        wait_for(
            [
                machine.command(*command(global_batch, out, *joined))
                for machine, out in zip(machines, outs, strict=True)
            ]
        )
        return next(ended(out) for out in outs if (out / "events.jsonl").is_file())


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
                    twos[rate].append(on_two(global_batch, rate, folder))
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
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.exit(f"two machines cannot be made here: {reason}")
    result = {
        "rows": measure(options.rounds),
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": version("torch"),
            "rounds": options.rounds,
        },
    }
    told = table(result["rows"])
    print(told)
    (options.out / "scaling.md").write_text(told, encoding="utf-8")
    (options.out / "scaling.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
