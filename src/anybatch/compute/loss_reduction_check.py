"""Checks what a loss is averaged over, as far as the autograd graph of the returned loss shows it.

A plain mean is weighted by the number of samples. The value does not show whether the mean was taken
over the samples, but torch's loss functions record in the graph how they reduced, over which targets,
and with which weights. These checks only warn, since a step that is not cut into micro-batches is still
correct.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from anybatch.compute.ghost_norm import depends_on_cut, depends_on_writes
from anybatch.task import Loss, LossFunction

_MEAN, _SUM = 1, 2  # torch's codes for reductions in the graph

_LIKELIHOODS = ("NllLossBackward0", "NllLoss2DBackward0")  # also the last nodes of cross_entropy

_ARITHMETIC = (
    *("AddBackward", "SubBackward", "NegBackward", "MulBackward", "DivBackward", "ToCopyBackward"),
)
_SAME = 1e-4
"""Relative tolerance for equal counts, since counts of weights are summed in float32."""

_FEW = 5
"""Fewer targets than this may be 0, 1, 2, ... by chance, and fewer samples as many as means."""


def warn_of_reduction(function: LossFunction, returned: Any, num_samples: int) -> bool:
    """Warn, once for each loss function, about a sum returned as a mean, a mean returned as a sum, a
    mean that weights classes or leaves out targets, a loss that compares the samples of a pass, and a
    value in place of the weight that looks like a metric.

    The first two are detected only if the user's function returns the result of one of torch's loss
    functions unchanged; the others also if terms were added and scaled. All other cases are left to
    `loss_check` and `verify`. A single sample is not checked, since its mean and sum may be equal.
    Synchronizes with the device if there are targets or a weight to read.

    Returns whether a warning was issued.
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
        faults = (_fault_of(node, plain, num_samples) for node in _likelihoods(total))
        sentence = next(filter(None, faults), None)
    if sentence:
        warn_of(function, sentence)
    return sentence is not None


def warn_of(function: Any, sentence: str, what: str = "loss") -> None:
    """Warn, once, about a loss function, or a function of another kind (`what`), which is the
    grammatical subject of `sentence`."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    sentence += getattr(function, "remedy", "")  # of an integration
    _warn(f"the {what} function {name!r} {sentence}", *_place_of(function))


def warn_of_no_gradient(function: LossFunction, step: int) -> None:
    """Warn that the gradient is exactly zero in the first update, which is that of step `step`."""
    warn_of(
        function,
        f"has a gradient of exactly zero in step {step}, so nothing is learned from it: look for"
        " .detach(), a comparison or rounding in place of a number, a part that is multiplied by zero,"
        " or a contrastive loss of one sample alone.",
    )


def warn_of_collate(function: LossFunction) -> None:
    """Warn that collating a sample gives different values depending on the other samples."""
    sentence = (
        "collate makes something else of a sample when others are beside it (it subtracts a mean of the"
        " batch, say). A task collates each micro-batch by itself, so the update depends on how the"
        " step is cut: compute it from the whole data set before."
    )
    _warn(sentence, *_place_of(function))


def _sum_of(returned: Any) -> Any:
    if isinstance(returned, Loss):
        return returned.sum
    return returned[0] if isinstance(returned, tuple) and len(returned) == 2 else None


def _no_weight(returned: Any) -> float | None:
    """The second element of a returned pair if it is between 0 and 1, as an accuracy is; else None."""
    second = returned[1] if isinstance(returned, tuple) and len(returned) == 2 else None
    if type(second) is not Tensor or not second.is_floating_point() or second.numel() != 1:
        return None  # also for fake tensors, which have no values
    value = float(second)
    return value if 0 <= value <= 1 else None


def _terms(total: Any) -> Iterator[Any]:
    """Yield the nodes that `total` is composed of by adding and scaling, and all division nodes."""
    nodes, seen = [getattr(total, "grad_fn", None)], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        is_inner = node.name().startswith(_ARITHMETIC)
        if is_inner:
            nodes.extend(before for before, _ in reversed(node.next_functions))
        if not is_inner or node.name().startswith("DivBackward"):
            yield node


def _likelihoods(total: Any) -> Iterator[Any]:
    """Yield the nodes among `_terms(total)` that are negative log-likelihoods."""
    return (node for node in _terms(total) if node.name() in _LIKELIHOODS)


@dataclass(frozen=True, slots=True)
class _Mean:
    """A term of the loss that is a mean: the warning for it, its number of elements, the number of
    samples in the pass, and that of targets, counted or not; None if it has none."""

    sentence: str
    count: Tensor | float
    num_samples: float
    num_targets: int | None


class CountedMeans:
    """Records what the terms of a plain mean are averaged over in each micro-batch of a step.

    Means of micro-batches, weighted by samples, combine to the mean of all samples if they are taken
    over equally many elements per sample. This can stop being true in any step, for example because of
    an ignored label or a mask.
    """

    def __init__(self) -> None:
        self._passes: list[list[_Mean]] = []

    def begin(self) -> None:
        """Discard the recorded passes: the next pass is the first of a step."""
        self._passes.clear()

    def note(self, returned: Tensor, num_samples: float) -> None:
        """Record the mean returned for a micro-batch of `num_samples`, before its backward. Does
        not synchronize with the device."""
        self._passes.append(
            [
                _Mean(sentence, count, num_samples, _num_targets(node))
                for node in _terms(returned)
                for sentence, count in [_counted(node)]
                if count is not None
            ]
        )

    def empty(self) -> str:
        """Explanation if a mean in a pass of the step is over no elements, else an empty string."""
        if all(float(one.count) for means in self._passes for one in means):
            return ""
        return (
            "the mean is one over no element at all: every target or element of a micro-batch is left"
            " out, so return anybatch.Loss(sum, weight), whose weight may be 0 there"
        )

    def fault(self) -> str | None:
        """Return the warning for the step's passes, at the end of the step, or None."""
        if len(self._passes) < 2 or self._are_of_single_samples():
            return None
        for term in zip(*self._passes, strict=False):
            counts = [float(one.count) for one in term]
            if len(set(counts)) == 1:
                continue  # may not depend on the samples, such as a penalty on weights
            each = [count / one.num_samples for count, one in zip(counts, term, strict=True)]
            if max(each) - min(each) > _SAME * max(map(abs, each)):
                is_complete = counts == [one.num_targets for one in term]
                sentence = _UNEQUAL if is_complete else term[0].sentence
                return sentence.format(least=min(each), most=max(each))
        return None

    def _are_of_single_samples(self) -> bool:
        """Whether every pass has as many means for each of its samples: the loss loops over samples,
        and each mean is over a part of one. Their sum may be divided, which counts as one more. Samples
        may also have different numbers of means (objects in images), so that passes do, too."""
        numbers = {len(means) for means in self._passes}
        if len(numbers) > 1 or 0 in numbers:
            return True
        sizes = [means[0].num_samples for means in self._passes]
        each = {divmod(len(means), n) for means, n in zip(self._passes, sizes, strict=True)}
        (quotient, rest), *others = each
        return max(sizes) >= _FEW and not others and quotient >= 1 and rest <= 1


def _at_hand(node: Any, name: str) -> Tensor | None:
    """The tensor that `node` saved as `name`, or None if it would have to be recomputed or fetched."""
    raw = getattr(node, f"_raw_saved_{name}")
    return None if raw.unpack_hook is not None else getattr(node, f"_saved_{name}")


def _num_targets(node: Any) -> int | None:
    target = _at_hand(node, "target") if node.name() in _LIKELIHOODS else None
    return None if target is None else target.numel()


def _counted(node: Any) -> tuple[str, Tensor | float | None]:
    """Return the warning for a mean at `node`, and the number of elements that it is over. The number
    is None if `node` is not a mean, or if the number is not available."""
    name, reduction = node.name(), getattr(node, "_saved_reduction", None)
    if name in _LIKELIHOODS and reduction == _MEAN:
        ignored = _signed(node._saved_ignore_index)
        is_weighed = getattr(node._raw_saved_weight, "data", None) is not None
        sentence = _CLASSES if is_weighed else _LEFT_OUT.format(ignored)
        return sentence, _at_hand(node, "total_weight")
    if name.startswith("MeanBackward"):
        return _UNEQUAL, node._saved_self_sym_numel
    if reduction == _MEAN and node.next_functions[0][0] is not None:  # the input has a graph
        before, place = node.next_functions[0]
        return _UNEQUAL, math.prod(before._input_metadata[place].shape)
    if name == "DivBackward0":
        other = _at_hand(node, "other")
        return _UNEQUAL, None if other is None or other.dim() or other.requires_grad else other
    return "", None


def _fault_of(node: Any, plain: bool, num_samples: int) -> str | None:
    """Return the warning for the negative log-likelihood at `node`, or None."""
    scores, targets = node._saved_self, node._saved_target
    seen = type(targets) is Tensor  # False for fake tensors, which have no values
    if seen and _are_distinguishable(scores, targets, num_samples):
        return (
            "tells the samples of a pass from one another (as contrastive losses do), so its result"
            " depends on how the step is cut. In two parts, what is computed of each sample and what is"
            " compared, it does not: anybatch.JointLoss(encode, compare)."
        )
    if not plain or node._saved_reduction != _MEAN:
        return None
    if node._saved_weight is not None:
        return _CLASSES
    ignored = _signed(node._saved_ignore_index)
    if seen and not _are_equally_many((targets != ignored).flatten(), num_samples):
        return _LEFT_OUT.format(ignored)
    return None


_CLASSES = (
    "returns a mean that weighs classes (weight=), which is no mean over the samples, so the update"
    " depends on how the step is cut. Return anybatch.Loss(sum, weight) with reduction='sum' and the"
    " weights of the targets added up: weight[target].sum()."
)
_LEFT_OUT = (
    "returns a mean that leaves out targets (those of {}, ignore_index), which is no mean over the"
    " samples, so the update depends on how the step is cut. Return anybatch.Loss(sum, weight) with"
    " reduction='sum' and the number of targets that count, or what anybatch.model_loss makes of a"
    " model of transformers."
)
_UNEQUAL = (
    "returns a mean over {least:.6g} elements per sample in one micro-batch and {most:.6g} in another"
    " (what a mask leaves, or samples of unequal length), and micro-batches are weighed by their"
    " samples, so the update depends on how the step is cut. Return anybatch.Loss(sum, weight) with the"
    " number of elements."
)


def warn_of_no_proportion(function: LossFunction, total: Tensor) -> None:
    """Warn that the gradient is not proportional to the loss. `total`: the loss, with its graph."""
    named = ", ".join(repr(name) for name in dict.fromkeys(_own_functions(total)))
    warn_of(
        function,
        "has a gradient that is not proportional to it: in backward something is added to the gradient"
        " (an auxiliary loss that is attached), or clamps or normalises it"
        + (f" (look at {named})" if named else "")
        + ". Micro-batches add up gradients of sums, which are divided by the weight in the end, so the"
        " update depends on how the step is cut. Return an auxiliary loss as a part of the whole:"
        " anybatch.Loss(sum + auxiliary * weight, weight); clip_norm clips the mean.",
    )


def warn_of_detached(function: LossFunction) -> None:
    """Warn that the gradient is not additive over samples although the loss is."""
    warn_of(
        function,
        "has a gradient that does not add up over samples, though its value does: a factor that is"
        " computed from the samples of a pass without a gradient (.detach(), .item()) is another one in"
        " each micro-batch, so the update depends on how the step is cut. Take such a factor from the"
        " step before, or train in one piece (micro_batch).",
    )


def _own_functions(total: Tensor) -> Iterator[str]:
    """Yield the names of the user's autograd functions in the graph of `total`."""
    nodes, seen = [total.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes.extend(before for before, _ in node.next_functions)
        if isinstance(node, BackwardCFunction):
            kind = node._forward_cls  # pyright: ignore[reportAttributeAccessIssue]
            if str(kind.__module__).partition(".")[0] not in ("torch", "anybatch"):
                yield kind.__qualname__


def compares_samples(returned: Any, num_samples: int) -> bool:
    """Whether a loss compares the samples of a pass, scoring each against all of them, according to the
    graph of the `returned` value."""
    nodes = _likelihoods(returned if isinstance(returned, Tensor) else _sum_of(returned))
    return any(
        _are_distinguishable(node._saved_self, node._saved_target, num_samples)
        for node in nodes
        if type(node._saved_target) is Tensor
    )


def warn_of_hooks(model: nn.Module, function: LossFunction) -> bool:
    """Warn if a parameter of `model` has user hooks on its gradient. The warning is located at
    `function`, the loss. The hooks run in every pass, on sums of gradients: clamping the sums does not
    clamp their mean.

    Returns whether a parameter has such hooks.
    """
    for name, param in model.named_parameters():
        if param._post_accumulate_grad_hooks:
            sentence = (
                f"the gradient of {name!r} has a hook that runs after it is accumulated. It runs in"
                " every pass, on the sum over all passes so far, so whatever it changes depends on how"
                " the step is cut. clip_norm clips the mean, and optimizer.register_step_pre_hook sees"
                " the gradient once."
            )
            _warn(sentence, *_place_of(function))
            return True
        if param._backward_hooks:
            sentence = (
                f"the gradient of {name!r} has a hook, which sees the sum over the samples of one pass,"
                " not the mean over the global batch. That is exact for a factor or a mask; a clamp, or"
                " an update within the hook, depends on how the step is cut. clip_norm clips the mean,"
                " and optimizer.register_step_pre_hook sees it."
            )
            _warn(sentence, *_place_of(function))
            return True
    return False


def warn_of_statistics(
    model: nn.Module, function: LossFunction, written: Sequence[str] = ()
) -> None:
    """Warn about state in `model` that advances once per pass, regardless of the samples in it. The
    warnings are located at `function`, the loss. `written`: buffers that were modified in passes."""
    for sentence in (*depends_on_cut(model, drawn=False), *depends_on_writes(written)):
        _warn(sentence, *_place_of(function))


def _are_equally_many(counted: Tensor, num_samples: int) -> bool:
    """Whether each of `num_samples` has as many targets that count as any other: the mean over targets
    is then that over samples. (transformers leaves out one target of each sequence.)"""
    if counted.all():
        return True
    if len(counted) % num_samples:
        return False
    return counted.view(num_samples, -1).sum(1).unique().numel() == 1


def _are_distinguishable(scores: Tensor, targets: Tensor, num_samples: int) -> bool:
    """Whether each sample of a pass is its own class: targets 0, 1, 2, ..."""
    if num_samples < _FEW or scores.shape != (num_samples, num_samples):
        return False
    return torch.equal(targets, torch.arange(num_samples, device=targets.device))


def _signed(number: int) -> int:
    """Convert an unsigned 64-bit integer to signed: the graph stores negative integers as unsigned."""
    return number - 2**64 if number >= 2**63 else number


def _place_of(function: Any) -> tuple[str, int]:
    """File and line of `function`, or this file if `function` is not written in Python."""
    code = getattr(getattr(function, "presents", function), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else (__file__, 1)


def tell_again() -> None:
    """Forget which warnings were issued, so that a new run or Step issues them again."""
    _warn.cache_clear()


@cache  # warns once: planning runs many passes
def _warn(sentence: str, file: str, line: int) -> None:
    warnings.warn_explicit(sentence, UserWarning, file, line)
