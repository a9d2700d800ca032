"""Finds why pieces and whole differ, by removing one possible cause at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from anybatch.compute.loss_reduction_check import compares_samples
from anybatch.data import differs
from anybatch.errors import DataError, some
from anybatch.proof.runs import Runs, deviation, number_of
from anybatch.task import JointLoss, Loss, LossFunction

_ALIKE_IN_FLOAT32 = 1e-5  # relative tolerance of a loss
_SAME_IN_FLOAT32 = 1e-6  # the same for a loss computed from float64 values: some models use float32
_SAME = 1e-12  # relative tolerance of gradients that differ only by the order of additions
_TINY = 1e-12  # lower bound of the loss that a tolerance is relative to

_FACTOR = 2.0**10  # of a loss; as a power of two it changes no digit of a proportional gradient


def causes_of(runs: Runs, tolerance: float) -> Iterator[str]:
    """Yield a sentence for each cause whose removal eliminates the deviation or most of it. Random
    draws are held fixed."""
    norms = [name for name, m in runs.model.named_modules() if _looks_across(m)]
    if fault := _is_no_number(runs, norms):
        yield fault
        return
    if elsewhere := runs.drawn_elsewhere():
        yield (
            f"The model or the loss draws random numbers from {' and '.join(elsewhere)}, where they"
            " cannot be held still for a comparison: draw by torch's own generator (torch.rand, say),"
            " or replace them by fixed ones to see whether the rest is exact."
        )
        return
    if draws(runs, still=True):
        yield (
            "The model draws random numbers that cannot be held still for a comparison: orders or"
            " whole numbers (torch.randperm, torch.randint), or such that torch does not draw. Replace"
            " them by fixed ones to see whether the rest is exact."
        )
        return
    found = False
    if norms and runs.deviation_when(norms) < runs.deviation_when(()) / 10:
        found = True
        yield (
            f"{some(norms)} look{'s' if len(norms) == 1 else ''} across the samples of a pass, so"
            " the result depends on the micro-batch: use anybatch's ghost batches (plain"
            " torch BatchNorm), GroupNorm or LayerNorm."
        )
    named = runs.model.named_modules()
    if frequent := [name for name, m in named if getattr(m, "scale_grad_by_freq", False)]:
        found = True
        yield (
            f"{some(frequent)} divide{'s' if len(frequent) == 1 else ''} gradients by how often an id"
            " comes up in a pass (scale_grad_by_freq), which the cut changes: leave it out."
        )
    if (kept := _kept_state(runs, tolerance, norms)) is not None:
        found = True
        yield (
            "The same samples give another loss when they pass a second time, and nothing was trained"
            " in between: a layer (or the loss) keeps something from one pass to the next"
            + (f" ({some(kept)})" if kept else ", a counter or a running mean, say")
            + ", so the result depends on the number of passes. Let it change once per step, or not at"
            " all in training."
        )
    parts, twice = runs.parts(norms, max(tolerance, _SAME_IN_FLOAT32))
    if fault := parts.fault(twice):
        found = True
        yield f"{fault[:1].upper()}{fault[1:]}"
    if found:
        return
    if _compares_samples(runs):
        yield (
            "The loss tells the samples of a pass from one another (as contrastive losses do): return"
            " anybatch.JointLoss(encode, compare), with what is computed of each sample in encode, and"
            " what compares them in compare."
        )
    elif not _is_proportional(runs):
        yield (
            "The gradient is not proportional to the loss: in backward an autograd function or a hook"
            " adds something to it (an auxiliary loss that is attached), clamps or normalises it, and"
            " does so once per pass, to a gradient of the sum. Return an auxiliary loss as a part of"
            " the whole: anybatch.Loss(sum + auxiliary * weight, weight); clip_norm clips the mean."
        )
    elif _is_of_collate(runs):
        yield (
            "collate computes with the samples of a batch together (it subtracts their mean, say), and"
            " a task collates each micro-batch by itself: compute it from the whole data set before."
        )
    elif _fault_is_of_padding(runs, tolerance):
        yield (
            "What collate makes of a sample depends on the others beside it, and the result on"
            " that: padding that the model or the loss does not mask, most likely. Mask it in"
            " attention, in means over positions and in the loss."
        )
    elif isinstance(runs.task.loss, JointLoss):
        yield (
            "encode does something else with a sample when others are beside it (statistics over dim 0,"
            " say), or compare draws at random: move the first into compare, which sees all samples at"
            " once, and the second into encode."
        )
    elif not parts.adds_up:
        yield f"The loss {parts.doubt(twice)}"
    else:
        yield (
            "The cause is not among the known ones (norms across the batch, a mean of means, state that"
            " is kept): look for a loss or a layer that mixes samples of one pass, such as"
            " contrastive losses or statistics over dim 0. A loss that has to see the whole batch at"
            " once is exact as anybatch.JointLoss(encode, compare); a layer, where a micro-batch is the"
            " whole global batch (micro_batch=, with recompute='all' for room)."
        )


def draws(runs: Runs, *, still: bool = False) -> bool:
    """Whether the model or the loss draws random numbers; `still`: ones that cannot be held fixed."""
    first = runs.gradient(runs.whole, seed=1, still=still)
    return deviation(first, runs.gradient(runs.whole, seed=2, still=still)) > _SAME


def _is_no_number(runs: Runs, norms: Sequence[str]) -> str | None:
    """Describe a loss or gradient that is not finite, and name the first sample with such a loss."""
    loss = number_of(runs.returned(runs.whole, norms)[0])
    if math.isfinite(loss):
        if all(gradient.isfinite().all() for gradient in runs.gradient(runs.whole, still=True)):
            return None
        return (
            f"The gradient is no number, though the loss is one ({loss:.3g}): look for a square root, a"
            " norm or a power at zero, or a division that torch.where hides from the result only."
        )
    alone = runs.returned([1] * runs.sample.size, norms)
    numbers = [number_of(value) for value in alone]
    bad = next((i for i, number in enumerate(numbers) if not math.isfinite(number)), None)
    if bad is None:
        return (
            f"The loss of all {runs.sample.size} samples is {loss}, and of none of them by itself."
        )
    return (
        f"The loss is {loss}. Of the samples, sample {int(runs.sample.order[bad])} of the training data"
        f" is the first whose loss by itself is no number ({numbers[bad]}): look there for missing"
        " values, a division by zero, or the logarithm of zero."
    )


def _kept_state(runs: Runs, tolerance: float, norms: Sequence[str]) -> Sequence[str] | None:
    """Return the names of state that a pass leaves for the next one, as far as modules show it. None if
    the loss of a second pass is the same."""
    first, again, kept = runs.twice(norms)
    near = max(tolerance, _ALIKE_IN_FLOAT32) * max(abs(first), _TINY)
    return kept if abs(first - again) > near else None


def _compares_samples(runs: Runs) -> bool:
    """Whether the loss scores the samples of a pass against one another."""
    loss, found = runs.task.loss, False
    if isinstance(loss, JointLoss):
        return False

    def looked_at(model: nn.Module, batch: object) -> Any:
        nonlocal found
        returned = loss(model, batch)
        found |= compares_samples(returned, runs.sample.size)
        return returned

    runs.gradient(runs.whole, still=True, loss=wraps(loss)(looked_at))
    return found


def _is_proportional(runs: Runs) -> bool:
    """Whether the gradient scales in proportion to the loss."""
    if isinstance(runs.task.loss, JointLoss):
        return True
    once = runs.gradient(runs.whole, still=True)
    larger = runs.gradient(
        runs.whole, still=True, loss=wraps(runs.task.loss)(partial(_larger, runs.task.loss))
    )
    return deviation([gradient / _FACTOR for gradient in larger], once) <= _ALIKE_IN_FLOAT32


def _larger(loss: LossFunction, model: nn.Module, batch: object) -> Loss | Tensor:
    returned = loss(model, batch)
    if isinstance(returned, Tensor):
        return returned * _FACTOR
    whole = returned if isinstance(returned, Loss) else Loss(*returned)
    return Loss(whole.sum * _FACTOR, whole.weight)


def _is_of_collate(runs: Runs) -> bool:
    """Whether samples that are collated separately differ in values, not only in padding."""
    size = runs.pieces[0]
    with suppress(DataError):
        cut = replace(runs.sample, once=True).cut([size], runs.dtype)
        return differs(next(cut), next(runs.sample.cut([size], runs.dtype)))
    return False


def _fault_is_of_padding(runs: Runs, tolerance: float) -> bool:
    """Whether pieces that are sliced from the whole batch agree with it, unlike those that are collated
    separately."""
    once = replace(runs, sample=replace(runs.sample, once=True))
    with suppress(DataError):  # a batch whose samples are not known cannot be sliced
        return once.deviation_when(()) <= tolerance
    return False


def _looks_across(module: nn.Module) -> bool:
    """Whether `module` is a norm with running statistics, torch's or (judged by its buffers)
    another."""
    return hasattr(module, "running_mean") and next(module.children(), None) is None
