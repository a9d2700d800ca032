"""What a run measures of the noise in its gradients, computed by hand, one part after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from tests.equivalence.reference import samples_of
from torch.utils.data import default_collate

import anybatch as ab
from anybatch.compute.loss import read_loss
from anybatch.data import micro_batches, share, steps_of
from anybatch.events import StepDone


def standing(task: ab.Task) -> ab.Task:
    """`task` with a learning rate of zero: every step is of the weights that training begins with."""
    still = partial(torch.optim.SGD, lr=0.0)
    return dataclasses.replace(task, optimizer=still, scheduler=None, schedule=None)


def by_hand(
    task: ab.Task, step: int, micro_batch: int, shares: Sequence[float] = (1.0,)
) -> tuple[float | None, ...]:
    """(weight, norm of the gradient) of global step `step`, and of the part that first micro-batches
    are: the mean of their weights, and of their squared gradients by weight."""
    model = task.build_model()
    indices = samples_of(task, steps_of(task), step)
    parts = [share(len(indices), shares, rank) for rank in range(len(shares))]
    firsts = [micro_batches(part, micro_batch, None, len(indices))[0] for part in parts if part]
    pieces = [_sums(task, model, [indices[i] for i in one]) for one in firsts]
    pieces = [(weight, square) for weight, square in pieces if weight]
    weight, square = _sums(task, model, indices)
    whole = weight, math.sqrt(square) / weight
    if not pieces:  # none of the first samples weighs anything
        return *whole, None, None
    heavy = sum(w for w, _ in pieces)
    part = sum(s / w for w, s in pieces) / heavy
    return *whole, heavy / len(pieces), math.sqrt(part)


def same(done: StepDone | ab.Outcome, wanted: tuple[float | None, ...], rel: float) -> bool:
    """Whether `done` has these figures."""
    found = done.weight, done.grad_norm, done.part_weight, done.part_grad_norm
    return all(
        one is other is None or one == pytest.approx(other, rel=rel)
        for one, other in zip(found, wanted, strict=True)
    )


def _sums(task: ab.Task, model: torch.nn.Module, indices: Sequence[int]) -> tuple[float, float]:
    """Of these samples the weight, and the squared norm of their summed gradient."""
    model.zero_grad()
    batch = (task.collate or default_collate)([task.train[i] for i in indices])
    found = read_loss(task.loss(model, batch), lambda: len(indices))
    found.sum.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(found.weight), sum(float(g.double().square().sum()) for g in gradients)
