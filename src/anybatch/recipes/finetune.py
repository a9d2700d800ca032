"""Fine-tuning: a language model or a classifier of transformers, from a folder, on data of one's own.

What stands in the way of the batch that one wants is memory for logits, for sequences of unequal
length, and for the optimizer's state of weights that hardly move. So the loss never holds the logits
(`anybatch.causal_lm_loss`), micro-batches are padded to their own longest sample, and with `lora_rank`
only adapters are trained. Everything is read from folders; nothing is downloaded.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.errors import InputError
from anybatch.recipes.finetune_data import Data, read
from anybatch.recipes.finetune_model import (
    ALL_LINEAR,
    LONGEST,
    Kind,
    Lora,
    Shape,
    Source,
    build,
    checked,
    find,
    num_positions,
)
from anybatch.recipes.finetune_samples import (
    LABELLED,
    Encoded,
    Form,
    Sample,
    Samples,
    classes_of,
    encoded,
    form_of,
    padded,
)
from anybatch.recipes.finetune_tell import Told
from anybatch.recipes.finetune_tokens import Tokens, tokens_of
from anybatch.recipes.ranges import ABOVE_ZERO, AT_LEAST_ZERO, PART, Range, check
from anybatch.recipes.schedules import warmup_cosine
from anybatch.recipes.text import TokenScore, decay_groups, perplexity, steps_between
from anybatch.task import Loss, Task

LORA_LR, WHOLE_LR, RANDOM_LR = 2e-4, 2e-5, 1e-3
"""Peak learning rates where none is given: of adapters, of weights that were trained, of random
ones."""


def finetune(
    model: Path,
    data: Path,
    valid: Path | None = None,
    task: Literal["causal-lm", "classification"] | None = None,
    global_batch: int = 16,
    epochs: int = 1,
    steps: int | None = None,
    max_length: int | None = None,
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    lora_dropout: float = 0.0,
    lora_targets: str = ALL_LINEAR,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    lr: float | None = None,
    warmup: float = 0.1,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    prompt: str | None = None,
    save: Path | None = None,
    seed: int = 0,
) -> Task:
    """Fine-tune a causal language model or a classifier of Hugging Face's transformers.

    The model is a folder as save_pretrained writes it; with a config.json alone it begins with random
    weights. A row of data has a text, a prompt and its completion, a text and its label, or input_ids.
    Nothing is downloaded.

    Args:
        model: folder with config.json, and weights and tokenizer if there are any.
        data: file (.jsonl, .json, .csv, .tsv, .txt) or folder of such files, or one that save_to_disk
            of datasets wrote.
        valid: the same, held out; without it a part of the data, one row in 16 where none is named so.
        task: causal-lm or classification; what the columns of the data tell where it is not given.
        global_batch: samples per optimizer step.
        epochs: passes over the data.
        steps: optimizer steps, in place of epochs.
        max_length: tokens of a sample at most, the rest is cut off; as many as the model takes, up to
            1024, where it is not given.
        lora_rank: of adapters, which are then all that is trained (needs peft); 0: all weights are.
        lora_alpha: factor of the adapters, divided by their rank; twice the rank where it is not given.
        lora_dropout: probability to drop a feature before an adapter.
        lora_targets: names of linear layers, separated by commas, or all-linear.
        dtype: of the weights as they are held. What is computed in is the precision of the plan.
        lr: peak learning rate; 2e-4 for adapters, 2e-5 for all weights, 1e-3 for random ones, where it
            is not given.
        warmup: part of training in which the learning rate rises; then it falls to zero by a cosine.
        weight_decay: of AdamW, on matrices but the embedding.
        clip: largest norm of the gradient.
        prompt: what the text that is shown at the end begins with; a held-out one where it is not
            given.
        save: folder to write the trained model to, as from_pretrained reads it; of adapters, these
            alone.
        seed: of the order of samples, of new weights and of dropout.

    Raises:
        InputError: naming every option out of range, or what is wrong with model or data.
    """
    names = tuple(name for part in lora_targets.split(",") if (name := part.strip()))
    alpha = 2 * lora_rank if lora_alpha is None else lora_alpha
    lora = Lora(lora_rank, alpha, lora_dropout, names) if lora_rank else None
    ranges = {
        "lr": (lr, ABOVE_ZERO),
        "clip": (clip, ABOVE_ZERO),
        "warmup": (warmup, Range("a part of training, 0 to 1", _is_part)),
        "weight_decay": (weight_decay, AT_LEAST_ZERO),
        "max_length": (max_length, Range("at least 2 tokens: one predicts the next", _is_two)),
        "lora_rank": (
            lora_rank,
            Range("a whole number above zero, or 0 for no adapters", _is_count),
        ),
    }
    if lora_rank > 0:
        ranges |= {"lora_alpha": (alpha, ABOVE_ZERO), "lora_dropout": (lora_dropout, PART)}
    check("finetune", ranges, _faults(lora, save))
    rows, source = read(data, valid), find(model)
    form = form_of(rows.train, task)
    kind: Kind = "classification" if form in LABELLED else "causal-lm"
    classes: list[str] = []
    if kind == "classification":
        source, classes = _with_classes(source, rows)
    shape = Shape(source, kind, getattr(torch, dtype), lora)
    words = checked(shape)
    tokens = _tokens(source, words, form)
    pad = tokens.pad if tokens is not None else 0
    if kind == "classification" and source.config.pad_token_id is None:
        source.config.pad_token_id = pad  # by which a decoder finds the last token of each row
    if tokens is not None and not source.has_weights:  # what it is saved with, to be read again
        source.config.bos_token_id, source.config.eos_token_id = tokens.begin, tokens.end
    longest = _longest(max_length, source, tokens)
    make = partial(encoded, tokens=tokens, longest=longest, words=words, classes=classes)
    train = make(rows.train, form)
    held = None if rows.held_out is None else make(rows.held_out, form)
    return Task(
        model=partial(build, shape),
        loss=ab.causal_lm_loss if kind == "causal-lm" else loss_of_classes,
        optimizer=partial(torch.optim.AdamW, lr=_default_lr(shape) if lr is None else lr),
        parameters=partial(decay_groups, weight_decay=weight_decay),
        schedule=warmup_cosine(warmup),
        clip_norm=clip,
        train=train.samples,
        valid=None if held is None else held.samples,
        collate=partial(padded, pad=pad),
        lengths=lengths,
        metrics=ab.Metrics({"perplexity": TokenScore(perplexity)}, measured)
        if kind == "causal-lm"
        else None,
        global_batch=global_batch,
        epochs=epochs if steps is None else None,
        steps=steps,
        evaluate_every=steps_between(len(train.samples), global_batch, epochs, steps),
        tell=Told(
            origin=_origin(rows, source, tokens, (train, held), longest),
            tokens=tokens,
            samples=train.samples if held is None else held.samples,
            classes=classes,
            prompt=prompt,
            longest=longest,
            save=save,
        ),
        seed=seed,
        name="finetune",
    )


def measured(model: nn.Module, batch: Sample) -> tuple[Tensor, ...]:
    """Nats and number of tokens, for `TokenScore`; how many were right is not counted."""
    found = ab.causal_lm_loss(model, batch)
    weight = torch.as_tensor(found.weight)
    return found.sum, weight, torch.zeros_like(weight)


def loss_of_classes(model: nn.Module, batch: Sample) -> Loss:
    """Cross-entropy of logits `[batch, classes]` against labels `[batch]`, and the accuracy."""
    labels = batch["labels"]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    right = (logits.detach().argmax(dim=1) == labels).sum()
    total = F.cross_entropy(logits, labels, reduction="sum")
    return Loss(total, weight=len(labels), metrics={"accuracy": right})


def lengths(samples: Samples) -> list[int]:
    """Tokens of each sample: what a padded micro-batch costs goes by the longest."""
    return samples.lengths


# -------------------------------------------------------------------------------- model and tokens


def _default_lr(shape: Shape) -> float:
    if not shape.source.has_weights:
        return RANDOM_LR
    return WHOLE_LR if shape.lora is None else LORA_LR


def _with_classes(source: Source, rows: Data) -> tuple[Source, list[str]]:
    """The model with a head for the classes of the data, and their names; those of the model itself
    where it is a classifier already."""
    config = copy.deepcopy(source.config)
    if any("ForSequenceClassification" in name for name in config.architectures or ()):
        return source._replace(config=config), [
            config.id2label[i] for i in range(config.num_labels)
        ]
    tables = [rows.train] if rows.held_out is None else [rows.train, rows.held_out]
    classes = classes_of(tables)
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: number for number, name in enumerate(classes)}
    return source._replace(config=config), classes


def _tokens(source: Source, words: int, form: Form) -> Tokens | None:
    """Those of the model; None where the data has tokens and the folder tells nothing of them."""
    try:
        return tokens_of(source, words)
    except InputError:
        if form in ("tokens", "labelled tokens"):
            return None
        raise


def _longest(wanted: int | None, source: Source, tokens: Tokens | None) -> int:
    """Tokens of a sample at most. Raises `InputError` for more than the model takes."""
    limits = [num_positions(source.config), tokens.longest if tokens is not None else None]
    most = min((limit for limit in limits if limit is not None), default=None)
    if wanted is None:
        return LONGEST if most is None else min(LONGEST, most)
    if most is not None and wanted > most:
        raise InputError(
            f"max_length is {wanted}, and the model in {str(source.folder)!r} takes {most} tokens: give"
            " so many or fewer."
        )
    return wanted


def _origin(
    rows: Data, source: Source, tokens: Tokens | None, made: Sequence[Encoded | None], longest: int
) -> str:
    """Where data and model are from, and what was cut."""
    num_cut = sum(one.num_cut for one in made if one is not None)
    cut = f"; {num_cut:,} of them cut to {longest} tokens" if num_cut else ""
    if num_cut:
        warnings.warn(
            f"{num_cut:,} samples of {rows.train.files[0]!r} have more than {longest} tokens, and are"
            " cut:"
            " max_length=N takes more of them, where the model can.",
            stacklevel=3,
        )
    weights = "with its weights" if source.has_weights else "with random weights"
    read_as = "" if tokens is None else f", read as {tokens.what}"
    return f"The model: {source.folder}, {weights}. The data: {rows.origin}{cut}{read_as}."


def _is_part(warmup: float) -> bool:
    return 0 <= warmup <= 1


def _is_two(length: int) -> bool:
    return length >= 2


def _is_count(rank: int) -> bool:
    return rank >= 0


def _faults(lora: Lora | None, save: Path | None) -> Iterator[str]:
    if lora is not None and not lora.targets:
        yield f"lora_targets is empty; name linear layers, or give {ALL_LINEAR}"
    if save is not None and save.exists() and not save.is_dir():
        yield f"save is {str(save)!r}, which is a file; give a folder"
