"""causal_lm_loss: the loss of a `*ForCausalLM` model, without its logits and without code changes.

Such a model ends in a head, and its `forward(labels=...)` computes logits for every token. Here the
head's `forward` is replaced for the duration of one call: it computes the loss (`lm_loss`) instead of
logits. Everything before the head works as usual, including hooks and weights that are gathered from
other ranks for the duration of the forward pass.

Computations after the head are skipped, and a wrong loss must never be silent. Scaled and capped logits
are therefore detected by the model's configuration, and a few tokens of the model's first batch are
used to compare the result with the model's own logits and loss. If they disagree, the loss is computed
from the model's logits or taken from the model, and a warning is issued once.

The model is recognized by the attributes that transformers defines; transformers is not imported.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from anybatch.compute.embedding_ids import naming_ids
from anybatch.compute.lm_loss import Backend, is_plain_head, lm_loss, loss_of_logits
from anybatch.compute.model_loss import (
    check_not_moved,
    unchanged,
    weighed,
)
from anybatch.compute.patch import replace_forward
from anybatch.errors import InputError, listed
from anybatch.task import Loss

_CHECKED_TOKENS = 8
_LARGE_LOGIT = 50.0

Way: TypeAlias = Literal["head", "logits", "own"]


def causal_lm_loss(
    model: nn.Module,
    batch: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    backend: Backend = "auto",
) -> Loss:
    """Compute the loss of a causal language model from transformers, or of a model with that interface.

    Returns a `Loss`: the sum over the tokens that are not ignored, and their number. The function can
    be passed to a task directly, or as a `functools.partial`.

    The model is called once with everything in the batch except the labels. Its
    `get_output_embeddings()` must return the head. If the head alone does not determine the model's
    logits (a head with an adapter), or the logits do not determine its loss (an auxiliary loss of
    experts), the loss is computed from the model's logits, or taken from the model and weighted by the
    number of tokens. In both cases a warning is issued.

    Args:
        model: `(input_ids=..., ...) -> output` with `.logits` `[batch, tokens, vocabulary]`.
        batch: a mapping with `input_ids` `[batch, tokens]` and the other inputs of the model, or the
            ids themselves. `labels`, of the same shape, are shifted by one here, as in transformers;
            `shift_labels` are already shifted. Without labels, every token that `attention_mask` does
            not mask is a target.
        ignore_index: label value of tokens that are ignored.
        label_smoothing, z_loss, chunk, backend: as in `lm_loss`.

    Raises:
        DataError: a label, or (checked on the CPU only) a token, is outside of the vocabulary.
        InputError: the batch has no ids, the labels were already shifted by one, the model has no
            `get_output_embeddings()` or adds positions of its own to the tokens (prompt tuning), or
            `label_smoothing` or `z_loss` is set for a model whose own loss has to be used.
    """
    inputs, targets = _read(batch, ignore_index)
    options = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "chunk": chunk,
        "backend": backend,
    }
    head = _head_of(model)
    if _is_new(model, head, inputs["input_ids"]):
        given = "shift_labels" if _has(batch, "shift_labels") else "labels"
        check_not_moved(inputs["input_ids"], targets, ignore_index, given)
    with naming_ids(model):
        way = _way_of(model, head, inputs)
        if way == "head":
            return _through_head(model, head, inputs, targets, options)
        through = _through_logits if way == "logits" else _through_loss
        return through(model, inputs, targets, options)


# ---------------------------------------------------------------------------------- three ways


@dataclass(frozen=True, slots=True)
class _Finish:
    """The transformation of the logits after the head: `cap * tanh(scale * logits / cap)`."""

    scale: float
    softcap: float | None

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits.float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _finish_of(model: nn.Module) -> _Finish:
    """Read the transformation from the model's transformers configuration: a factor (Cohere), a divisor
    (Granite), a cap (Gemma 2)."""
    config = getattr(model, "config", None)
    reading = getattr(config, "get_text_config", None)  # of a multimodal model
    config = reading() if callable(reading) else config
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return _Finish(scale, None if softcap is None else float(softcap))


def _through_head(
    model: nn.Module,
    head: nn.Module,
    inputs: dict[str, Any],
    targets: Tensor,
    options: dict[str, Any],
) -> Loss:
    """Compute the loss in the head, in place of the logits."""
    finish = _finish_of(model)
    found: list[Loss] = []

    def at_head(hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        _check_positions(model, hidden, inputs["input_ids"])
        weight, bias = _parts(head)
        if finish.scale != 1.0:
            hidden = hidden * finish.scale
            bias = None if bias is None else bias * finish.scale
        found.append(lm_loss(hidden, weight, targets, bias=bias, softcap=finish.softcap, **options))
        # Instead of logits, return a zero per token that connects the model's end to the graph.
        return (found[0].sum * 0).expand(*hidden.shape[:-1], 1)

    undo = replace_forward(head, lambda _: at_head)
    try:
        output = model(**inputs)
    finally:
        undo()
    if len(found) != 1:
        raise InputError(
            f"{_name(model)} ran its head {len(found)} times in one pass, so its loss is not that of"
            " one set of logits: write the loss with anybatch.lm_loss."
        )
    # Modules gather their weights for backward when the output of forward receives a gradient.
    return Loss(found[0].sum + _logits_of(model, output).sum() * 0, found[0].weight)


def _through_logits(
    model: nn.Module, inputs: dict[str, Any], targets: Tensor, options: dict[str, Any]
) -> Loss:
    """Compute the loss from all logits, which the model's own forward returns."""
    logits = _logits_of(model, model(**inputs))
    plain = {n: options[n] for n in ("ignore_index", "label_smoothing", "z_loss")}
    return loss_of_logits(logits, targets, **plain)


def _through_loss(
    model: nn.Module, inputs: dict[str, Any], targets: Tensor, options: dict[str, Any]
) -> Loss:
    """Multiply the model's own mean loss by the number of tokens that it averages over."""
    if options["label_smoothing"] or options["z_loss"]:
        raise InputError(
            f"the loss of {_name(model)} is more than cross-entropy over its logits, so"
            " label_smoothing and z_loss cannot be put into it: leave them out, or write the loss."
        )
    counted = targets != options["ignore_index"]
    labels = F.pad(targets.where(counted, -100)[..., :-1], (1, 0), value=-100)
    return weighed(model, inputs, {"labels": labels}, counted.sum())


# ---------------------------------------------------------------------------------- which way

_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[int, Way]] = weakref.WeakKeyDictionary()
"""For each model, its head (an adapter may be added later) and the way that was found correct."""


def _way_of(model: nn.Module, head: nn.Module, inputs: dict[str, Any]) -> Way:
    ids = inputs["input_ids"]
    if _is_new(model, head, ids):
        _KNOWN[model] = id(head), _check(model, head, ids[:1, :_CHECKED_TOKENS])
    if (known := _KNOWN.get(model)) is not None and known[0] == id(head):
        return known[1]
    return "head" if is_plain_head(head) else "logits"  # there is nothing to compare


def _is_new(model: nn.Module, head: nn.Module, ids: Tensor) -> bool:
    """Whether this is the first batch of `model` with this head that has tokens to compare."""
    if isinstance(ids, FakeTensor) or ids.size(0) < 1 or ids.size(1) < 2:
        return False
    known = _KNOWN.get(model)
    return known is None or known[0] != id(head)


@torch.no_grad()
def _check(model: nn.Module, head: nn.Module, ids: Tensor) -> Way:
    """Find the way to compute the loss: run the model on a few tokens, with hidden states scaled up so
    that a cap on the logits takes effect, and compare. Reads values, so it synchronizes with the
    device, once."""
    finish, forward = _finish_of(model), head.forward
    found: list[Tensor] = []

    def at_head(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        highest = forward(hidden, *args, **kwargs).float().abs().max()
        hidden = hidden * torch.where(highest > 0, _LARGE_LOGIT / highest, 1.0).to(hidden.dtype)
        if is_plain_head(head):
            weight, bias = _parts(head)
            found.append(finish(F.linear(hidden, weight, bias)))
        return forward(hidden, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(unchanged(model, ids.device))
        stack.callback(replace_forward(head, lambda _: at_head))
        output = model(input_ids=ids, labels=ids)
    logits = _logits_of(model, output).float()
    _check_positions(model, logits, ids)
    plain = F.cross_entropy(logits[0, :-1], ids[0, 1:])
    own = getattr(output, "loss", None)
    if own is not None and not torch.isclose(plain, own.float(), rtol=1e-5, atol=1e-6):
        _tell(
            f"the loss of {_name(model)} on {ids.size(1)} tokens is {float(own):.6g}, and the"
            f" cross-entropy of its logits {float(plain):.6g}: its own loss is taken, weighed by"
            " the tokens that count. It needs memory for all logits."
        )
        return "own"
    if len(found) == 1 and found[0].shape == logits.shape:
        coarse = torch.finfo(_parts(head)[0].dtype).eps > 1e-5 or torch.is_autocast_enabled(
            ids.device.type
        )
        if (found[0] - logits).abs().max() <= (2e-2 if coarse else 1e-4) * _LARGE_LOGIT:
            return "head"
    _tell(
        f"the logits of {_name(model)} are not those of its head ({type(head).__name__}) alone, so its"
        " loss is computed from its own logits. It needs memory for all of them."
    )
    return "logits"


def _check_positions(model: nn.Module, outputs: Tensor, ids: Tensor) -> None:
    """Raises `InputError` if `outputs`, logits or hidden states, are not one for each of `ids`."""
    if outputs.shape[:-1] != ids.shape:
        raise InputError(
            f"{_name(model)} computes logits at {list(outputs.shape[:-1])} positions for input_ids of"
            f" {list(ids.shape)} (prompt tuning adds virtual tokens, for example), so it is not known"
            " which position predicts which label: give anybatch.model_loss as the loss."
        )


def _tell(sentence: str) -> None:
    warnings.warn(f"causal_lm_loss: {sentence}", UserWarning, stacklevel=4)


# --------------------------------------------------------------------------------- batch, model


def _read(batch: Any, ignore_index: int) -> tuple[dict[str, Any], Tensor]:
    """Return the inputs of the model, and the target of each position."""
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else batch
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get("input_ids"), Tensor):
        raise InputError(
            "causal_lm_loss needs a batch with 'input_ids' [batch, tokens], or the ids themselves,"
            f" and was given a {type(batch).__name__}"
            + (f" with {listed(batch)}." if isinstance(batch, Mapping) else ".")
        )
    inputs = dict(inputs)
    ids = inputs["input_ids"]
    if ids.dim() != 2:
        raise InputError(f"input_ids have the shape {tuple(ids.shape)}: give [batch, tokens].")
    labels, shifted = inputs.pop("labels", None), inputs.pop("shift_labels", None)
    given: Tensor = ids
    if shifted is not None:
        given = shifted
    elif labels is not None:
        given = labels
    elif (mask := inputs.get("attention_mask")) is not None and mask.shape == ids.shape:
        given = ids.where(mask != 0, ignore_index)
    if given.shape != ids.shape:
        raise InputError(
            f"labels have the shape {tuple(given.shape)} and input_ids {tuple(ids.shape)}: give one"
            " label for each token; they are moved by one here."
        )
    if shifted is not None:
        return inputs, given
    return inputs, F.pad(given[:, 1:], (0, 1), value=ignore_index)


def _has(batch: Any, name: str) -> bool:
    return isinstance(batch, Mapping) and batch.get(name) is not None


def _head_of(model: nn.Module) -> nn.Module:
    getting = getattr(model, "get_output_embeddings", None)
    head = getting() if callable(getting) else None
    if not isinstance(head, nn.Module):
        raise InputError(
            f"{_name(model)} has no get_output_embeddings() that returns its head, as causal language"
            " models of transformers have: write the loss with anybatch.lm_loss(hidden, head, targets)."
        )
    return head


def _parts(head: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, Tensor)
    return weight, bias


def _logits_of(model: nn.Module, output: Any) -> Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise InputError(
            f"{_name(model)} returned a {type(output).__name__} without logits: causal_lm_loss is for"
            " causal language models, with return_dict=True. Write the loss with anybatch.lm_loss."
        )
    return logits


def _name(model: nn.Module) -> str:
    return type(model).__name__
