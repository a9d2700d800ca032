"""What a trace finds, against numbers that are known from elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.estimate import Subject, footprint, subject_of
from anybatch.estimate.footprint import evaluation_peak
from anybatch.estimate.kernels import CudaKernels
from anybatch.estimate.trace import alive, tracing
from anybatch.machine import Device, Machine
from anybatch.plans import Choice

CPU = Machine.here("64MiB").device
BIG_CPU = replace(CPU, budget_bytes=900 << 30, total_bytes=900 << 30)
ABSENT = Machine.describe("900GiB").device

# Simonyan and Zisserman (2015), table 1, column D.
VGG16 = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG16:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
    head = [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True)]
    head += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, *head)


class Images:
    """As many random images as asked for, made when they are asked for."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3, 224, 224), index % 1000


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def kinds(task: ab.Task, micro_batch: int, device: Device = ABSENT) -> dict[str, int]:
    choice = Choice(micro_batch=micro_batch, evaluation_batch=1)
    return footprint(subject_of(task), choice, device).peak.by_kind


def test_vgg16_has_the_parameters_that_its_table_gives():
    task = ab.Task(
        model=vgg16, loss=classify, optimizer=sgd, train=Images(64), global_batch=64, steps=1
    )
    subject = subject_of(task)
    assert subject.identity.parameters == 138_357_544

    found = kinds(task, 64)
    assert found["parameters"] == 138_357_544 * 4


def test_logits_of_a_large_vocabulary_take_what_their_shape_says():
    vocabulary, length, batch = 40_000, 250, 32
    logits = vocabulary * length * batch * 4
    assert logits == 1_280_000_000

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    task = ab.Task(
        model=lambda: nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)),
        loss=loss,
        optimizer=sgd,
        train=[torch.zeros(length, dtype=torch.int64)] * 2,
        collate=torch.stack,
        global_batch=batch,
        steps=1,
    )
    choice = Choice(micro_batch=batch, evaluation_batch=1)
    peak = footprint(subject_of(task), choice, BIG_CPU).peak.num_bytes
    # Logits, their log-softmax and its gradient, or the gradient of the logits: three at once.
    assert 2.9 * logits < peak < 3.1 * logits
    halved = choice.model_copy(update={"micro_batch": batch // 2})
    half = footprint(subject_of(task), halved, BIG_CPU).peak.num_bytes
    assert 0.49 < half / peak < 0.52


def test_each_kind_of_an_mlp_is_counted_to_the_byte():
    task = ab.Task(
        model=lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 16)),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=adam,
        train=torch.zeros(64, 256),
        collate=torch.stack,
        global_batch=4096,
        steps=1,
    )
    numbers = 256 * 512 + 512 + 512 * 16 + 16
    found = kinds(task, 2048, CPU)
    assert found["parameters"] == 4 * numbers
    assert found["gradients"] == 4 * numbers
    assert found["optimizer state"] in range(8 * numbers, 8 * numbers + 64)  # and four counters


def test_bytes_of_tensors_grow_in_a_straight_line_with_the_micro_batch():
    task = ab.Task(
        model=lambda: nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 16)),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=sgd,
        train=torch.zeros(64, 256),
        collate=torch.stack,
        global_batch=4096,
        steps=1,
    )
    subject = subject_of(task)
    peaks = [
        footprint(subject, Choice(micro_batch=n, evaluation_batch=1), CPU).peak.totals["allocated"]
        for n in (512, 1024, 2048)
    ]
    assert abs((peaks[2] - peaks[1]) - 2 * (peaks[1] - peaks[0])) < 0.02 * peaks[2]


def evaluated_subject() -> Subject:
    """Ten layers of width 64, with held-out data."""
    task = ab.Task(
        model=lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(10)]),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=sgd,
        train=torch.zeros(64, 64),
        valid=torch.zeros(64, 64),
        collate=torch.stack,
        global_batch=4096,
        steps=1,
    )
    return subject_of(task)


def test_evaluation_needs_less_than_training():
    subject = evaluated_subject()
    choice = Choice(micro_batch=4096, evaluation_batch=4096)
    training = footprint(subject, choice, CPU).peak.num_bytes
    assert evaluation_peak(subject, choice, CPU).num_bytes < 0.5 * training


def test_a_storage_lives_until_the_last_tensor_on_it_is_gone():
    with tracing(CudaKernels()) as (tracer, _):
        one = torch.empty(1000)
        view = one[10:]
        del one
        moment = tracer.timeline.num_moments
        sizes = [block.num_bytes for block in alive(tracer.timeline, moment)]
        assert sizes == [4000]
        view.add_(1)
        del view
        torch.empty(3)
    assert [b.num_bytes for b in alive(tracer.timeline, tracer.timeline.num_moments)] == [12]
    assert len(tracer.timeline.blocks) == 2
