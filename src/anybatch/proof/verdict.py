"""Verdict: whether pieces and whole agree, and the causes if they do not."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anybatch.compute.building import carry_hooks, copy_of
from anybatch.data import micro_batches
from anybatch.data.generators import Borrowed
from anybatch.errors import InputError, as_setting, setting
from anybatch.estimate import identify
from anybatch.plans import Plan
from anybatch.proof.causes import causes_of, draws
from anybatch.proof.runs import Runs, deviation
from anybatch.proof.sample import sample_of
from anybatch.task import Task, check_task, parameters_in

DEFAULT_SAMPLES = 96

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative deviation that rounding explains, by the dtype of the proof."""

_LARGEST = 0.4  # share of the sample: gives three pieces, one of them half as large


@dataclass(frozen=True)
class Verdict:
    """The result of a proof.

    Attributes:
        exact: whether the pieces compute the gradient of the whole, up to rounding.
        draws: whether the model draws random numbers in training, for each micro-batch separately. They
            are held fixed for all other results, since any draw is as good as another.
        deviation: 2-norm of the difference, divided by the 2-norm of the gradient of the whole.
        tolerance: largest deviation that rounding explains.
        groups: deviation by group of parameters: the parts of the model that contain them.
        causes: one sentence for each cause found.
        notes: sentences about properties of the task that are not errors.
        num_samples, pieces: the number of samples, and the sizes of the pieces.
        dtype: dtype of the computation.
    """

    exact: bool
    draws: bool
    deviation: float
    tolerance: float
    groups: Mapping[str, float]
    causes: tuple[str, ...]
    notes: tuple[str, ...]
    num_samples: int
    pieces: tuple[int, ...]
    dtype: str


def verify(task: Task, plan: Plan, *, samples: int | None = None) -> Verdict:
    """Check on a sample of the training data that `plan` computes the gradient of the whole batch.

    The sample is run in one piece and in the pieces of `plan`, and the two gradients are compared.

    Args:
        task: the task to train. Its model is copied and not changed.
        plan: the plan to check. Pieces have the size of its micro-batch, or are smaller if the sample
            would fit into one; the last piece is always smaller than the others.
        samples: maximum number of samples; None: 96, or as many as make three pieces of whole ghost
            batches. Some are left out if pieces would be equal.

    Raises:
        InputError: the sample is too small to be split (it must have more samples than a ghost batch),
            or the task cannot be run.
    """
    check_task(task)
    with Borrowed():  # restores the default generators that passes draw from
        return _verdict(task, plan, samples)


def _verdict(task: Task, plan: Plan, samples: int | None) -> Verdict:
    """See `verify`."""
    least = 2 * (plan.task.ghost_batch or 1) + 1  # three pieces, the last one smaller
    runs = _runs_of(task, plan, max(DEFAULT_SAMPLES, least) if samples is None else samples)
    tolerance, choice = TOLERANCES[runs.dtype], plan.choice
    whole = runs.gradient(runs.whole)
    # Another seed: with the same one, a single dropout layer might draw the same as for the whole.
    parts = runs.gradient(runs.pieces, choice, seed=1)
    found = deviation(parts, whole)
    drawn = not found <= tolerance and draws(runs)
    if drawn:
        whole = runs.gradient(runs.whole, still=True)
        parts = runs.gradient(runs.pieces, choice, still=True)
        found = deviation(parts, whole)
    exact = found <= tolerance
    return Verdict(
        exact=exact,
        draws=drawn,
        deviation=found,
        tolerance=tolerance,
        groups=_by_group(runs, parts, whole),
        causes=() if exact else tuple(causes_of(runs, tolerance)),
        notes=tuple(_notes(runs, whole, drawn)),
        num_samples=runs.sample.size,
        pieces=runs.pieces,
        dtype=str(runs.dtype).removeprefix("torch."),
    )


def _runs_of(task: Task, plan: Plan, wanted: int) -> Runs:
    if wanted < 2:
        raise InputError(
            f"{setting('samples')} is {wanted}: a proof cuts the sample, so give at least 2."
        )
    given = task.build_model()
    model = carry_hooks(given, copy_of(given).cpu())
    plan.check_fits(identify(task, model))
    sample, ghost = sample_of(task, wanted), plan.task.ghost_batch
    pieces = _cut(sample.size, plan.choice.micro_batch, ghost)
    if len(pieces) < 2:
        raise InputError(
            f"the sample has {sample.size} samples, which BatchNorm normalises together as one ghost"
            f" batch of up to {ghost}, so there is nothing to cut and nothing to compare: give"
            f" {as_setting('samples')} above {ghost}, and more data if there is no more."
        )
    sample = sample.largest_first(sum(pieces))
    if not ghost and 0 < sample.num_smallest < pieces[-1]:
        pieces = (*pieces[:-1], pieces[-1] - sample.num_smallest, sample.num_smallest)
    runs = Runs(task, model, sample, pieces, ghost, torch.float64)
    try:
        runs.gradient(runs.whole)
    except RuntimeError:  # a dtype is hard-coded in the model or the loss
        return replace(runs, dtype=torch.float32)
    return runs


def _cut(num_samples: int, micro_batch: int, ghost: int | None) -> tuple[int, ...]:
    """Return the sizes of the pieces of a sample, at most `num_samples` in total. Pieces have
    `micro_batch` samples, or fewer so that there are at least three. The last one is smaller, since
    with equal pieces a wrongly weighted mean could agree with that of the whole."""
    unit = min(ghost or 1, num_samples)
    size = max(unit, min(micro_batch, math.ceil(_LARGEST * num_samples)) // unit * unit)
    rest = num_samples % size or num_samples == size
    num = num_samples if rest else num_samples - size // 2
    return tuple(len(part) for part in micro_batches(range(num), size, ghost, num))


def _notes(runs: Runs, whole: Sequence[Tensor], drawn: bool) -> Iterator[str]:
    if drawn:
        yield (
            "The model draws random numbers in training (dropout, say), anew for each micro-batch. Each"
            " draw is as good as another, so this is no error; here all draws are held still."
        )
    if runs.ghost:
        plain = runs.gradient(runs.whole, ghosts_kept=False, still=drawn)
        yield (
            f"BatchNorm normalises over ghost batches of {runs.ghost} samples. That belongs to"
            f" the task: every plan computes the same, and normalising over all {runs.sample.size}"
            f" samples at once would be {deviation(whole, plain):.1%} away."
        )


def _by_group(runs: Runs, parts: Sequence[Tensor], whole: Sequence[Tensor]) -> dict[str, float]:
    """Return the deviation by part of the model: the block or top-level module of each parameter."""
    model = copy_of(runs.model)
    wanted = list(parameters_in(runs.task.parameters_of(model)))
    names = {id(p): name for name, p in model.named_parameters()}
    members: dict[str, list[int]] = defaultdict(list)
    for i, param in enumerate(wanted):
        members[_group_of(names.get(id(param), "?"))].append(i)
    return {
        group: deviation([parts[i] for i in ids], [whole[i] for i in ids])
        for group, ids in members.items()
    }


def _group_of(name: str) -> str:
    """`h.3.attn.weight` to `h.3`, `head.weight` to `head`."""
    pieces = name.split(".")[:-1] or [name]
    depth = 2 if len(pieces) > 1 and pieces[1].isdigit() else 1
    return ".".join(pieces[:depth])
