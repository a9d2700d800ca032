"""Worker processes of a process under a real memory limit, in a process of their own:
`python -m tests.faults.workers_under_limit NAME [START_METHOD]`.

Prints what happened as one line of JSON. The limit is the operating system's (RLIMIT_DATA).
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import resource
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import anybatch as ab
from anybatch.data import Loader, Steps
from anybatch.errors import DataError
from anybatch.events import Evaluated, Event, OutOfMemory, StepDone
from anybatch.process.process_memory import status

MIB = 1 << 20


class Large(Dataset):
    """Takes 64 MiB for each sample."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return index + len(bytearray(64 * MIB)) % 2


class Drawn(Dataset):
    """Images that are made when they are asked for."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randn(3, 16, 16, generator=draw), index % 10


def whole(extent):
    return [range(start, start + 4) for start in range(0, extent.num_samples, 4)]


def loaded(loader: Loader) -> list[int]:
    """The samples of the next step."""
    data = loader.next_step()
    assert data is not None
    return [index for batch in data.micro_batches for index in batch.tolist()]


def of_somebody_else() -> dict:
    """A limit that has no room for a single thread more."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    loader = Loader(Drawn(), Steps(256, 8, epochs=1), num_workers=2)
    loader.begin(0, whole)
    data = loader.next_step()
    assert data is not None
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + MIB, before[1]))
    try:
        next(data.micro_batches)
        told = ""
    except DataError as error:
        told = str(error)
    resource.setrlimit(resource.RLIMIT_DATA, before)
    loader.begin(0, whole)
    data = loader.next_step()
    assert data is not None
    images, _ = next(data.micro_batches)
    loader.close()
    return {"told": told, "afterwards": len(images)}


def network():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 256, 10)
    )


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def run() -> dict:
    """The same run with workers and without, under a budget of 24 MiB."""
    task = ab.Task(
        model=network,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        train=Drawn(),
        valid=Drawn(),
        global_batch=128,
        steps=4,
        evaluate_every=2,
    )
    found = {}
    for num_workers in (0, 2):
        events: list[Event] = []
        result = ab.train(
            dataclasses.replace(task, num_workers=num_workers),
            memory="24MiB",
            micro_batch=64,
            progress=False,
            sinks=[events.append],
        )
        found[num_workers] = {
            "enforced": result.plan.enforced,
            "failures": [e.message for e in events if isinstance(e, OutOfMemory)],
            "losses": [e.loss for e in events if isinstance(e, StepDone | Evaluated)],
            "measured": result.ended.measured_peak_bytes,
        }
    return found


RUNS = {"of somebody else": of_somebody_else, "run": run}

if __name__ == "__main__":
    torch.set_num_threads(1)
    multiprocessing.set_start_method(sys.argv[2] if sys.argv[2:] else "fork")
    print(json.dumps(RUNS[sys.argv[1]]()))
