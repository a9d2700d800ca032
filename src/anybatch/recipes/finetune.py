"""Fine-tuning: a language model or a classifier of transformers, from a folder, on data of one's own.

What stands in the way of the batch that one wants is memory for logits, for sequences of unequal
length, and for the optimizer's state of weights that hardly move. So the loss never holds the logits
(`anybatch.causal_lm_loss`), micro-batches are padded to their own longest sample, and with `lora_rank`
only adapters are trained. Everything is read from folders; nothing is downloaded.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.errors import InputError
from anybatch.recipes.digits import decay_groups
from anybatch.recipes.finetune_data import (
    IGNORED,
    Data,
    Sample,
    Samples,
    classes_of,
    encoded,
    kind_of,
    padded,
    read,
)
from anybatch.recipes.finetune_model import (
    ALL_LINEAR,
    Shape,
    Source,
    build,
    checked,
    find,
    libraries,
    num_positions,
    tokenizer_of,
)
from anybatch.recipes.options import ABOVE_ZERO, AT_LEAST_ZERO, PART, Range, check
from anybatch.recipes.quantized import Base, num_weights
from anybatch.recipes.schedules import warmup_cosine
from anybatch.recipes.text import TokenScore, perplexity, printable, steps_between
from anybatch.task import Loss, Task

LORA_LR, WHOLE_LR, RANDOM_LR = 2e-4, 2e-5, 1e-3
"""Peak learning rates where none is given: of adapters, of weights that were trained, of random
ones."""

LONGEST = 1024
"""Tokens of a sample at most, unless more are asked for."""

TOKENS_TOLD = 100
_FIRST_TOKENS = 8  # of a held-out text, which the model goes on from


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
    base: Base | None = None,
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
    weights. A row of data has a text, a prompt and its completion, or a text and its label. Nothing is
    downloaded.

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
        base: int8 or int4: how the frozen weights under adapters are held; in dtype where it is not
            given.
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
    names = [name for part in lora_targets.split(",") if (name := part.strip())]
    alpha = 2 * lora_rank if lora_alpha is None else lora_alpha
    lora = {
        "r": lora_rank,
        "lora_alpha": alpha,
        "lora_dropout": lora_dropout,
        "target_modules": ALL_LINEAR if names == [ALL_LINEAR] else names,
    }
    ranges = {
        "lr": (lr, ABOVE_ZERO),
        "clip": (clip, ABOVE_ZERO),
        "warmup": (warmup, Range("a part of training, 0 to 1", lambda part: 0 <= part <= 1)),
        "weight_decay": (weight_decay, AT_LEAST_ZERO),
        "max_length": (
            max_length,
            Range("at least 2 tokens: one predicts the next", lambda length: length >= 2),
        ),
        "lora_rank": (
            lora_rank,
            Range("a whole number above zero, or 0 for no adapters", lambda rank: rank >= 0)
            if base is None
            else Range(
                "a rank above zero with base, whose weights are not trained", lambda rank: rank > 0
            ),
        ),
    }
    if lora_rank > 0:
        ranges |= {
            "lora_alpha": (alpha, ABOVE_ZERO),
            "lora_dropout": (lora_dropout, PART),
            "lora_targets": (names, Range(f"names of linear layers, or {ALL_LINEAR}", bool)),
        }
    is_folder = Range("a folder, and not a file", lambda path: not Path(path).is_file())
    check("finetune", ranges | {"save": (save and str(save), is_folder)})
    rows, source = read(data, valid), find(model)
    kind = kind_of(rows.train, task)
    source, classes = _with_classes(source, rows) if kind == "classification" else (source, [])
    shape = Shape(source, kind, getattr(torch, dtype), lora if lora_rank else None, base)
    tokenizer = tokenizer_of(source, checked(shape))
    pad = _configured(source, tokenizer)
    longest = _longest(max_length, source, tokenizer)
    make = partial(encoded, kind=kind, tokenizer=tokenizer, longest=longest, classes=classes)
    train, num_cut = make(rows.train)
    held, held_cut = (None, 0) if rows.held_out is None else make(rows.held_out)
    if num_cut := num_cut + held_cut:
        warnings.warn(
            f"{num_cut:,} samples of {rows.train.source!r} have more than {longest} tokens, and are"
            " cut: max_length=N takes more of them, where the model can.",
            stacklevel=2,
        )
    cut = f"; {num_cut:,} of them cut to {longest} tokens" if num_cut else ""
    weights = "with its weights" if source.has_weights else "with random weights"
    if lr is None:
        lr = (LORA_LR if lora_rank else WHOLE_LR) if source.has_weights else RANDOM_LR
    return Task(
        model=partial(build, shape),
        loss=ab.causal_lm_loss if kind == "causal-lm" else loss_of_classes,
        optimizer=partial(torch.optim.AdamW, lr=lr),
        parameters=partial(decay_groups, weight_decay=weight_decay),
        schedule=warmup_cosine(warmup),
        clip_norm=clip,
        train=train,
        valid=held,
        collate=partial(padded, pad=pad),
        lengths=lengths,
        metrics=ab.Metrics({"perplexity": TokenScore(perplexity)}, measured)
        if kind == "causal-lm"
        else None,
        global_batch=global_batch,
        epochs=epochs if steps is None else None,
        steps=steps,
        evaluate_every=steps_between(len(train), global_batch, epochs, steps),
        tell=partial(
            told,
            origin=f"The model: {source.folder}, {weights}. The data: {rows.origin}{cut}.",
            tokenizer=tokenizer,
            samples=(train if held is None else held) if kind == "causal-lm" else None,
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


def _with_classes(source: Source, rows: Data) -> tuple[Source, list[str]]:
    """The model with a head for the classes of the data, and their names; those of the model itself
    where it is a classifier already."""
    config = copy.deepcopy(source.config)
    if any("ForSequenceClassification" in name for name in config.architectures or ()):
        classes = [config.id2label[i] for i in range(config.num_labels)]
    else:
        classes = classes_of([rows.train] if rows.held_out is None else [rows.train, rows.held_out])
        config.id2label = dict(enumerate(classes))
        config.label2id = {name: number for number, name in enumerate(classes)}
    return source._replace(config=config), classes


def _configured(source: Source, tokenizer: Any) -> int:
    """Lets the configuration know the special tokens. Returns the one that fills up what is shorter: it
    is masked, so which one does not matter."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad = next(token for token in ids if token is not None)
    if not source.has_weights:  # what it is saved with, to be read again
        source.config.bos_token_id = tokenizer.bos_token_id
        source.config.eos_token_id = tokenizer.eos_token_id
    if source.config.pad_token_id is None:
        source.config.pad_token_id = pad  # by which a decoder finds the last token of each row
    return pad


def _longest(wanted: int | None, source: Source, tokenizer: Any) -> int:
    """Tokens of a sample at most. Raises `InputError` for more than the model takes."""
    limits = [num_positions(source.config), tokenizer.model_max_length]
    most = min((limit for limit in limits if limit is not None), default=1 << 62)
    if wanted is not None and wanted > most:
        raise InputError(
            f"max_length is {wanted}, and the model in {str(source.folder)!r} takes {most} tokens: give"
            " so many or fewer."
        )
    return min(LONGEST, most) if wanted is None else wanted


# ------------------------------------------------------------------------- what is told in the end


def told(
    model: Any,
    origin: str,
    tokenizer: Any,
    samples: Samples | None,
    prompt: str | None,
    longest: int,
    save: Path | None,
) -> str:
    """What was trained on what, and how a language model goes on from a prompt or one of the held-out
    `samples`; writes the model to `save`, as from_pretrained reads it."""
    total = num_weights(model)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    parts = [f"{origin} Trained: {trained:,} of {total:,} parameters."]
    if save is not None:
        if hasattr(model, "peft_config"):
            ab.save_adapters(model, save)
            parts.append(f"The adapters are in {save}.")
        else:
            model.save_pretrained(save)
            parts.append(f"The model is in {save}.")
        tokenizer.save_pretrained(save)
    if samples is not None:
        parts.append(_written(model, tokenizer, samples, prompt, longest))
    return "\n".join(parts) + "\n"


@torch.no_grad()
def _written(model: Any, tokenizer: Any, samples: Samples, prompt: str | None, longest: int) -> str:
    """The likeliest tokens after the prompt, or after the beginning of a sample: what comes before its
    first label, or a few tokens."""
    if prompt is not None:
        begin = tokenizer(prompt)["input_ids"] or [tokenizer.pad_token_id or 0]
    else:
        begin, labels = (samples[0][key].tolist() for key in ("input_ids", "labels"))
        first = next(i for i, label in enumerate(labels) if label != IGNORED)
        begin = begin[: first or min(_FIRST_TOKENS, len(begin) - 1)]
    begin = begin[: longest - 1]
    options = libraries().GenerationConfig(
        max_new_tokens=min(TOKENS_TOLD, longest - len(begin)),
        do_sample=False,
        pad_token_id=model.config.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    ids = torch.tensor([begin], device=next(model.parameters()).device)
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=options
    )[0]
    before, after = (
        printable(tokenizer.decode(part, skip_special_tokens=True))
        for part in (begin, made[len(begin) :].tolist())
    )
    return f"What the model writes after {before!r}:\n\n{after}"
