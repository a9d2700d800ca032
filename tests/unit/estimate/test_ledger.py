"""Where each byte goes, against numbers that are known from elsewhere."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.estimate import Ledger, ledger, subject_of
from anybatch.estimate.family import Family
from anybatch.estimate.footprint import trace_step
from anybatch.estimate.sharding import Division, Parts
from anybatch.estimate.workspaces import communicator_bytes
from anybatch.machine import Device, Machine
from anybatch.plans import Choice, Recompute

CPU = Machine.here("64MiB", device="cpu").device
ABSENT = Machine.describe("900GiB").device

# Simonyan and Zisserman (2015), table 1, column D.
VGG16 = ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for widths in VGG16:
        for width in widths:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True)]
    head += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, *head)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def account(
    model: Any,
    sample: Tensor,
    loss: Any,
    batch: int,
    device: Device = ABSENT,
    optimizer: Any = sgd,
    **choice: Any,
) -> Ledger:
    task = ab.Task(
        model=model,
        loss=loss,
        optimizer=optimizer,
        train=[sample] * 2,
        collate=torch.stack,
        global_batch=batch,
        steps=1,
    )
    chosen = Choice(micro_batch=batch, evaluation_batch=1, **choice)
    return ledger(subject_of(task), chosen, device)


def test_vgg16_by_layer():
    def loss(model: nn.Module, images: Tensor) -> Tensor:
        return model(images).logsumexp(1).mean()

    found = account(vgg16, torch.zeros(3, 224, 224), loss, 2)
    assert found.num_parameters == 138_357_544
    side, numbers = 224, 0
    for widths in VGG16:
        numbers += sum(widths) * side**2 + widths[-1] * (side // 2) ** 2
        side //= 2
    # What is printed counts each output of a convolution or pooling once: 15,077,888 numbers per image.
    # With the image and the head that is the sum of the rows of the well-known table in the notes of
    # CS231n, 15.2 M numbers or 61 MB. The total under that table (24 M, 93 MB) is not their sum, nor
    # that of any way to count: with ReLU's outputs, where it is not done in place, it is 28.6 M.
    assert numbers == 15_077_888
    assert 3 * 224**2 + numbers + 4096 + 4096 + 1000 == 15_237_608
    shapes = {
        row.name: row.output_shape
        for row in found.layers
        if row.type_name in ("Conv2d", "MaxPool2d")
    }
    assert len(shapes) == 13 + 5
    assert sum(math.prod(shape or ()) for shape in shapes.values()) == 2 * numbers
    # Kept for backward: each of them once, and where the largest of each pooling stood (int64).
    pooled = sum(
        math.prod(row.output_shape or ()) for row in found.layers if row.type_name == "MaxPool2d"
    )
    kept = sum(row.activation_bytes for row in found.layers if row.name in shapes)
    # The channels lie last: the images are copied into that, and the last pooling's result out of it,
    # whose copy is kept instead.
    copied = 3 * 224**2 - 512 * 7**2
    assert kept == 4 * 2 * (numbers + copied) + 8 * pooled


class Feed(nn.Module):
    """The feed-forward part of a transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x_bsh: Tensor) -> Tensor:
        return self.feed(x_bsh).sum()


def feed(recompute: Recompute) -> Ledger:
    return account(
        lambda: Feed(H),
        torch.zeros(S, H),
        lambda model, batch: model(batch),
        B,
        precision="bf16-pure",
        recompute=recompute,
    )


B, S, H = 8, 64, 128


def test_a_feed_forward_part_keeps_19_bytes_per_number():
    # Korthikanti et al. (2022), "Reducing Activation Recomputation in Large Transformer Models",
    # section 4.1: input 2, input of GELU 8, input of the second layer 8, mask of dropout 1.
    assert feed(Recompute()).activation_bytes == 19 * B * S * H


def test_a_feed_forward_part_that_is_recomputed_keeps_its_input():
    assert feed(Recompute(blocks=("feed",))).activation_bytes == 2 * B * S * H


def test_logits_and_their_gradient_are_told():
    vocabulary, length, batch = 40_000, 250, 32
    logits = 1_280_000_000

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    found = account(
        lambda: nn.Sequential(nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)),
        torch.zeros(length, dtype=torch.int64),
        loss,
        batch,
    )
    assert vocabulary * length * batch * 4 == logits
    assert found.peak.phase == "backward"
    # The softmax, its gradient and that of the logits; the logits themselves are gone by then.
    assert 3 * logits <= found.by_kind["loss and logits"] < 3.01 * logits
    assert "temporary" not in found.by_kind
    assert found.peak.module == "the loss"


def test_kinds_add_up_to_the_peak_and_the_curve_reaches_it():
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    found = account(
        lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 16)),
        torch.zeros(256),
        loss,
        1024,
        CPU,
        adam,
    )
    assert sum(found.by_kind.values()) == found.num_bytes
    assert max(moment.num_bytes for moment in found.curve) == found.num_bytes
    assert max(moment.used_bytes for moment in found.curve) == found.peak.used_bytes
    assert found.peak.used_bytes == found.num_bytes
    phases = [phase for phase, _ in groupby(found.curve, key=lambda moment: moment.phase)]
    assert phases == ["input", "forward", "loss", "backward", "update"]
    assert {row.name: row.num_parameters for row in found.layers} == {
        "0": 256 * 512 + 512,
        "1": 0,
        "2": 512 * 16 + 16,
    }
    for row in found.layers:
        assert row.gradient_bytes == row.parameter_bytes == 4 * row.num_parameters
        assert 0 <= row.optimizer_bytes - 8 * row.num_parameters <= 8  # two counters of steps
    assert found.layers[1].activation_bytes == 1024 * 512 * 4
    assert json.loads(json.dumps(found.to_dict()))["micro_batch"] == 1024


def steps(loss: Any) -> tuple[Family, Any, list[int]]:
    """Traces of a task with `loss`, a function that traces it, and the sizes that were traced."""
    task = ab.Task(
        model=lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)),
        loss=loss,
        optimizer=sgd,
        train=[torch.zeros(32)] * 2,
        collate=torch.stack,
        global_batch=4096,
        steps=1,
    )
    subject = subject_of(task)

    traced: list[int] = []

    def trace(size: int) -> Any:
        return trace_step(subject, Choice(micro_batch=size, evaluation_batch=1), CPU)

    def noted(size: int) -> Any:
        traced.append(size)
        return trace(size)

    return Family(noted), trace, traced


def test_traces_that_grow_in_a_straight_line_follow_by_arithmetic():
    family, trace, traced = steps(lambda model, batch: model(batch).square().mean())
    for size in (8, 16, 64, 200, 1000):
        found = [block.num_bytes for block in family.at(size).timeline.blocks]
        assert found == [block.num_bytes for block in trace(size).timeline.blocks]
    assert len(traced) == 3


def test_a_loss_over_pairs_of_samples_is_traced_every_time():
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        return (out @ out.T).square().mean()

    family, trace, traced = steps(loss)
    for size in (8, 16, 64, 200):
        found = [block.num_bytes for block in family.at(size).timeline.blocks]
        assert found == [block.num_bytes for block in trace(size).timeline.blocks]
    assert len(traced) == 4


def halved(recompute: Recompute) -> Ledger:
    """Four blocks and a head, under autocast."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).float().square().mean()

    return account(
        lambda: nn.Sequential(
            *[nn.Sequential(nn.Linear(H, H), nn.ReLU()) for _ in range(4)], nn.Linear(H, H)
        ),
        torch.zeros(H),
        loss,
        B,
        precision="bf16",
        recompute=recompute,
    )


def most_casts(found: Ledger, phase: str) -> int:
    kind = "weights in half precision"
    return max(moment.by_kind.get(kind, 0) for moment in found.curve if moment.phase == phase)


def test_copies_of_weights_that_are_made_again_do_not_stay_until_forward_ends():
    one = 2 * (H * H + H)  # a weight and its bias
    assert most_casts(halved(Recompute()), "forward") == 5 * one
    found = halved(Recompute(blocks=("0", "1", "2", "3")))
    assert most_casts(found, "forward") == one
    assert most_casts(found, "backward") <= 2 * one
    assert most_casts(halved(Recompute(blocks=("0", "1"))), "forward") == 3 * one


def of_one_of_four(**changes: Any) -> Ledger:
    task = ab.Task(
        model=lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 16)),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=adam,
        train=[torch.zeros(256)] * 2,
        collate=torch.stack,
        global_batch=64,
        steps=1,
    )
    subject = replace(subject_of(task), **changes)
    return ledger(subject, Choice(micro_batch=64, evaluation_batch=1), ABSENT)


def test_gradients_in_buckets_are_those_of_their_layers():
    found = of_one_of_four(flat=True)
    for row in found.layers:
        assert row.gradient_bytes == row.parameter_bytes == 4 * row.num_parameters
    padded = found.by_kind["gradients"] - sum(row.gradient_bytes for row in found.layers)
    assert 0 <= padded < 4 * 512
    buckets = [one for one in found.held if one.kind == "gradients"]
    assert [one.module for one in buckets] == ["all layers, in buckets"]


def test_a_model_that_is_divided_is_told_as_one_rank_has_it():
    whole = of_one_of_four()
    numbers = whole.num_parameters
    parts = Parts(4 * numbers, ())
    part = of_one_of_four(division=Division(parts, 4, by_gloo=False))
    for row, other in zip(part.layers, whole.layers, strict=True):
        assert row.parameter_bytes == -(-other.parameter_bytes // 4)
        assert row.optimizer_bytes == -(-other.optimizer_bytes // 4)
        assert row.activation_bytes == other.activation_bytes
    assert part.by_kind["parameters"] == part.by_kind["gradients"] == numbers
    assert part.by_kind["optimizer state"] == -(-whole.by_kind["optimizer state"] // 4)
    assert part.num_bytes == sum(part.by_kind.values())
    outside = communicator_bytes(ABSENT) + part.by_kind["device context"]
    assert part.num_bytes == part.totals["reserved"] + outside
    gathered = "gathered weights and gradients"
    phases = {moment.phase for moment in part.curve if gathered in moment.by_kind}
    assert phases == {"forward", "loss", "backward"}
