"""Verdict: whether pieces and whole agree, and what there is to say of it."""

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
from anybatch.errors import InputError
from anybatch.estimate import identify
from anybatch.plans import Plan
from anybatch.proof.causes import causes_of, draws
from anybatch.proof.runs import Runs, deviation
from anybatch.proof.sample import sample_of
from anybatch.task import Task, check_task, parameters_in

DEFAULT_SAMPLES = 96

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative deviation that rounding explains, by the dtype the proof could be run in."""

_LARGEST = 0.4  # of the sample: there are three pieces then, and one is half as large


@dataclass(frozen=True)
class Verdict:
    """What a proof found.

    Attributes:
        exact: the pieces compute the gradient of the whole, up to rounding.
        draws: the model draws random numbers in training, anew for each micro-batch. They are held
            still for what else is found here, since each draw is as good as another.
        deviation: 2-norm of the difference over 2-norm of the gradient of the whole.
        tolerance: deviation up to which rounding explains it.
        groups: the same by group of parameters: the parts of the model that hold them.
        causes: sentences, one for each cause found.
        notes: sentences on what belongs to the task and is exact.
        num_samples, pieces: what was run, and how it was cut.
        dtype: in which it was run.
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
    """Run a sample of the training data of `task` in one piece and in the pieces of `plan`.

    Args:
        task: what is trained. Its model is copied, not changed.
        plan: how. The pieces are of its micro-batch, or smaller where the sample would fit in one; the
            last one is always smaller than the others.
        samples: how many to run at most; None: 96. Some are left out where pieces would be equal.

    Raises:
        InputError: the sample is too small to be cut, or the task cannot be run.
    """
    check_task(task)
    with Borrowed():  # what passes draw from the default generators is drawn from nobody else
        return _verdict(task, plan, samples)


def _verdict(task: Task, plan: Plan, samples: int | None) -> Verdict:
    """See `verify`."""
    runs = _runs_of(task, plan, DEFAULT_SAMPLES if samples is None else samples)
    tolerance, choice = TOLERANCES[runs.dtype], plan.choice
    whole = runs.gradient(runs.whole)
    # Another seed: with the same one, a single dropout layer might draw what it drew for the whole.
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
    """What is run to prove `plan`, on at most `wanted` samples."""
    if wanted < 2:
        raise InputError(f"samples is {wanted}: a proof cuts the sample, so give at least 2.")
    given = task.build_model()
    model = carry_hooks(given, copy_of(given).cpu())
    plan.check_fits(identify(task, model))
    sample, ghost = sample_of(task, wanted), plan.task.ghost_batch
    pieces = _cut(sample.size, plan.choice.micro_batch, ghost)
    sample = sample.largest_first(sum(pieces))
    if not ghost and 0 < sample.num_smallest < pieces[-1]:
        pieces = (*pieces[:-1], pieces[-1] - sample.num_smallest, sample.num_smallest)
    runs = Runs(task, model, sample, pieces, ghost, torch.float64)
    try:
        runs.gradient(runs.whole)
    except RuntimeError:  # a dtype written into the model or the loss
        return replace(runs, dtype=torch.float32)
    return runs


def _cut(num_samples: int, micro_batch: int, ghost: int | None) -> tuple[int, ...]:
    """Sizes of the pieces of a sample, of at most `num_samples` in all: of `micro_batch`, or less, so
    that there are at least three. The last one is smaller, since a mean over anything at all is the
    mean of its means over equal pieces."""
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
    """Deviation by the part of the model that holds a parameter: its block, or its first name."""
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
