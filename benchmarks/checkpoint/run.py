"""What does a checkpoint cost training? One command, no arguments needed:

    python benchmarks/checkpoint/run.py

A plain loop trains a model of 100 million parameters with AdamW (1.2 GB of state in float32) and saves
checkpoints in the background. Each round is a stretch of steps with no save under way, then a save and
the steps until it is complete, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from anybatch.parallel import SingleDevice
from anybatch.state import Checkpoints, Content, Saved

RESULTS = Path(__file__).parents[1] / "results"
WIDTH, NUM_LAYERS = 2048, 24
WARM_UP_STEPS = 3


@dataclass
class Times:
    """In seconds, over all rounds; a list for each thing that was timed."""

    quiet: list[float] = field(default_factory=list)
    saving: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    complete: list[float] = field(default_factory=list)
    direct: list[float] = field(default_factory=list)
    newest: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    round_ratios: list[float] = field(default_factory=list)


class Training:
    """Steps of a plain loop, one by one."""

    def __init__(self, batch: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._inputs = torch.randn(batch, WIDTH)

    def step(self) -> float:
        """The seconds that it took."""
        begin = time.perf_counter()
        self.model(self._inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin

    def content(self) -> Content:
        tensors = dict(self.model.named_parameters())
        for number, state in enumerate(self.optimizer.state.values()):
            tensors |= {f"{number}/{name}": value for name, value in state.items()}
        return Content(tensors)


def measure(folder: Path, rounds: int, quiet_steps: int, batch: int) -> tuple[Times, int]:
    training, times = Training(batch), Times()
    for _ in range(WARM_UP_STEPS):
        training.step()
    content = training.content()
    num_bytes = sum(one.numel() * one.element_size() for one in content.tensors.values())
    checkpoints = Checkpoints(folder, SingleDevice(), keep=1)
    gc.freeze()
    number = 0
    for _ in range(rounds):
        quiet = [training.step() for _ in range(quiet_steps)]
        number += 1
        checkpoints.save(content, number)
        saving: list[float] = []
        while not (ended := checkpoints.finished()):
            saving.append(training.step())
        (saved,) = ended
        assert isinstance(saved, Saved), saved
        saving = saving[:-1] or saving  # it was complete before the last one was over
        times.quiet += quiet
        times.saving += saving
        times.round_ratios.append(statistics.fmean(saving) / statistics.fmean(quiet))
        times.held.append(saved.held_seconds)
        times.complete.append(saved.seconds)
        os.sync()
    for _ in range(3):
        number += 1
        checkpoints.save(content, number, stage=False)
        (saved,) = checkpoints.finished()
        assert isinstance(saved, Saved), saved
        times.direct.append(saved.seconds)
    for _ in range(3):
        begin = time.perf_counter()
        found = checkpoints.newest()
        times.newest.append(time.perf_counter() - begin)
        assert found is not None
        assert found.step == number
        targets = {name: torch.zeros_like(one) for name, one in content.tensors.items()}
        begin = time.perf_counter()
        checkpoints.load(found, targets)
        times.load.append(time.perf_counter() - begin)
        assert all(torch.equal(targets[name], one) for name, one in content.tensors.items())
    checkpoints.close()
    return times, num_bytes


def plain_write(folder: Path, num_bytes: int) -> float:
    """Seconds to write as many bytes to the same disk, and have them there: what the disk allows."""
    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(4 << 20)
    begin = time.perf_counter()
    with (folder / "plain").open("wb", buffering=0) as file:
        for _ in range(num_bytes // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    (folder / "plain").unlink()
    return seconds


def report(times: Times, num_bytes: int, disk_seconds: float) -> str:
    gigabytes = num_bytes / 1e9
    quiet, saving = statistics.median(times.quiet), statistics.median(times.saving)
    means = statistics.fmean(times.saving) / statistics.fmean(times.quiet)
    low, middle, high = statistics.quantiles(times.round_ratios, n=4)

    def rate(seconds: list[float]) -> str:
        middle = statistics.median(seconds)
        return f"{middle:.2f} s | {gigabytes / middle:.2f} GB/s"

    return "\n".join(
        [
            "## Checkpoint",
            "",
            f"{gigabytes:.2f} GB of state; {len(times.quiet)} quiet steps, {len(times.saving)} saving.",
            "",
            "| step | time |",
            "|---|---:|",
            f"| no save under way (median) | {quiet * 1e3:.0f} ms |",
            f"| while one is written (median) | {saving * 1e3:.0f} ms |",
            f"| ratio of medians | **{saving / quiet:.3f}** |",
            f"| ratio of means | {means:.3f} |",
            f"| ratio of means by round, median (quartiles) | {middle:.3f} ({low:.3f} to {high:.3f}) |",
            "",
            "| what | time (median) | rate |",
            "|---|---:|---:|",
            f"| training held for the copy | {rate(times.held)} |",
            f"| complete, written in the background | {rate(times.complete)} |",
            f"| complete, written before `save` returns | {rate(times.direct)} |",
            f"| as many bytes written plainly, with fsync | {rate([disk_seconds])} |",
            f"| found and verified (page cache warm) | {rate(times.newest)} |",
            f"| loaded and verified (page cache warm) | {rate(times.load)} |",
            "",
        ]
    )


def machine() -> dict[str, str | int]:
    return {
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quiet-steps", type=int, default=8, help="before each save")
    parser.add_argument("--batch", type=int, default=256, help="rows per step")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: here")
    parser.add_argument("--dry", action="store_true", help="print, and write no results")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.folder or Path.cwd()))
    try:
        times, num_bytes = measure(folder / "run", args.rounds, args.quiet_steps, args.batch)
        disk_seconds = plain_write(folder, num_bytes)
    finally:
        shutil.rmtree(folder)
    text = report(times, num_bytes, disk_seconds)
    print(text)
    if args.dry:
        return
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "checkpoint.md").write_text(text, encoding="utf-8")
    record = {"machine": machine(), "num_bytes": num_bytes, "disk_seconds": disk_seconds}
    record |= {"times": asdict(times)}
    (RESULTS / "checkpoint.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
