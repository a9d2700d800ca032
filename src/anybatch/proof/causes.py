"""Finds why pieces and whole differ, by removing one possible cause at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.compute.building import copy_of
from anybatch.compute.loss_reduction_check import compares_samples
from anybatch.data import differs
from anybatch.errors import DataError
from anybatch.proof.runs import Runs, deviation, number_of
from anybatch.task import JointLoss, Loss, LossFunction

_ALIKE_IN_FLOAT32 = 1e-5  # relative tolerance of a loss
_IGNORED = -100  # label of ignored tokens, as in torch

_SAME = 1e-12  # relative tolerance of gradients that differ only by the order of additions
_TINY = 1e-12  # lower bound of the loss that a tolerance is relative to

_FACTOR = 2.0**10  # of a loss; as a power of two it changes no digit of a proportional gradient

_BLOCKS = 8  # number of blocks for which a loss is evaluated


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
            f"{_some(norms)} look{'s' if len(norms) == 1 else ''} across the samples of a pass, so"
            " the result depends on the micro-batch: use anybatch's ghost batches (plain"
            " torch BatchNorm), GroupNorm or LayerNorm."
        )
    if frequent := _frequent(runs):
        found = True
        yield (
            f"{_some(frequent)} divide{'s' if len(frequent) == 1 else ''} gradients by how often an id"
            " comes up in a pass (scale_grad_by_freq), which the cut changes: leave it out."
        )
    if (kept := _kept_state(runs, tolerance, norms)) is not None:
        found = True
        yield (
            "The same samples give another loss when they pass a second time, and nothing was trained"
            " in between: a layer (or the loss) keeps something from one pass to the next"
            + (f" ({_some(kept)})" if kept else ", a counter or a running mean, say")
            + ", so the result depends on the number of passes. Let it change once per step, or not at"
            " all in training."
        )
    if _is_mean_over_tokens(runs, tolerance, norms):
        found = True
        yield (
            "The loss is a mean over tokens (labels other than -100), of which pieces have unequal"
            " numbers, so means of pieces do not make up the mean of the whole: weigh by tokens, as"
            " anybatch.model_loss (or causal_lm_loss) does for a model of transformers, or return"
            " anybatch.Loss(sum, weight) with the sum over the tokens and their number."
        )
    elif fault := _fault_of_loss(runs, tolerance, norms):
        found = True
        yield fault
    if not found and _compares_samples(runs):
        found = True
        yield (
            "The loss tells the samples of a pass from one another (as contrastive losses do): return"
            " anybatch.JointLoss(encode, compare), with what is computed of each sample in encode, and"
            " what compares them in compare."
        )
    if not found and not _is_proportional(runs):
        found = True
        yield (
            "The gradient is not proportional to the loss: in backward an autograd function or a hook"
            " adds something to it (an auxiliary loss that is attached), clamps or normalises it, and"
            " does so once per pass, to a gradient of the sum. Return an auxiliary loss as a part of"
            " the whole: anybatch.Loss(sum + auxiliary * weight, weight); clip_norm clips the mean."
        )
    if not found and _is_of_collate(runs):
        found = True
        yield (
            "collate computes with the samples of a batch together (it subtracts their mean, say), and"
            " a task collates each micro-batch by itself: compute it from the whole data set before."
        )
    if not found and _fault_is_of_padding(runs, tolerance):
        found = True
        yield (
            "What collate makes of a sample depends on the others beside it, and the result on"
            " that: padding that the model or the loss does not mask, most likely. Mask it in"
            " attention, in means over positions and in the loss."
        )
    if not found and isinstance(runs.task.loss, JointLoss):
        yield (
            "encode does something else with a sample when others are beside it (statistics over dim 0,"
            " say), or compare draws at random: move the first into compare, which sees all samples at"
            " once, and the second into encode."
        )
    elif not found:
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
        f"The loss is {loss}. Of the samples, {runs.sample.name_of(bad)} is the first whose loss by"
        f" itself is no number ({numbers[bad]}): look there for missing values, a division by zero, or"
        " the logarithm of zero."
    )


def _kept_state(runs: Runs, tolerance: float, norms: Sequence[str]) -> Sequence[str] | None:
    """Return the names of state that a pass leaves for the next one, as far as modules show it. None if
    the loss of a second pass is the same."""
    first, again, kept = runs.twice(norms)
    near = max(tolerance, _ALIKE_IN_FLOAT32) * max(abs(first), _TINY)
    return kept if abs(first - again) > near else None


def _frequent(runs: Runs) -> list[str]:
    """Return the embeddings that divide gradients by the frequency of ids, if this makes the pieces
    differ."""
    model = copy_of(runs.model)
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, kinds)]
    names = [name for name, module in found if module.scale_grad_by_freq]
    for _, module in found:
        module.scale_grad_by_freq = False
    if names and replace(runs, model=model).deviation_when(()) < runs.deviation_when(()) / 10:
        return names
    return []


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


def _fault_of_loss(runs: Runs, tolerance: float, names: Sequence[str]) -> str | None:
    """Describe what is wrong with how a loss that returns plain numbers averages, or return None. This
    is derived from its values for a few blocks, for pairs of neighboring blocks, and for the whole.

    If the loss is a mean over w_b counted elements in block b, its value for two blocks is between
    theirs and gives the ratio of their w_b; the ratios determine the value of the whole. A loss that
    mixes samples does not satisfy this.
    """
    if fault := _fault_of_sum(runs, names):
        return fault
    size = runs.sample.size
    for most in (_BLOCKS, _BLOCKS // 2, 2):
        count = min(most, size)
        ends = [size * i // count for i in range(count + 1)]
        sizes = [b - a for a, b in pairwise(ends)]
        values = runs.losses(sizes, names)
        if values and all(value.isfinite() for value in values):
            break  # every block has something that counts
    one = runs.losses(runs.whole, names)
    if one is None or values is None:
        return None
    whole, blocks = float(one[0]), [float(value) for value in values]
    # Many models compute the loss in float32 regardless of their dtype.
    coarse = one[0].dtype != torch.float64
    alike = max(10 * tolerance, _ALIKE_IN_FLOAT32 if coarse else 0.0)

    def is_whole(value: float) -> bool:
        return abs(value - whole) <= alike * max(abs(whole), _TINY)

    if is_whole(sum(blocks)):
        return (
            "The loss is a sum over the samples, returned where a mean is expected: return"
            " anybatch.Loss(sum, weight) with that sum and the number of samples, or the mean."
        )
    if is_whole(_mean_of(blocks, sizes)):
        return None
    weights = [1.0]
    for b, pair in enumerate(_pairs(runs, sizes, names)):
        rest = blocks[b + 1] - pair
        ratio = (pair - blocks[b]) / rest if rest else -1.0
        if not ratio > 0:
            return None
        weights.append(weights[-1] * ratio)
    if not is_whole(_mean_of(blocks, weights)):
        return None
    return (
        "The loss is a mean over something else than the samples (non-ignored tokens,"
        " positive pairs), so means of pieces do not make up the mean of the whole: return"
        " anybatch.Loss(sum, weight) with the sum and the number of what is counted."
    )


def _fault_of_sum(runs: Runs, names: Sequence[str]) -> str | None:
    """Describe what is wrong with a loss whose sums or weights do not add up, or return None."""
    whole, parts = runs.sums(runs.whole, names), runs.sums(runs.pieces, names)
    if whole is None or parts is None:
        return None
    total, pieces = float(whole[0].sum), [float(part.sum) for part in parts]
    weight, weights = float(whole[0].weight), [float(part.weight) for part in parts]
    near, surplus = _ALIKE_IN_FLOAT32 * max(abs(total), _TINY), sum(pieces) - total
    means = [_mean_of(pieces, by) for by in (weights, runs.pieces) if sum(by)]
    if abs(surplus) > near and any(abs(mean - total) <= near for mean in means):
        return (
            "The loss returns a mean as its sum: that of the whole is the mean of those of the pieces."
            " Return anybatch.Loss(sum, weight) with the sum over what the weight counts"
            " (reduction='sum')."
        )
    if abs(sum(weights) - weight) > _ALIKE_IN_FLOAT32 * weight:
        return (
            f"The weight of the loss does not add up: it is {weight:.6g} for all samples, and"
            f" {sum(weights):.6g} for the pieces together. Return anybatch.Loss(sum, weight) with the"
            " number of samples (or tokens) of the sum."
        )
    third = runs.sample.size // 3
    two = runs.sums([third, runs.sample.size - third], names) or []
    once = sum(float(part.sum) for part in two) - total
    if abs(surplus) <= near or abs(surplus - once * (len(pieces) - 1)) > near:
        return None
    return (
        f"The loss adds a term to its sum that does not depend on the samples ({once:.6g}: a penalty on"
        " the parameters, say), once for each micro-batch. Multiply it by the weight:"
        " anybatch.Loss(sum + penalty * n, weight=n)."
    )


def _is_mean_over_tokens(runs: Runs, tolerance: float, names: Sequence[str]) -> bool:
    """Whether pieces agree with the whole if each is weighted by its number of labels: all labels, or
    those that are predicted from the previous token."""
    if runs.losses(runs.whole, names) is None or _labels_of(runs.sample.batch) is None:
        return False
    ways = (partial(_by_labels, runs.task.loss, first) for first in (0, 1))
    return any(runs.deviation_when(names, loss=way) <= tolerance for way in ways)


def _is_of_collate(runs: Runs) -> bool:
    """Whether samples that are collated separately differ in values, not only in padding."""
    size = runs.pieces[0]
    with suppress(DataError):
        cut = runs.sample.collated_once().cut([size], runs.dtype)
        return differs(next(cut), next(runs.sample.cut([size], runs.dtype)))
    return False


def _fault_is_of_padding(runs: Runs, tolerance: float) -> bool:
    """Whether pieces that are sliced from the whole batch agree with it, unlike those that are collated
    separately."""
    once = replace(runs, sample=runs.sample.collated_once())
    with suppress(DataError):  # a batch whose samples are not known cannot be sliced
        return once.deviation_when(()) <= tolerance
    return False


def _pairs(runs: Runs, sizes: Sequence[int], names: Sequence[str]) -> list[float]:
    """Return the loss of each block together with the next one."""
    found: dict[int, float] = {}
    for first in (0, 1):  # pairs that begin at even blocks, then at odd ones
        cut = [*sizes[:first]]
        starts = range(first, len(sizes), 2)
        cut += [sum(sizes[b : b + 2]) for b in starts]
        losses = (runs.losses(cut, names) or [])[first:]
        found.update((b, float(value)) for b, value in zip(starts, losses, strict=True))
    return [found[b] for b in range(len(sizes) - 1)]


def _labels_of(batch: object) -> Tensor | None:
    """Return the `labels` of tokens, `[batch, tokens]`, if there are any."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, Tensor) and labels.dim() == 2 else None


def _by_labels(loss: LossFunction, first: int, model: nn.Module, batch: object) -> Loss:
    """Treat the value of `loss` as the mean over the non-ignored labels from index `first` on."""
    labels = _labels_of(batch)
    count = 0 if labels is None else int((labels[:, first:] != _IGNORED).sum())
    if not count:  # a mean over nothing is not a number
        return Loss(torch.stack([param.sum() * 0 for param in model.parameters()]).sum(), 0)
    mean = loss(model, batch)
    assert isinstance(mean, Tensor)
    return Loss(mean * count, count)


def _mean_of(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


def _looks_across(module: nn.Module) -> bool:
    """Whether `module` is a norm with running statistics, torch's or (judged by its buffers)
    another."""
    return hasattr(module, "running_mean") and next(module.children(), None) is None


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
