"""Averages: what a loss is averaged over, where the graph of what was returned shows it.

A plain mean is weighed by the number of samples. Whether it was taken over these cannot be seen in a
number; but torch's loss functions note in the graph how they reduced, over which targets and by which
weights. Nothing is refused for it, since a step that is not cut is right all the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from anybatch.compute.ghost_norm import depends_on_cut, depends_on_writes
from anybatch.task import Loss, LossFunction

_MEAN, _SUM = 1, 2  # what torch calls its reductions in the graph

_LIKELIHOODS = ("NllLossBackward0", "NllLoss2DBackward0")  # what cross_entropy ends in, too

_ARITHMETIC = ("AddBackward", "SubBackward", "MulBackward", "DivBackward", "ToCopyBackward")

_FEW = 5  # targets in a row that are 0, 1, 2, ... by chance


def warn_of_reduction(function: LossFunction, returned: Any, num_samples: int) -> bool:
    """Warn, once for each loss function, of a sum that is taken for a mean, and the other way round; of
    a mean that weighs classes or leaves targets out; of samples that are told from one another; and of
    what looks like a metric in the place of the weight.

    The first two are seen only in what one of torch's loss functions returned as it is; the others also
    where terms were added and scaled. All else is left to `loss_check`, and to `verify`. Of one sample,
    mean and sum may well be the same. Waits for the device, where targets or a weight are there to be
    looked at.

    Returns whether it warned.
    """
    if num_samples < 2:
        return False
    plain = isinstance(returned, Tensor)
    total = returned if plain else _sum_of(returned)
    reduction = getattr(getattr(total, "grad_fn", None), "_saved_reduction", None)
    sentence = None
    if (second := _no_weight(returned)) is not None:
        sentence = (
            f"returns a pair, whose second member is taken as the weight of the first, and that is"
            f" {second:.3g} for {num_samples} samples: if it is a metric, return"
            " anybatch.Loss(sum, weight, metrics={...})."
        )
    elif plain and reduction == _SUM:
        sentence = (
            "returns a sum (reduction='sum') by itself, which is taken as the mean over the samples:"
            " the update is too large by a factor of about the micro-batch, and depends on it. Return"
            " anybatch.Loss(sum, weight) with the number of samples, or the mean."
        )
    elif not plain and reduction == _MEAN:
        sentence = (
            "returns a mean (reduction='mean') as its sum: means of micro-batches are added up and"
            " divided by the weight, so the update depends on how the step is cut. Return"
            " anybatch.Loss(sum, weight) with reduction='sum', or the mean by itself where it is one"
            " over the samples."
        )
    else:
        told = (_told(node, plain, num_samples) for node in _likelihoods(total))
        sentence = next(filter(None, told), None)
    if sentence:
        warn_of(function, sentence)
    return sentence is not None


def warn_of(function: LossFunction, sentence: str) -> None:
    """Warn, once, of what is true of a loss function: `sentence`, of which it is the subject."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    _warn(f"the loss function {name!r} {sentence}", *_place_of(function))


def warn_of_no_gradient(function: LossFunction, step: int) -> None:
    """Warn of a gradient of exactly zero in the first update, of number `step`."""
    warn_of(
        function,
        f"has a gradient of exactly zero in step {step}, so nothing is learned from it: look for"
        " .detach(), a comparison or rounding in place of a number, a part that is multiplied by zero,"
        " or a contrastive loss of one sample alone.",
    )


def _sum_of(returned: Any) -> Any:
    if isinstance(returned, Loss):
        return returned.sum
    return returned[0] if isinstance(returned, tuple) and len(returned) == 2 else None


def _no_weight(returned: Any) -> float | None:
    """The second of a pair, where it is a fraction, as an accuracy is; None otherwise."""
    second = returned[1] if isinstance(returned, tuple) and len(returned) == 2 else None
    if type(second) is not Tensor or not second.is_floating_point() or second.numel() != 1:
        return None  # nor is it read while a pass is traced without numbers
    value = float(second)
    return value if 0 <= value <= 1 else None


def _likelihoods(total: Any) -> Iterator[Any]:
    """The nodes of negative log-likelihoods of which `total` is made by adding and scaling."""
    nodes = [getattr(total, "grad_fn", None)]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if node.name() in _LIKELIHOODS:
            yield node
        elif node.name().startswith(_ARITHMETIC):
            nodes.extend(before for before, _ in reversed(node.next_functions))


def _told(node: Any, plain: bool, num_samples: int) -> str | None:
    """What is to be said of a negative log-likelihood."""
    scores, targets = node._saved_self, node._saved_target
    seen = type(targets) is Tensor  # not while a pass is traced without numbers
    if seen and _are_told_apart(scores, targets, num_samples):
        return (
            "tells the samples of a pass from one another (as contrastive losses do), so its result"
            " depends on how the step is cut. In two parts, what is computed of each sample and what is"
            " compared, it does not: anybatch.JointLoss(encode, compare)."
        )
    if not plain or node._saved_reduction != _MEAN:
        return None
    if node._saved_weight is not None:
        return (
            "returns a mean that weighs classes (weight=), which is no mean over the samples, so the"
            " update depends on how the step is cut. Return anybatch.Loss(sum, weight) with"
            " reduction='sum' and the weights of the targets added up: weight[target].sum()."
        )
    ignored = _signed(node._saved_ignore_index)
    if seen and (targets == ignored).any():
        return (
            f"returns a mean that leaves out targets (those of {ignored}, ignore_index), which is no"
            " mean over the samples, so the update depends on how the step is cut. Return"
            " anybatch.Loss(sum, weight) with reduction='sum' and the number of targets that count, or"
            " what anybatch.model_loss makes of a model of transformers."
        )
    return None


def warn_of_attached(function: LossFunction, returned: Any) -> None:
    """Warn of an autograd function of the user's in the graph that has a gradient where the loss has
    none: an auxiliary loss that is attached in backward, as some mixtures of experts do."""
    if dist.is_available() and dist.is_initialized():
        return  # such a function may meet other ranks
    total = returned if isinstance(returned, Tensor) else _sum_of(returned)
    nodes, seen = [getattr(total, "grad_fn", None)], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes.extend(before for before, _ in node.next_functions)
        if isinstance(node, BackwardCFunction) and _attaches(node):
            name = node._forward_cls.__qualname__  # pyright: ignore[reportAttributeAccessIssue]
            warn_of(
                function,
                f"runs through {name!r}, whose backward gives a gradient even where that of the loss is"
                " zero (an auxiliary loss that is attached, say). It is not scaled with the loss, which"
                " is a sum that is divided by the weight in the end, so it comes out too small, and"
                " depends on how the step is cut. Return that loss as a part of the whole:"
                " anybatch.Loss(sum + auxiliary * weight, weight).",
            )
            return


def _attaches(node: Any) -> bool:
    """Whether the backward of a user's autograd function makes a gradient of zeros."""
    if str(node._forward_cls.__module__).partition(".")[0] in ("torch", "anybatch"):
        return False
    try:
        zeros = [
            torch.zeros(one.shape, dtype=one.dtype, device=one.device)
            for one in node._input_metadata
        ]
        found = node.apply(*zeros)
    except Exception:  # it may be made for the engine alone
        return False
    given = found if isinstance(found, tuple) else (found,)
    return any(isinstance(one, Tensor) and bool(one.isfinite().all() & one.any()) for one in given)


def warn_of_hooks(model: nn.Module, function: LossFunction) -> None:
    """Warn if a parameter of `model` has hooks of the user's on its gradient; said of `function`, the
    loss. They run in every pass, where gradients are sums: a clamp of these is none of their mean."""
    for name, param in model.named_parameters():
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            sentence = (
                f"the gradient of {name!r} has a hook, which sees the sum over the samples of one pass,"
                " not the mean over the global batch. That is exact for a factor or a mask; a clamp, or"
                " an update within the hook, depends on how the step is cut. clip_norm clips the mean,"
                " and optimizer.register_step_pre_hook sees it."
            )
            _warn(sentence, *_place_of(function))
            return


def warn_of_statistics(
    model: nn.Module, function: LossFunction, written: Sequence[str] = ()
) -> None:
    """Warn of what in `model` advances once per pass, whatever samples that has; said of the loss.
    `written`: buffers that passes were seen to write to."""
    for sentence in (*depends_on_cut(model, drawn=False), *depends_on_writes(written)):
        _warn(sentence, *_place_of(function))


def _are_told_apart(scores: Tensor, targets: Tensor, num_samples: int) -> bool:
    """Whether each sample of a pass is a class of its own: targets 0, 1, 2, ..."""
    if num_samples < _FEW or scores.shape != (num_samples, num_samples):
        return False
    return torch.equal(targets, torch.arange(num_samples, device=targets.device))


def _signed(number: int) -> int:
    """The graph has negative numbers of 64 bits as positive ones."""
    return number - 2**64 if number >= 2**63 else number


def _place_of(function: Any) -> tuple[str, int]:
    """File and line of `function`; of one that is not written in Python, this file."""
    code = getattr(function, "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else (__file__, 1)


@cache  # a plan is made of many passes
def _warn(sentence: str, file: str, line: int) -> None:
    warnings.warn_explicit(sentence, UserWarning, file, line)
