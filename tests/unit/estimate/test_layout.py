"""The layout of images in a trace is that of the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.estimate import convolutions_of, footprint, subject_of
from anybatch.estimate.layout import layout_on
from anybatch.estimate.seconds_work import Counting
from anybatch.machine import Device, Machine
from anybatch.plans import Choice, KernelChoices

CPU = Machine.here(device="cpu").device
ABSENT = Machine.describe("24GiB").device
BATCH, SIDE = 64, 64
IMAGES = BATCH * 3 * SIDE * SIDE * 4
CHOICE = Choice(micro_batch=BATCH, evaluation_batch=1)


def build() -> nn.Module:
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1))


class Picky(nn.Module):
    """Cannot be run on images whose channels lie last."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).view(len(x), -1)


def task(model: Any = build) -> ab.Task:
    return ab.Task(
        model=model,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(torch.zeros(BATCH, 3, SIDE, SIDE)),
        global_batch=BATCH,
        steps=1,
    )


def allocated(device: Device, model: Any = build) -> int:
    return footprint(subject_of(task(model)), CHOICE, device).peak.totals["allocated"]


def test_images_that_the_device_lays_out_anew_are_saved_beside_the_batch(
    monkeypatch: pytest.MonkeyPatch,
):
    turned = allocated(ABSENT)
    monkeypatch.setattr("anybatch.estimate.stage.layout_on", lambda *_: KernelChoices())
    copied = turned - allocated(ABSENT)
    assert copied > 0.5 * IMAGES


def test_the_copy_takes_time():
    def names(device: Device) -> list[str]:
        work = Counting(subject_of(task()), CHOICE, device).at(CHOICE.micro_batch)
        return [operation.name for operation in work.operations]

    assert names(ABSENT).count("clone") == 1
    assert "clone" not in names(CPU)


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 1))


@pytest.mark.parametrize(
    ("model", "device", "last"),
    [(build, ABSENT, True), (build, CPU, False), (Picky, ABSENT, False), (flat, ABSENT, False)],
)
def test_channels_lie_last_where_they_do_in_a_run(model: Any, device: Device, last: bool):
    assert layout_on(device, subject_of(task(model))).channels_last == last


def test_it_is_found_once():
    subject = subject_of(task(Picky))
    first = convolutions_of(subject)
    assert first.number == 1
    assert "view" in first.refused
    assert convolutions_of(subject) is first


def of_one_number(model: nn.Module, batch: Any) -> Tensor:
    result = model(batch[0])
    return result.square().mean() * (2.0 if result.sum().item() > 0 else 1.0)


def of_a_mask(model: nn.Module, batch: Any) -> Tensor:
    result = model(batch[0])
    return result[result > 0].square().sum()


def of_a_gradient(model: nn.Module, batch: Any) -> Tensor:
    images = batch[0].detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(images).sum(), images, create_graph=True)
    return slope.square().mean()


@pytest.mark.parametrize("loss", [of_one_number, of_a_mask, of_a_gradient])
def test_a_loss_that_reads_numbers_or_gradients_does_not_keep_channels_from_lying_last(loss: Any):
    found = convolutions_of(subject_of(replace(task(), loss=loss)))
    assert found == (2, "")
    picky = convolutions_of(subject_of(replace(task(Picky), loss=loss)))
    assert "view" in picky.refused
