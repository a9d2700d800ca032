"""How close is the peak that a plan states to the one that the operating system measures? One command:

    python benchmarks/memory/run.py [--only NAME ...] [--variants VARIANT ...] [--jobs N]
                                    [--threads N] [--name FILE]

Each cell (a model under a variant) trains three steps in its own process, under an enforced budget, and
compares the peak and the step time of the plan, as rehearsed and as traced, with those measured.
Nothing learned in earlier runs is used. Torch's MemTracker and Accelerate's estimator are asked about
the same model, batch and optimizer.
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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.memory.models import KINDS

from anybatch.planner.ranks import reserve_of

RESULTS = Path(__file__).parents[1] / "results"
VARIANTS = ("plain", "accumulated", "recomputed", "bf16")
OF_WORDS = ("lstm", "gpt, tied", "gpt, untied", "experts")
"""Models with logits over a vocabulary, whose loss can be taken in chunks."""
CHUNKED = ("chunked", "chunked bf16")
WITH_LSTM = ("lstm", "speech")
OF_IMAGES = ("convolutional", "residual", "vgg16", "u-net")
CHANNELS_LAST = "channels last"
BUDGET = "6GiB"
LEAST_BYTES = 64 << 20
LEAST_SECONDS, MOST_IDLE = 0.02, 0.1
BLOCKS = {"u-net": "down.*,join.*", "speech": "layers.*"}


def cells_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """The cells of these models: each with its variants."""
    return [(name, variant) for name in names for variant in variants_of(name)]


def variants_of(name: str) -> tuple[str, ...]:
    """Of one model."""
    chunked = CHUNKED if name in OF_WORDS else ()
    return (*VARIANTS, *chunked, *([CHANNELS_LAST] if name in OF_IMAGES else []))


def can_run(name: str, variant: str) -> bool:
    """Whether torch can compute the cell on this CPU: an LSTM under autocast only where oneDNN does."""
    import torch

    from anybatch.machine import cpu_computes_in

    is_half = variant.endswith("bf16") and name in WITH_LSTM
    return not is_half or cpu_computes_in(torch.bfloat16)


def measure(name: str, variant: str, steps: int | None = None) -> dict[str, Any]:
    """Run one cell in this process and compare it with the plan of a trace.

    Args:
        steps: number of steps; None: that of the task.
    """
    import anybatch as ab

    task, plan = task_and_plan(name, variant)
    if steps is not None:
        task = replace(task, steps=steps)
    return _compared(name, variant, ab.train(task, plan=plan, progress=False).ended)


def measure_rehearsed(name: str, variant: str) -> dict[str, Any]:
    """Run one cell in this process as a user would, with a rehearsal."""
    import anybatch as ab

    _, traced = task_and_plan(name, variant)
    task, options = _task_and_options(name, variant)
    ended = ab.train(task, rehearsal=True, progress=False, **options).ended
    told = traced.prediction
    return {
        **_compared(name, variant, ended),
        "traced_bytes": told and told.peak_bytes,
        "traced_seconds": told and told.step_seconds,
    }


def _compared(name: str, variant: str, ended: Any) -> dict[str, Any]:
    return {
        "model": name,
        "variant": variant,
        "predicted_bytes": ended.predicted_peak_bytes,
        "measured_bytes": ended.measured_peak_bytes,
        "predicted_totals": dict(ended.predicted_totals),
        "measured_totals": dict(ended.measured_totals),
        "predicted_seconds": ended.predicted_step_seconds,
        "measured_seconds": ended.step_seconds,
        "idle_seconds": ended.idle_seconds,
    }


def task_and_plan(name: str, variant: str, machine: Any = None) -> tuple[Any, Any]:
    """The task of a cell, and its plan without a rehearsal, for this machine or for `machine`."""
    import anybatch as ab

    task, options = _task_and_options(name, variant)
    return task, ab.plan(task, machine, rehearsal=False, **options)


def _task_and_options(name: str, variant: str) -> tuple[Any, dict[str, Any]]:
    kind = KINDS[name]
    if variant == CHANNELS_LAST:
        kind = kind.channels_last()
    return kind.task(name), {
        "memory": BUDGET,
        "precision": "bf16" if variant.endswith("bf16") else "fp32",
        "micro_batch": kind.batch // 4 if variant == "accumulated" else kind.batch,
        "recompute": BLOCKS.get(name, "all") if variant == "recomputed" else "none",
        "chunked_loss": variant in CHUNKED,
    }


def others(name: str, variant: str, device: str = "cpu") -> dict[str, Any]:
    """What the other two say of a cell on `device`; None where they fail or have no such variant."""
    found: dict[str, Any] = {}
    for other, ask in (("mem_tracker_bytes", _mem_tracker), ("accelerate_bytes", _accelerate)):
        try:
            found[other] = ask(name, variant, device)
        except Exception as error:
            found[other] = None
            print(f"{name}, {variant}: {other}: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def _mem_tracker(name: str, variant: str, device: str) -> int | None:
    """MemTracker around the same step as a plain loop, on fake tensors; not asked of what such a loop
    does not have."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    if variant == "recomputed" or variant not in VARIANTS:
        return None
    kind = KINDS[name]
    size = kind.batch // 4 if variant == "accumulated" else kind.batch
    shapes = [(tuple(t.shape[1:]), t.dtype) for t in kind.samples(2)]
    with FakeTensorMode(), torch.device(device):
        model = kind.model()
        optimizer = kind.optimizer(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):
                for _ in range(kind.batch // size):
                    batch = [torch.zeros((size, *shape), dtype=dtype) for shape, dtype in shapes]
                    with torch.autocast(device, torch.bfloat16, enabled=variant == "bf16"):
                        total = kind.loss(model, batch).sum
                    total.backward()
                    del batch, total
                    tracker.reset_mod_stats()  # it does not follow a module through several passes
                optimizer.step()
                optimizer.zero_grad()
    snapshot = tracker.get_tracker_snapshot("peak")
    return int(max(sizes["Total"] for sizes in snapshot.values()))


def _accelerate(name: str, variant: str, _device: str) -> int:
    """What `accelerate estimate-memory` prints for training with Adam, whatever batch and optimizer."""
    import torch
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with torch.device("meta"):
        total, _ = calculate_maximum_sizes(KINDS[name].model())
    precision = "bfloat16" if variant.endswith("bf16") else "float32"
    return int(max(estimate_training_usage(total, precision).values()))


def _in_process(name: str, variant: str, what: str, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--cell", name, variant, what],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "XDG_CACHE_HOME": cache},
            timeout=900,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{name}, {variant}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _error(cell: dict[str, Any], key: str = "predicted_bytes") -> float | None:
    told = cell.get(key)
    return None if told is None else told / cell["measured_bytes"] - 1


def table(cells: list[dict[str, Any]], threads: int) -> str:
    """The results as Markdown."""
    titles = "measured MiB", "rehearsed", "traced", "MemTracker", "Accelerate"
    titles = *titles, "measured s", "rehearsed s", "traced s"
    lines = [f"| model | variant | {' | '.join(titles)} |", f"|---|---|{'---:|' * len(titles)}"]
    keys = "predicted_bytes", "traced_bytes", "mem_tracker_bytes", "accelerate_bytes"
    for cell in cells:
        errors = [_error(cell, key) for key in keys]
        told = " | ".join("-" if e is None else f"{e:+.1%}" for e in errors)
        lines.append(
            f"| {cell['model']} | {cell['variant']} | {cell['measured_bytes'] / 2**20:.1f}"
            f" | {told} | {_seconds_of(cell)} |"
        )
    lines += ["", _of_bytes(cells, "predicted_bytes", "Rehearsed")]
    lines += ["", _of_bytes(cells, "traced_bytes", "Traced")]
    lines += ["", _of_seconds(cells, "predicted_seconds", "rehearsed")]
    lines += ["", _of_seconds(cells, "traced_seconds", "traced"), ""]
    processor = platform.processor() or platform.machine()
    lines += [f"{processor}, {threads} threads, {platform.platform()}."]
    return "\n".join(lines) + "\n"


def _of_bytes(cells: list[dict[str, Any]], key: str, how: str) -> str:
    """How close the peaks under `key` are to the measured ones."""
    large = [c for c in cells if c["measured_bytes"] >= LEAST_BYTES]
    errors = [e for c in large if (e := _error(c, key)) is not None]
    if not errors:
        return f"{how}: no peaks to compare."
    below = [c for c in large if (_error(c, key) or 0) < 0]
    short = [c for c in below if c["measured_bytes"] - c[key] > reserve_of(c[key], "cpu")]
    return (
        f"{how} peaks of {len(large)} cells of {LEAST_BYTES >> 20} MiB and more: median error"
        f" {statistics.median(map(abs, errors)):.1%}, from {min(errors):+.1%} to {max(errors):+.1%};"
        f" {len(below)} below the measured one, {len(short)} of them by more than the reserve."
    )


def _is_disturbed(cell: dict[str, Any]) -> bool:
    return cell["idle_seconds"] >= MOST_IDLE * cell["measured_seconds"]


def _seconds_of(cell: dict[str, Any]) -> str:
    """Measured, rehearsed and traced step time; dashes for a cell that other processes disturbed."""
    if _is_disturbed(cell):
        return "- | - | -"
    keys = "measured_seconds", "predicted_seconds", "traced_seconds"
    return " | ".join("-" if cell.get(key) is None else f"{cell[key]:.3f}" for key in keys)


def _of_seconds(cells: list[dict[str, Any]], key: str, how: str) -> str:
    """How close the step times under `key` are, without steps of milliseconds and disturbed cells."""
    counted = [
        cell[key] / cell["measured_seconds"]
        for cell in cells
        if cell.get(key) and cell["measured_seconds"] > LEAST_SECONDS and not _is_disturbed(cell)
    ]
    if len(counted) < 2:
        return "No times to compare."
    tenths = statistics.quantiles(counted, n=10)
    return (
        f"Step times, {how} / measured, of {len(counted)} cells: median"
        f" {statistics.median(counted):.2f}, from {min(counted):.2f} to {max(counted):.2f}; four fifths"
        f" of them from {tenths[0]:.2f} to {tenths[-1]:.2f}."
    )


def main() -> None:
    """Run all cells, print the table, and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models alone")
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help="these alone")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--name", default="memory", help="of the files of results")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cell:
        name, variant, what = given.cell
        ask = measure_rehearsed if what == "own" else others
        print(json.dumps(ask(name, variant)))
        return

    def cell_of(named: tuple[str, str]) -> dict[str, Any]:
        cell = _in_process(*named, "own", given.threads)
        cell |= _in_process(*named, "others", given.threads)
        print(f"{', '.join(named)}: {_error(cell):+.2%}", flush=True)
        return cell

    with ThreadPoolExecutor(given.jobs) as pool:
        named = [
            (name, variant)
            for name, variant in cells_of(given.only or KINDS)
            if not given.variants or variant in given.variants
        ]
        cells = list(pool.map(cell_of, [one for one in named if can_run(*one)]))
    if not given.only:
        RESULTS.mkdir(exist_ok=True)
        data = json.dumps(cells, indent=2) + "\n"
        (RESULTS / f"{given.name}.json").write_text(data, encoding="utf-8")
    text = table(cells, given.threads)
    if missing := [", ".join(one) for one in named if not can_run(*one)]:
        text += f"\nTorch cannot compute on this CPU: {'; '.join(missing)}.\n"
    print(text)
    if not given.only:
        (RESULTS / f"{given.name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
