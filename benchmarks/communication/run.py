"""What does communication cost? One command, as root on Linux, with `ip` and `tc` (Debian: iproute2):

    python benchmarks/communication/run.py

Two machines are made as network namespaces, joined by a cable of 1 Gbit/s; one rank with one thread
runs on each. Prints the tables and writes them to `benchmarks/results/communication.md` and `.json`.
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

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests.multiprocess.netns import slow_down, two_machines, why_not  # noqa: E402

RATE_MBIT = 1000
TUNED, OURS, NAIVE = "DDP by hand, tuned", "anybatch, replicate", "DDP by hand, naive"


def run(rounds: int) -> dict:
    """The result of rank 0."""
    with two_machines() as machines, tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.json"
        processes = []
        for rank, machine in enumerate(machines):
            slow_down(machine, RATE_MBIT)
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": machines[0].address,
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": machine.interface,
            }
            command = [sys.executable, str(HERE / "rank.py"), machine.interface, str(target)]
            processes.append(
                subprocess.Popen(machine.command(*command, str(rounds)), env=environment)
            )
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            sys.exit(f"a rank failed: exit codes {codes}")
        return json.loads(target.read_text())


def tables(result: dict) -> str:
    """The result as Markdown."""
    lines = ["Bytes that one rank puts on the cable per global step (MB):", ""]
    accumulations = list(result["bytes"])
    lines += [
        "| micro-batches per step | " + " | ".join(accumulations) + " |",
        "|---|" + "---:|" * len(accumulations),
    ]
    for name in (OURS, NAIVE):
        sent = [result["bytes"][a][name]["bytes"] / 1e6 for a in accumulations]
        lines.append(f"| {name} | " + " | ".join(f"{one:.2f}" for one in sent) + " |")
    for key, found in result["exact"].items():
        base = found[TUNED]["seconds"]
        bucket = result["tuning"][key]["bucket_mib"]
        lines += [
            "",
            f"Step time, {key} (DDP tuned: buckets of {bucket} MiB):",
            "",
            "| | ms, median | quartiles | ratio to DDP tuned | MB per step |",
            "|---|---:|---:|---:|---:|",
        ]
        for name, one in found.items():
            low, high = (1e3 * q for q in one["quartiles"])
            lines.append(
                f"| {name} | {1e3 * one['seconds']:.1f} | {low:.1f}–{high:.1f} |"
                f" {one['seconds'] / base:.3f} | {one['bytes'] / 1e6:.2f} |"
            )
    for setting, found in result["relaxed"].items():
        base = found["replicate"]
        lines += [
            "",
            f"Relaxed exchange, {setting}, one micro-batch per step:",
            "",
            "| | ms, median | ratio to replicate | MB per step | ratio to replicate |",
            "|---|---:|---:|---:|---:|",
        ]
        for name, one in found.items():
            lines.append(
                f"| {name} | {1e3 * one['seconds']:.1f} | {one['seconds'] / base['seconds']:.2f} |"
                f" {one['bytes'] / 1e6:.3f} | {one['bytes'] / base['bytes']:.3f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of each comparison")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.exit(f"two machines cannot be made here: {reason}")
    result = run(options.rounds)
    result["machine"] = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "rate_mbit": RATE_MBIT,
        "rounds": options.rounds,
    }
    told = tables(result)
    print(told)
    (options.out / "communication.md").write_text(told, encoding="utf-8")
    (options.out / "communication.json").write_text(
        json.dumps(result, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
