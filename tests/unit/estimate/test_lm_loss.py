"""The estimate sees what lm_loss takes: the logits where they are, and that they are gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.estimate import footprint, subject_of
from anybatch.machine import Machine
from anybatch.plans import Choice

MIB = 1 << 20
WORDS, LENGTH, BATCH = 40_000, 250, 32
LOGITS = WORDS * LENGTH * BATCH * 4
BIG_CPU = replace(Machine.here("64MiB").device, budget_bytes=900 << 30, total_bytes=900 << 30)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 64)
        self.head = nn.Linear(64, WORDS, bias=False)

    def forward(self, tokens):
        return self.embed(tokens)


def peak(backend, precision="fp32"):
    def loss(model, tokens):
        return ab.lm_loss(model(tokens), model.head, tokens, backend=backend)

    task = ab.Task(
        model=Words,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=[torch.zeros(LENGTH, dtype=torch.int64)] * 2,
        collate=torch.stack,
        global_batch=BATCH,
        steps=1,
    )
    choice = Choice(micro_batch=BATCH, evaluation_batch=1, precision=precision)
    return footprint(subject_of(task), choice, BIG_CPU).peak.num_bytes


@pytest.mark.parametrize("backend", ["auto", "tokens", "vocabulary", "torch"])
def test_the_logits_are_gone_from_the_estimate(backend):
    if backend == "torch" and not hasattr(nn, "LinearCrossEntropyOptions"):
        pytest.skip("torch 2.13 and newer")
    plain = peak("plain")
    assert LOGITS == 1_280_000_000
    assert plain > 2 * LOGITS
    assert plain - peak(backend) > 2 * LOGITS


def test_they_are_gone_in_half_precision_too():
    assert peak("plain", "bf16") - peak("auto", "bf16") > 2 * LOGITS


RUN = """
import functools, json, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import anybatch as ab

torch.set_num_threads(1)
kind, precision, recompute = sys.argv[1:]
WORDS, WIDTH, LENGTH, BATCH = 8000, 128, 64, 32


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 256, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model, batch):
    (tokens,) = batch
    return ab.lm_loss(model(tokens)[:, :-1], model.head, tokens[:, 1:], backend=kind)


def language_model():
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=LENGTH
        )
    )


ids = torch.randint(WORDS, (64, LENGTH))
ours = kind != "causal"
task = ab.Task(
    model=Decoder if ours else language_model,
    loss=loss if ours else ab.causal_lm_loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    train=TensorDataset(ids) if ours else [{"input_ids": one} for one in ids],
    global_batch=BATCH,
    steps=3,
)
plan = ab.plan(
    task, memory="3GiB", precision=precision, micro_batch=BATCH, recompute=recompute
)
ended = ab.train(task, plan=plan).ended
print(json.dumps([ended.predicted_peak_bytes, ended.measured_peak_bytes]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measured on Linux")
@pytest.mark.parametrize(
    ("kind", "precision", "recompute"),
    [
        ("plain", "fp32", "none"),
        ("tokens", "fp32", "none"),
        ("vocabulary", "bf16", "none"),
        ("auto", "bf16-weights", "all"),
        ("causal", "fp32", "none"),
    ],
)
def test_the_prediction_is_near_the_measurement(kind: str, precision: str, recompute: str):
    if kind == "causal":
        pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", RUN, kind, precision, recompute],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    predicted, measured = json.loads(done.stdout.splitlines()[-1])
    print(f"predicted {predicted / MIB:.1f}, measured {measured / MIB:.1f} MiB")
    assert abs(predicted - measured) < max(0.1 * measured, 10 * MIB)
