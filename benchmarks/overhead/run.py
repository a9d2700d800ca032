"""What does a training loop cost beside the computation? One command, no arguments needed:

    python benchmarks/overhead/run.py

Each round runs one epoch of every contender, in random order, and compares it with the epoch of the
hand-written loop of the same round: what disturbs the machine for longer than a round disturbs both.
Time is CPU time of this process, which is blind to other processes' turns on the core.
Then each contender trains alone in processes of its own, to see that they did not disturb each other.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from contenders import BASELINE, CONTENDERS, TIGHTEST, Sampled, Work
from torch import nn
from torch.utils.data import TensorDataset

RESULTS = Path(__file__).parents[1] / "results"
MICRO_BATCH, NUM_SAMPLES, WIDTH = 32, 8192, 192
WARM_UP_EPOCHS = 2

# Name, accumulation, and whether the data set may be indexed as a whole.
SETTINGS = {
    "accumulation 4": (4, True),
    "accumulation 1": (1, True),
    "accumulation 4, a data set of one's own": (4, False),
}
FIRST = next(iter(SETTINGS))


def build_work(setting: str, shuffle: bool = True) -> Work:
    accumulation, in_memory = SETTINGS[setting]
    kind = TensorDataset if in_memory else Sampled
    return Work(kind(*images_and_labels()), MICRO_BATCH, accumulation, shuffle)


def images_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """Ten blurred shapes of 28 x 28 pixels, each sample one of them under noise."""
    generator = torch.Generator().manual_seed(1)
    shapes = torch.randn(10, 1, 28, 28, generator=generator)
    shapes = nn.functional.avg_pool2d(shapes, 5, stride=1, padding=2).flatten(1) * 5
    labels = torch.randint(10, (NUM_SAMPLES,), generator=generator)
    return shapes[labels] + torch.randn(NUM_SAMPLES, 784, generator=generator), labels


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )


def names(setting: str) -> list[str]:
    """Who can take part: a data set of one's own cannot be indexed as a whole."""
    return [name for name in CONTENDERS if SETTINGS[setting][1] or name != TIGHTEST]


def deviations(setting: str) -> dict[str, float]:
    """Train everyone for an epoch in one order, and compare the parameters with the hand-written
    loop's: largest difference, relative to the largest change that training made."""
    work, found = build_work(setting, shuffle=False), {}
    start = torch.nn.utils.parameters_to_vector(build_model().parameters()).detach()
    for name in names(setting):
        model = build_model()
        epochs = CONTENDERS[name](work, model)
        next(epochs)
        epochs.close()  # type: ignore[attr-defined]
        found[name] = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    change = (found[BASELINE] - start).abs().max()
    return {n: float((v - found[BASELINE]).abs().max() / change) for n, v in found.items()}


def agreement(deviation: dict[str, float]) -> str:
    worst = max(deviation, key=lambda name: deviation[name])
    if not deviation[worst]:
        return "After an epoch in one order all end with the same parameters, bit by bit."
    return (
        f"After an epoch in one order the parameters differ by at most {deviation[worst]:.0e} of their"
        f" change ({worst})."
    )


def interleaved(setting: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of an epoch, for each contender and round."""
    work = build_work(setting)
    running: dict[str, Iterator[float]] = {
        name: CONTENDERS[name](work, build_model()) for name in names(setting)
    }
    seconds: dict[str, list[float]] = {name: [] for name in running}
    order = random.Random(0)
    for number in range(WARM_UP_EPOCHS + rounds):
        if number == WARM_UP_EPOCHS:
            gc.freeze()  # or the modules of all the libraries are searched for garbage in every epoch
        for name in order.sample(list(running), len(running)):
            gc.collect()  # nobody pays for what another left
            one = next(running[name])
            if number >= WARM_UP_EPOCHS:
                seconds[name].append(one)
    for epochs in running.values():
        epochs.close()  # type: ignore[attr-defined]
    return seconds


def alone(repeats: int, epochs: int) -> dict[str, list[float]]:
    """Seconds of `epochs` epochs of the first setting, each time in a new process."""
    seconds: dict[str, list[float]] = {name: [] for name in names(FIRST)}
    for _ in range(repeats):
        for name in seconds:
            command = [sys.executable, __file__, "--alone", name, "--epochs", str(epochs)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            seconds[name].append(float(done.stdout.split()[-1]))
    return seconds


def summary(seconds: dict[str, list[float]], micro_steps: int) -> dict[str, dict[str, float]]:
    """Per contender: time of a micro-step, and quartiles of its ratio to the hand-written loops."""
    rows = {}
    for name, mine in seconds.items():
        row = {"micro_step_ms": statistics.median(mine) / micro_steps * 1e3}
        row |= _quartiles("ratio", [a / b for a, b in zip(mine, seconds[BASELINE], strict=True)])
        if TIGHTEST in seconds:
            ratios = [a / b for a, b in zip(mine, seconds[TIGHTEST], strict=True)]
            row["ratio_to_tightest"] = statistics.median(ratios)
        rows[name] = row
    return rows


def _quartiles(name: str, values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {name: middle, f"{name}_q1": low, f"{name}_q3": high}


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [
        "| contender | micro-step | ratio to by hand, DataLoader (quartiles) | to tensors indexed |",
        "|---|---:|---:|---:|",
    ]
    for name, row in sorted(rows.items(), key=lambda item: item[1]["ratio"]):
        tightest = f"{row['ratio_to_tightest']:.2f}" if "ratio_to_tightest" in row else "–"
        spread = f"{row['ratio_q1']:.2f} to {row['ratio_q3']:.2f}"
        lines.append(
            f"| {name} | {row['micro_step_ms']:.3f} ms | **{row['ratio']:.2f}** ({spread})"
            f" | {tightest} |"
        )
    return "\n".join(lines)


def machine() -> dict[str, str | int]:
    packages = ("torch", "accelerate", "lightning", "anybatch")
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((s.split(":")[1].strip() for s in lines if s.startswith("model name")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="default: all")
    parser.add_argument("--processes", type=int, default=3, help="per contender; 0: none")
    parser.add_argument("--epochs", type=int, default=8, help="per process")
    parser.add_argument("--alone", choices=CONTENDERS, help="print the seconds of this one alone")
    args = parser.parse_args()
    torch.set_num_threads(1)  # or the CPU time of all threads would be added up
    warnings.filterwarnings("ignore", module="lightning")
    logging.disable(logging.INFO)  # Lightning's tips, once per `fit`

    if args.alone:
        epochs = CONTENDERS[args.alone](build_work(FIRST), build_model())
        for _ in range(WARM_UP_EPOCHS):
            next(epochs)
        print(sum(next(epochs) for _ in range(args.epochs)))
        return

    whole = args.setting is None
    found: dict[str, object] = {"machine": machine(), "rounds": args.rounds}
    texts = []
    for setting in args.setting or SETTINGS:
        equal = deviations(setting)
        rows = summary(interleaved(setting, args.rounds), NUM_SAMPLES // MICRO_BATCH)
        found[setting] = {"rows": rows, "deviation": equal}
        text = f"### {setting[0].upper()}{setting[1:]}\n\n{table(rows)}\n"
        text += f"\n{agreement(equal)}\n"
        print(text, flush=True)
        texts.append(text)
    if whole and args.processes:
        micro_steps = NUM_SAMPLES // MICRO_BATCH * args.epochs
        rows = summary(alone(args.processes, args.epochs), micro_steps)
        found["alone"] = rows
        title = f"### {FIRST.capitalize()}, each in {args.processes} processes of its own"
        text = f"{title}\n\n{table(rows)}\n"
        print(text)
        texts.append(text)
    if whole:
        RESULTS.mkdir(exist_ok=True)
        told = ", ".join(f"{key} {value}" for key, value in machine().items())
        head = f"## Overhead\n\nMeasured in {args.rounds} rounds on: {told}.\n"
        (RESULTS / "overhead.md").write_text("\n".join([head, *texts]), encoding="utf-8")
        (RESULTS / "overhead.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
