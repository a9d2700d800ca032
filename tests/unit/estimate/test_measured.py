"""Predicted against measured peaks of whole runs, each in a process of its own under a budget.

The numbers are those of `ended`: what the kernel counts of the process above what it was before. A plan
must not promise less than is taken, and not much more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

MIB = 1 << 20

COMMON = """
import json, sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import anybatch as ab
from anybatch.recipes import resolve

torch.set_num_threads(1)


def adam(params):
    return torch.optim.Adam(params, lr=1e-3)


def mlp():
    def model():
        return nn.Sequential(
            nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )

    return ab.Task(
        model=model,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=adam,
        train=TensorDataset(torch.randn(4096, 128), torch.randint(0, 10, (4096,))),
        global_batch=4096,
        steps=3,
    )


def digits():
    return resolve("digits", {"global_batch": "512", "epochs": "2"})


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(64, 500)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def transformer():
    return ab.Task(
        model=Transformer,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten()),
        optimizer=adam,
        train=TensorDataset(torch.randint(0, 500, (64, 48))),
        global_batch=64,
        steps=3,
    )


def decoder():
    # Activations of 192 KiB, beside pairs of half as much that come and go: holes for the others.
    from anybatch.recipes.text_model import Decoder, Shape

    return ab.Task(
        model=lambda: Decoder(Shape(vocabulary=256, context=96, width=128, depth=4, heads=4)),
        loss=lambda model, batch: model(batch[0], batch[0].long()),
        optimizer=adam,
        train=TensorDataset(torch.randint(0, 256, (64, 96))),
        global_batch=4,
        steps=30,
    )


ended = ab.train(globals()[sys.argv[1]](), memory=sys.argv[2]).ended
print(json.dumps([ended.predicted_peak_bytes, ended.measured_peak_bytes, ended.finished]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a budget is enforced on Linux")
@pytest.mark.parametrize(
    ("task", "memory"),
    [
        ("mlp", "400MiB"),
        ("mlp", "24MiB"),
        ("digits", "16MiB"),
        ("digits", "64MiB"),
        ("transformer", "400MiB"),
        ("transformer", "40MiB"),
        ("decoder", "400MiB"),
    ],
)
def test_the_prediction_is_near_and_not_below(task: str, memory: str):
    done = subprocess.run(
        [sys.executable, "-c", COMMON, task, memory],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    predicted, measured, finished = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{task} under {memory}: predicted {predicted / MIB:.1f}, measured {measured / MIB:.1f} MiB"
    )
    assert finished
    assert abs(predicted - measured) < max(0.15 * measured, 4 * MIB)
    assert predicted > measured - 2 * MIB
