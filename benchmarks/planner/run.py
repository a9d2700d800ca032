"""How long do traces take? One command: python benchmarks/planner/run.py

A decoder of GPT-2's size, for a described GPU: what the first traces cost, what the others cost that
follow from them, and the memory that all of it takes. CPU time, so that other processes do not count.
"""

from __future__ import annotations

import resource
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.estimate import footprint, subject_of
from anybatch.machine import Machine
from anybatch.plans import Choice

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
from models import LanguageModel, adamw, token_loss


def main() -> None:
    """Print one line per micro-batch."""
    task = ab.Task(
        model=partial(LanguageModel, 50257, 768, 12, 1024, True),
        loss=token_loss,
        optimizer=adamw,
        train=TensorDataset(torch.randint(50257, (8, 1025))),
        global_batch=512,
        steps=1,
    )
    device = Machine.describe("24GiB").device
    begun = time.process_time()
    subject = subject_of(task)
    print(f"subject: {time.process_time() - begun:.2f} s")
    for size in (2, 4, 8, 16, 32, 6, 5):
        begun = time.process_time()
        found = footprint(subject, Choice(micro_batch=size, evaluation_batch=1), device)
        seconds = time.process_time() - begun
        print(f"micro-batch {size}: {seconds:.2f} s, {found.peak.num_bytes / 2**20:.0f} MiB")
    print(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
