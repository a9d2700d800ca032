"""The trace of a device that is here against the one that stands for it where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.estimate import footprint, subject_of
from anybatch.estimate.cuda import is_overlaid
from anybatch.machine import Machine
from anybatch.plans import Choice, Recompute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WORDS, WIDTH = 2000, 256


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, "gelu", batch_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 16 * 16, 10),
    )


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def task(name: str) -> ab.Task:
    data = (
        TensorDataset(
            torch.zeros(64, 128, dtype=torch.long), torch.zeros(64, 128, dtype=torch.long)
        )
        if name == "decoder"
        else TensorDataset(torch.zeros(64, 3, 32, 32), torch.zeros(64, dtype=torch.long))
    )
    return ab.Task(
        model=Decoder if name == "decoder" else convolutional,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        train=data,
        global_batch=64,
        steps=1,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("name", ["decoder", "convolutional"])
def test_cuda_s_rules_laid_over_cpu_tensors_give_the_bytes_of_cuda_tensors(
    name: str, recompute: str, precision: str
):
    here = Machine.here(device="cuda").device
    absent = replace(here, present=False)
    assert is_overlaid(absent)
    assert not is_overlaid(here)
    blocks = subject_of(task(name)).blocks if recompute == "all" else ()
    choice = Choice(
        micro_batch=32,
        evaluation_batch=32,
        precision=precision,  # pyright: ignore[reportArgumentType]
        recompute=Recompute(blocks=blocks),
    )
    told, laid_over = (
        footprint(subject_of(task(name)), choice, device).peak.totals["allocated"]
        for device in (here, absent)
    )
    assert laid_over == pytest.approx(told, rel=0.01)
