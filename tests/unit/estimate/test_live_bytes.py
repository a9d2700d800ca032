"""Predicted peaks on a CPU against the live bytes of the tensors, counted by hand.

A peak lies between 0.5 and 1.3 of the tensors that forward leaves for backward, with parameters,
gradients and the optimizer's state: tensors that live for one operation only are not counted by hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import anybatch as ab
from anybatch.estimate import evaluation_peak, footprint, subject_of
from anybatch.machine import Machine
from anybatch.plans import Choice

CPU = replace(Machine.here(device="cpu").device, budget_bytes=64 << 30)
F32 = 4


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def peak(model: Any, inputs: Tensor, num_samples: int, optimizer: Any = sgd, **more: Any) -> int:
    task = ab.Task(
        model=model,
        loss=classify,
        optimizer=optimizer,
        train=TensorDataset(inputs, torch.zeros(len(inputs), dtype=torch.int64)),
        global_batch=num_samples,
        steps=1,
        **more,
    )
    choice = Choice(micro_batch=num_samples, evaluation_batch=1)
    return footprint(subject_of(task), choice, CPU).peak.num_bytes


def assert_near(predicted: int, by_hand: float) -> None:
    assert 0.5 * by_hand <= predicted <= 1.3 * by_hand


@pytest.mark.parametrize("num_samples", [16, 4096])
def test_a_perceptron(num_samples: int):
    parameters = 128 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
    # Weights and gradients; input, two products with their ReLUs, logits and log-softmax.
    numbers = 2 * parameters + num_samples * (128 + 4 * 512 + 2 * 10)
    found = peak(
        lambda: nn.Sequential(
            nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        ),
        torch.zeros(4, 128),
        num_samples,
    )
    assert_near(found, F32 * numbers)


def test_convolutions_with_a_norm_over_ghost_batches():
    num, side, channels = 32, 16, 24
    image = side * side * channels
    # Convolution, norm and ReLU keep an image each, twice; the input, and what is pooled.
    numbers = num * (3 * side * side + 2 * 3 * image + 2 * channels)
    found = peak(
        lambda: nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ),
        torch.zeros(4, 3, side, side),
        num,
        ghost_batch=8,
    )
    assert_near(found, F32 * numbers)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]


def test_an_lstm():
    num, length = 64, 100
    # Input, and the same in the order of time; four gates, the cell and the output of each step.
    numbers = num * length * (2 * 32 + 6 * 64)
    assert_near(peak(Recurrent, torch.zeros(4, length, 32), num), F32 * numbers)


def test_attention():
    num, length, width = 16, 64, 128
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    parameters = sum(p.numel() for p in layer.parameters())
    # Queries, keys and values once as they come and once for each head, attention, its projection, two
    # sums with their norms, the wide layer with its ReLU, and what it returns.
    numbers = 2 * parameters + num * length * width * (3 + 3 + 2 + 4 + 2 * 4 + 1)
    found = peak(
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True),
            nn.Flatten(),
        ),
        torch.zeros(4, length, width),
        num,
    )
    assert_near(found, F32 * numbers)


def test_an_evaluation_has_parameters_state_and_gradients_beside_one_pass():
    wide = 1024
    task = ab.Task(
        model=lambda: nn.Linear(wide, wide),
        loss=classify,
        optimizer=adam,
        train=TensorDataset(torch.zeros(4, wide), torch.zeros(4, dtype=torch.int64)),
        valid=TensorDataset(torch.zeros(4, wide), torch.zeros(4, dtype=torch.int64)),
        global_batch=4,
        steps=1,
    )
    choice = Choice(micro_batch=4, evaluation_batch=4096)
    numbers = 3 * wide * (wide + 1) + 4096 * wide * 3  # Adam's moments; input, logits, log-softmax
    assert_near(evaluation_peak(subject_of(task), choice, CPU).num_bytes, F32 * numbers)


def test_a_stream_holds_the_samples_of_a_step_beside_the_batch():
    class Rows(IterableDataset):
        def __iter__(self) -> Any:
            return iter([(torch.zeros(1000), 0)] * 64)

    def bytes_of(train: Any) -> int:
        task = ab.Task(
            model=lambda: nn.Linear(1000, 2),
            loss=classify,
            optimizer=sgd,
            train=train,
            global_batch=64,
            steps=1,
        )
        choice = Choice(micro_batch=4, evaluation_batch=1)
        return footprint(subject_of(task), choice, CPU).peak.num_bytes

    held = bytes_of(Rows()) - bytes_of([(torch.zeros(1000), 0)] * 64)
    assert held == 64 * (1000 * 4 + 8)  # and a target of eight bytes each
