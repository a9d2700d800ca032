"""The estimate sees what lm_loss takes: the logits where they are, and that they are gone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.estimate import footprint, subject_of
from anybatch.machine import Machine
from anybatch.plans import Choice

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


@pytest.mark.parametrize("backend", ["auto", "tokens", "vocabulary"])
def test_the_logits_are_gone_from_the_estimate(backend):
    plain = peak("plain")
    assert LOGITS == 1_280_000_000
    assert plain > 2 * LOGITS
    assert plain - peak(backend) > 2 * LOGITS


def test_they_are_gone_in_half_precision_too():
    assert peak("plain", "bf16") - peak("auto", "bf16") > 2 * LOGITS
