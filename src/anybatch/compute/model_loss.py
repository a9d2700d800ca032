"""model_loss: the loss that a transformers model computes itself, as a sum and its weight.

`model(**batch).loss` is a mean, but the output does not say what the mean is over: the tokens whose
label is not ignored, these without the first of each sequence (a causal language model shifts labels by
one), or the samples. A step that is cut into micro-batches needs this number, so it is counted from the
labels. Whether the first label counts is not documented, so it is determined by running the model,
once, on its first batch. This also shows whether the loss is such a mean at all.

The argument `num_items_in_batch` of transformers models is not used: models that compute their loss
without the library's loss functions silently ignore it.

The model is recognized by the attributes that transformers gives it; transformers is not imported.
"""

from __future__ import annotations

import math
import re
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from anybatch.compute.embedding_ids import naming_ids
from anybatch.compute.loss import widened
from anybatch.compute.loss_check import is_coarse
from anybatch.compute.modes import evaluating
from anybatch.errors import DataError, InputError, listed
from anybatch.task import Loss

_IGNORED = -100
_POSITIONS = ("start_positions", "end_positions")
_NAMES = ("labels", "start_positions")
_ALIKE, _ALIKE_IN_HALF = 1e-4, 1e-2  # relative tolerances for rounding errors

Counting: TypeAlias = Literal["all", "next", "samples"]
"""What a mean is over: all labels, those predicted from the previous token, or samples."""


def model_loss(model: nn.Module, batch: Any) -> Loss:
    """The model's own loss, `model(**batch).loss`, multiplied by the number of elements that it is the
    mean over. The result is a sum and its weight, exact however the global batch is cut. Pass
    `model_loss` to a task as its loss function.

    Supports every transformers model whose loss is a mean over labels or samples: sequence, token and
    image classification, masked and sequence-to-sequence language models, regression, segmentation,
    question answering. For causal language models, `causal_lm_loss` computes the same loss without
    keeping the logits in memory.

    If the first batch of a model has labels for tokens, two of its samples are run again, four times
    and without gradients, to determine what the loss is a mean over. A warning is issued if the loss is
    not such a mean, since it then depends on the cut, and if it contains a term over the whole pass,
    such as the load-balancing term of a mixture of experts.

    Args:
        model: called with the whole batch as keyword arguments; returns an output with `.loss`.
        batch: a mapping with `labels`: either integers of shape `[batch]` or `[batch, ...]`, where -100
            (for segmentation, `semantic_loss_ignore_index` of the configuration) is ignored, or
            regression targets, the same number for each sample. For question answering, instead:
            `start_positions` and `end_positions`, of shape `[batch]`; those beyond the tokens are
            ignored.

    Raises:
        DataError: `input_ids` contains a token, or `labels` a class, that the model does not have. This
            is not checked on an accelerator, since the check would block the step.
        InputError: the batch has no labels, the model returns no loss, the labels of a causal language
            model are already shifted by one, the loss is a sum over the samples (of CTC models with
            `ctc_loss_reduction="sum"`), or of an answer only the start or only the end is ignored.
    """
    inputs = _mapping(batch, "model_loss")
    labels = next((inputs[name] for name in _NAMES if name in inputs), None)
    if not isinstance(labels, Tensor) or not labels.dim():
        raise InputError(
            "model_loss needs a batch with 'labels', a tensor with the samples on dim 0, and was given"
            f" {listed(inputs) if inputs else 'nothing'}: add labels, or write the loss."
        )
    if "labels" not in inputs:
        positions = {name: inputs[name] for name in _POSITIONS if name in inputs}
        return weighed(model, inputs, positions, count_answers(model, inputs))
    ignored = ignored_label(model)
    counting: Counting = "all"
    if labels.is_floating_point() or is_mean_over_samples(model):
        counting = "samples"
    elif labels.dim() > 1:
        counting = _counting(model, inputs, labels, ignored)
    if counting == "samples":
        return Loss(widened(_mean(model, inputs)) * len(labels), len(labels))
    counted = labels[..., 1:] if counting == "next" else labels
    return weighed(model, inputs, {"labels": labels}, (counted != ignored).sum())


def weighed(
    model: nn.Module, inputs: Mapping[str, Any], labels: Mapping[str, Tensor], weight: Tensor
) -> Loss:
    """Return the mean that `model` computes with `labels`, by their names in `inputs`, multiplied by
    `weight`. If `weight` is zero, the sum and its gradient are zero: all labels are then replaced by 0,
    since the mean over no elements is NaN."""
    labels = {name: values.where(weight > 0, 0) for name, values in labels.items()}
    return Loss(widened(_mean(model, {**inputs, **labels})) * weight, weight)


def count_answers(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return the number of samples with an answer for question answering, as a scalar tensor:
    transformers ignores positions beyond the tokens, of which texts that were truncated have some, and
    takes negative ones for 0. LayoutLMv3 appends the positions of image patches to the tokens.

    Raises `InputError` if only the start or only the end of an answer is ignored: the loss then
    consists of two means, over different numbers of samples. This reads values, so it synchronizes with
    the device.
    """
    start = inputs["start_positions"]
    end = inputs.get("end_positions", start)
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return torch.tensor(len(start), device=start.device)
    length = tokens.size(1)
    pixels = inputs.get("pixel_values")
    if isinstance(pixels, Tensor) and "LayoutLMv3" in type(_without_adapters(model)).__name__:
        patch = int(_without_adapters(model).config.patch_size)  # pyright: ignore
        length += 1 + (pixels.size(-2) // patch) * (pixels.size(-1) // patch)
    there = start < length
    differ = there != (end < length)
    if not isinstance(differ, FakeTensor) and bool(differ.any()):
        row = int(differ.nonzero()[0][0])
        raise InputError(
            f"start_positions has {start[row].item()} and end_positions {end[row].item()} at [{row}] of"
            f" a micro-batch of length {length}: only one of them is beyond the text and ignored, so"
            f" start and end are means over different samples. Set both to {length} or more where an"
            " answer is cut off, or both to 0."
        )
    return there.sum()


def is_mean_over_samples(model: nn.Module) -> bool:
    """Return whether the loss of `model` is known to be a mean over samples, whatever their labels, as
    that of CTC is. Raises `InputError` if it is configured as a sum."""
    if "CTC" not in type(_without_adapters(model)).__name__:
        return False
    reduction = getattr(getattr(model, "config", None), "ctc_loss_reduction", None)
    if reduction == "sum":
        raise InputError(_sum_over_samples(model))
    return reduction == "mean"


def ignored_label(model: nn.Module) -> int:
    """Return the label that is ignored: -100, except for segmentation models."""
    if "Segmentation" not in type(_without_adapters(model)).__name__:
        return _IGNORED
    config = getattr(model, "config", None)
    return int(getattr(config, "semantic_loss_ignore_index", _IGNORED))


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context manager for evaluation mode that restores modes and random states on exit."""
    others = [] if device.type == "cpu" else [device]
    forked = torch.random.fork_rng(others, device_type=device.type if others else "cuda")
    with forked, evaluating(model):
        yield


def check_not_moved(ids: Tensor, targets: Tensor, ignored: int, given: str) -> None:
    """Raises `InputError` if `targets` `[batch, tokens]`, which the tokens `ids` are to predict, are
    not the next tokens but those one further (labels that were shifted by one before the model shifts
    them), or the tokens themselves. Reads values, so it synchronizes with the device.

    Args:
        given: the name of the labels in the batch: `labels` or `shift_labels`.
    """
    offset = 2 if given == "labels" else 0
    length = ids.size(1) - offset
    wanted, counted = targets[:, :length], targets[:, :length] != ignored
    if int(counted.sum()) < _LEAST_COMPARED:
        return
    moved = wanted == ids[:, offset:]
    right = targets[:, :-1] == ids[:, 1:]
    if not bool(moved[counted].all()) or bool(right[targets[:, :-1] != ignored].all()):
        return
    if offset:
        raise InputError(
            "the labels are moved by one already (labels[i] is input_ids[i + 1] in every sequence of"
            " the first batch), and a causal language model moves them by itself: give labels that"
            " stand where their tokens do, or call yours 'shift_labels'."
        )
    raise InputError(
        "shift_labels are the tokens themselves (shift_labels[i] is input_ids[i] in every sequence of"
        " the first batch), so the model would learn to repeat: give the token that follows each, or"
        " call yours 'labels', which are moved by one."
    )


_LEAST_COMPARED = 8  # this many tokens do not match by chance


# ------------------------------------------------------------------------------------- what counts

_KNOWN: weakref.WeakKeyDictionary[nn.Module, Counting] = weakref.WeakKeyDictionary()


def _counting(model: nn.Module, inputs: dict[str, Any], labels: Tensor, ignored: int) -> Counting:
    if isinstance(labels, FakeTensor) or not labels.numel():
        return "all"  # there are no values to determine it from, and the weight is not read
    if (known := _KNOWN.get(model)) is None:
        known = _KNOWN[model] = _asked(model, inputs, labels, ignored)
        ids = inputs.get("input_ids")
        if known == "next" and isinstance(ids, Tensor) and ids.shape == labels.shape:
            targets = nn.functional.pad(labels[:, 1:], (0, 1), value=ignored)
            check_not_moved(ids, targets, ignored, "labels")
    return known


@torch.no_grad()
def _asked(model: nn.Module, inputs: dict[str, Any], labels: Tensor, ignored: int) -> Counting:
    """Determine what the mean of `model` is over from its loss of two samples with few labels: three in
    the first and one in the second, alone and together; and of the first sample with its first label
    only. Always runs four passes, since all ranks of a sharded model must run the same number."""
    if len(labels) == 1:
        inputs, labels = _with_another(inputs), labels.expand(2, *labels.shape[1:])
    size = len(labels)
    flat = labels.where(labels != ignored, 0).flatten(1)
    last = flat.size(1) - 1
    three, one = tuple(range(min(last, 2) + 1)), (min(last, 1),)

    def mean(*kept: tuple[int, ...], first: int = 0) -> float:
        rows = [(first + i) % size for i in range(len(kept))]
        some = {name: _rows(value, rows, size) for name, value in inputs.items()}
        few = torch.full_like(flat[rows], ignored)
        for row, places in enumerate(kept):
            few[row, list(places)] = flat[rows[row], list(places)]
        return float(_mean(model, {**some, "labels": few.view(-1, *labels.shape[1:])}))

    with unchanged(model, labels.device):
        together = mean(three, one)
        alone = mean((0,))
        several, single = mean(three), mean(one, first=1)
    counting: Counting = "all" if math.isfinite(alone) and alone != 0 else "next"
    if last < 2:
        return counting
    num = 3 if counting == "all" else 2
    close = _ALIKE_IN_HALF if is_coarse(model, labels.device) else _ALIKE
    wanted = (num * several + single) / (num + 1)
    if math.isclose(together, wanted, rel_tol=close):
        return counting
    if math.isclose(together, (several + single) / 2, rel_tol=close):
        return "samples"
    if model in _TOLD:
        return counting
    if math.isclose(together, several + single, rel_tol=close):
        raise InputError(_sum_over_samples(model))
    warnings.warn(
        f"model_loss: the loss of {type(model).__name__} on two samples together is {together:.6g}, and"
        f" {wanted:.6g} by the labels of each: it is no mean over labels (a loss that balances experts,"
        " say, is none), so it depends on how the global batch is cut into micro-batches.",
        UserWarning,
        stacklevel=5,
    )
    return counting


def _rows(value: Any, rows: list[int], size: int) -> Any:
    return (
        value[rows] if isinstance(value, Tensor) and value.dim() and len(value) == size else value
    )


def _with_another(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Add a second sample, which the model accepts as well, to a batch of one: its first token
    repeated, or, if there are floating-point inputs (images, sound), its inputs reversed along the last
    dim. Repeating the same sample would not reveal a loss that compares samples."""
    others = {
        name
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.is_floating_point() and "mask" not in name
    }

    def doubled(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or len(value) != 1:
            return value
        another = value
        if value.dim() > 1 and (name in others or name.endswith("input_ids")):
            another = value.flip(-1) if others else value[..., :1].expand_as(value)
        return torch.cat([value, another])

    return {name: doubled(name, value) for name, value in inputs.items()}


def _without_adapters(model: nn.Module) -> nn.Module:
    """Return the model of transformers within one of peft."""
    return getattr(model, "get_base_model", lambda: model)()


def _sum_over_samples(model: nn.Module) -> str:
    return (
        f"the loss of {type(model).__name__} is a sum over the samples (of CTC models,"
        " ctc_loss_reduction='sum' in the configuration), and a step is made by the mean of its global"
        " batch: set ctc_loss_reduction='mean', or give a task or Step as loss: lambda model, batch:"
        " anybatch.Loss(model(**batch).loss, len(batch['labels']))."
    )


# ------------------------------------------------------------------------------------- the model


def _mapping(batch: Any, who: str) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        raise InputError(
            f"{who} needs a batch that is a mapping, of which the model is called with each part by its"
            f" name, and was given a {type(batch).__name__}: return a dict from collate."
        )
    return dict(batch)


def _mean(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    try:
        with naming_ids(model):
            output = model(**inputs)
    except IndexError as error:
        raise _named(error, model, inputs.get("labels")) from error
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise InputError(
            f"{type(model).__name__} returned no loss: model_loss is for models of transformers that"
            " compute one from labels, with return_dict=True. Write the loss as a function of the model"
            " and the batch."
        )
    if model not in _TOLD and (term := _balancing_term(model, output)):
        _TOLD.add(model)
        warnings.warn(term, UserWarning, stacklevel=5)
    return loss


def _named(error: IndexError, model: nn.Module, labels: Any) -> Exception:
    """Convert `error` to a `DataError` if cross-entropy was given a label that has no class; otherwise
    return `error`."""
    found = _OUT_OF_BOUNDS.search(str(error))
    if found is None or not isinstance(labels, Tensor):
        return error
    wrong = int(found[1])
    places = (labels == wrong).nonzero()
    if not len(places):
        return error
    return DataError(
        f"labels have {wrong} at {places[0].tolist()} of a micro-batch, and {type(model).__name__} has"
        f" no such class: give numbers from 0 to below those that its head tells apart, and {_IGNORED}"
        " where a label counts nothing.",
        row=int(places[0][0]),
    )


_OUT_OF_BOUNDS = re.compile(r"Target (-?\d+) is out of bounds")

_TOLD: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_TERMS = ("aux_loss", "encoder_aux_loss", "decoder_aux_loss", "encoder_z_loss", "decoder_z_loss")
_FACTORS = ("router_aux_loss_coef", "router_z_loss_coef")


def _balancing_term(model: nn.Module, output: Any) -> str:
    """Return a warning about the router term in the loss of a mixture of experts, or an empty string if
    there is none. The term is too small to be found by comparing losses."""
    terms = {name: getattr(output, name, None) for name in _TERMS}
    found = [name for name, value in terms.items() if isinstance(value, Tensor)]
    config = getattr(model, "config", None)
    reading = getattr(config, "get_text_config", None)  # for multimodal models
    config = reading() if callable(reading) else config
    factors = {n: getattr(config, n) for n in _FACTORS if getattr(config, n, None) is not None}
    absent = factors and not any(factors.values())
    if not found or absent or any(isinstance(terms[name], FakeTensor) for name in found):
        return ""
    away = " and ".join(f"{name}=0" for name in factors) or "output_router_logits=False"
    return (
        f"the own loss of {type(model).__name__} holds a term that balances experts over all samples of"
        f" a pass ({listed(found)} of its output), so it depends on how the global batch is cut into"
        f" micro-batches: fix micro_batch, or leave the term out ({away} in its configuration)."
    )
