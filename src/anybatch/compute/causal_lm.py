"""causal_lm_loss: the loss of a `*ForCausalLM` model, without its logits and without rewriting it.

Such a model ends in a head, and its `forward(labels=...)` makes logits for every token. Here the
head's `forward` is replaced for the length of one call: where the model would make logits, it computes
the loss (`lm_loss`). So whatever stands before the head, hooks and weights that are gathered from other
ranks for the length of the forward pass included, works as it always does.

What stands behind the head would be lost, and a wrong loss must never be silent. So scaled and bounded
logits are known by the model's configuration, and the first batch that a model sees is checked on a
few of its tokens against the model's own logits and its own loss. A model that does not agree computes
its logits itself, and says so once.

The model is known by the attributes that transformers gives it; transformers is not imported.
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
    """Loss of a causal language model of transformers, or one with its interface: the sum over the
    tokens that count, and their number. To be given to a task as it is, or as a `functools.partial`.

    The model is called once with everything in the batch but the labels. It has
    `get_output_embeddings()`, which returns its head. Where the head alone does not explain the
    model's logits, or these its loss (a head with an adapter, an auxiliary loss of experts), the loss
    is computed from the model's logits, or taken from the model and weighed by its tokens, with a
    warning.

    Args:
        model: `(input_ids=..., ...) -> output` with `.logits` `[batch, tokens, vocabulary]`.
        batch: a mapping with `input_ids` `[batch, tokens]` and what else the model takes, or the ids
            themselves. `labels`, of the same shape, are moved by one here, as in transformers, or are
            `shift_labels`, which are so already. Without labels, each token is predicted that
            `attention_mask` does not leave out.
        ignore_index: label that counts nothing.
        label_smoothing: as in `lm_loss`; so are `z_loss`, `chunk` and `backend`.

    Raises:
        DataError: a label, or (seen on a CPU alone) a token, is no word of the vocabulary.
        InputError: a batch without ids, labels that were moved by one before they came here, a model
            without `get_output_embeddings()`, or a smoothed loss of a model that keeps its loss to
            itself.
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
    """What the model does to its logits behind the head: `cap * tanh(scale * logits / cap)`."""

    scale: float
    softcap: float | None

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits.float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _finish_of(model: nn.Module) -> _Finish:
    """As configurations of transformers name it: a factor (Cohere), a divisor (Granite), a bound
    (Gemma 2)."""
    config = getattr(model, "config", None)
    reading = getattr(config, "get_text_config", None)  # of a model that reads images too
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
    """The loss in place of the logits."""
    finish = _finish_of(model)
    found: list[Loss] = []

    def at_head(hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        weight, bias = _parts(head)
        if finish.scale != 1.0:
            hidden = hidden * finish.scale
            bias = None if bias is None else bias * finish.scale
        found.append(lm_loss(hidden, weight, targets, bias=bias, softcap=finish.softcap, **options))
        # In place of logits: a zero for each token, and a way for backward into the model's end.
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
    # Modules that gather weights for backward wait for a gradient of what forward returned.
    return Loss(found[0].sum + _logits_of(model, output).sum() * 0, found[0].weight)


def _through_logits(
    model: nn.Module, inputs: dict[str, Any], targets: Tensor, options: dict[str, Any]
) -> Loss:
    """All logits, by the model's own forward."""
    logits = _logits_of(model, model(**inputs))
    plain = {n: options[n] for n in ("ignore_index", "label_smoothing", "z_loss")}
    return loss_of_logits(logits, targets, **plain)


def _through_loss(
    model: nn.Module, inputs: dict[str, Any], targets: Tensor, options: dict[str, Any]
) -> Loss:
    """The model's mean, times the number of tokens that it is over."""
    if options["label_smoothing"] or options["z_loss"]:
        raise InputError(
            f"the loss of {_name(model)} is more than cross-entropy over its logits, so"
            " label_smoothing and z_loss cannot be put into it: leave them out, or write the loss."
        )
    counted = targets != options["ignore_index"]
    labels = F.pad(targets.where(counted, -100)[..., :-1], (1, 0), value=-100)
    return weighed(model, inputs, labels, counted.sum())


# ---------------------------------------------------------------------------------- which way

_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[int, Way]] = weakref.WeakKeyDictionary()
"""For each model, its head (an adapter may come later) and the way that was found right."""


def _way_of(model: nn.Module, head: nn.Module, inputs: dict[str, Any]) -> Way:
    ids = inputs["input_ids"]
    if _is_new(model, head, ids):
        _KNOWN[model] = id(head), _check(model, head, ids[:1, :_CHECKED_TOKENS])
    if (known := _KNOWN.get(model)) is not None and known[0] == id(head):
        return known[1]
    return "head" if is_plain_head(head) else "logits"  # nothing that could be compared


def _is_new(model: nn.Module, head: nn.Module, ids: Tensor) -> bool:
    """Whether this is the first batch of `model`, with this head, that has something to compare."""
    if isinstance(ids, FakeTensor) or ids.size(0) < 1 or ids.size(1) < 2:
        return False
    known = _KNOWN.get(model)
    return known is None or known[0] != id(head)


@torch.no_grad()
def _check(model: nn.Module, head: nn.Module, ids: Tensor) -> Way:
    """Run the model on a few tokens, with hidden states so large that a bound would show, and compare.
    Reads values, so it waits for the device, once."""
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


def _tell(sentence: str) -> None:
    warnings.warn(f"causal_lm_loss: {sentence}", UserWarning, stacklevel=4)


# --------------------------------------------------------------------------------- batch, model


def _read(batch: Any, ignore_index: int) -> tuple[dict[str, Any], Tensor]:
    """What the model is called with, and the target of each of its positions."""
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
