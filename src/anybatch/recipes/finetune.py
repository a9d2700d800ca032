"""Fine-tuning of a transformers language model or classifier, from a local folder, on the user's data.

The batch size is limited by the memory of the logits, of sequences of unequal length, and of optimizer
states for weights that hardly change. So the loss never stores all logits (`anybatch.causal_lm_loss`),
micro-batches are padded to their longest sample, and with `lora_rank` only adapters are trained. All
files are read from folders; nothing is downloaded.
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
from anybatch.errors import InputError, worded
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
"""Default peak learning rates: for adapters, for all weights of a pretrained model, and for random
weights."""

LONGEST = 1024
"""Default of `max_length`, if the model's limit is not lower."""

TOKENS_TOLD = 100
_FIRST_TOKENS = 8  # of a held-out text, used as the prompt


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
    """Fine-tune a causal language model or a classifier from Hugging Face's transformers.

    The model is read from a folder in the format of save_pretrained; with a config.json only, training
    starts from random weights. A row of data has a text, a prompt and a completion, or a text and a
    label. Nothing is downloaded.

    Args:
        model: folder with config.json and, optionally, weights and a tokenizer.
        data: file (.jsonl, .json, .csv, .tsv, .txt), folder of such files, or folder written by
            save_to_disk of datasets.
        valid: held-out data, in the same formats. Default: a held-out part in data, such as a file
            called valid, else one row in 16.
        task: causal-lm or classification. Default: determined from the columns of the data.
        global_batch: samples per optimizer step.
        epochs: passes over the data.
        steps: optimizer steps, in place of epochs.
        max_length: maximum tokens per sample; longer samples are truncated. Default: the model's limit,
            but at most 1024.
        lora_rank: rank of the adapters, which are then the only trained weights (needs peft); 0 trains
            all weights.
        lora_alpha: scale of the adapters, divided by their rank. Default: twice the rank.
        lora_dropout: dropout probability before an adapter.
        lora_targets: names of linear layers, separated by commas, or all-linear.
        base: storage format of the frozen weights under adapters, int8 or nf4 (needs
            torchao). Default: dtype.
        dtype: storage type of the weights. The compute type is the precision of the plan.
        lr: peak learning rate. Default: 2e-4 for adapters, 2e-5 for all weights of a pretrained model,
            1e-3 for random weights.
        warmup: fraction of training in which the learning rate rises; then it decays to zero by a
            cosine.
        weight_decay: weight decay of AdamW, applied to matrices except the embedding.
        clip: maximum norm of the gradient.
        prompt: start of the text that is generated at the end. Default: the start of a held-out text.
        save: folder to write the trained model to, for from_pretrained; with adapters, these only.
        seed: random seed for the order of samples, new weights and dropout.

    Raises:
        InputError: if options are out of range (names all of them), or the model or data is invalid.
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
    if save is not None:
        _check_free(save, model, adapters=lora_rank > 0)
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
            f" cut: {worded('max_length=N', '-s max_length=N')} takes more of them, where the"
            " model can.",
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
            report,
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
    """Returns nats, number of tokens, and 0 in place of the correct tokens, for `TokenScore`."""
    found = ab.causal_lm_loss(model, batch)
    weight = torch.as_tensor(found.weight)
    return found.sum, weight, torch.zeros_like(weight)


def loss_of_classes(model: nn.Module, batch: Sample) -> Loss:
    """Cross-entropy and accuracy, for logits `[batch, classes]` and labels `[batch]`."""
    labels = batch["labels"]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    right = (logits.detach().argmax(dim=1) == labels).sum()
    total = F.cross_entropy(logits, labels, reduction="sum")
    return Loss(total, weight=len(labels), metrics={"accuracy": right})


def lengths(samples: Samples) -> list[int]:
    """Returns the tokens of each sample; the longest determines the cost of a padded micro-batch."""
    return samples.lengths


def _with_classes(source: Source, rows: Data) -> tuple[Source, list[str]]:
    """Returns `source` configured with a head for the classes of the data, and the class names. If the
    model is already a classifier, its own classes are used."""
    config = copy.deepcopy(source.config)
    if any("ForSequenceClassification" in name for name in config.architectures or ()):
        classes = [config.id2label[i] for i in range(config.num_labels)]
    else:
        classes = classes_of([rows.train] if rows.held_out is None else [rows.train, rows.held_out])
        config.id2label = dict(enumerate(classes))
        config.label2id = {name: number for number, name in enumerate(classes)}
    return source._replace(config=config), classes


def _configured(source: Source, tokenizer: Any) -> int:
    """Sets the special tokens in the model's configuration. Returns the padding token. Padding is
    masked, so the choice does not matter."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad = next(token for token in ids if token is not None)
    if not source.has_weights:  # saved with the model
        source.config.bos_token_id = tokenizer.bos_token_id
        source.config.eos_token_id = tokenizer.eos_token_id
    if source.config.pad_token_id is None:
        source.config.pad_token_id = pad  # a decoder uses it to find the last token of each row
    return pad


def _longest(wanted: int | None, source: Source, tokenizer: Any) -> int:
    """Returns the maximum tokens per sample. Raises `InputError` if `wanted` is above the model's
    limit."""
    limits = [num_positions(source.config), tokenizer.model_max_length]
    most = min((limit for limit in limits if limit is not None), default=1 << 62)
    if wanted is not None and wanted > most:
        raise InputError(
            f"max_length is {wanted}, and the model in {str(source.folder)!r} takes {most} tokens: give"
            " so many or fewer."
        )
    return min(LONGEST, most) if wanted is None else wanted


# ----------------------------------------------------------------------------- report at the end


def report(
    model: Any,
    origin: str,
    tokenizer: Any,
    samples: Samples | None,
    prompt: str | None,
    longest: int,
    save: Path | None,
) -> str:
    """Returns a report: model, data and, for a language model, a text generated from the prompt or the
    start of one of `samples`. Writes the model to `save`, for from_pretrained."""
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


def _check_free(save: Path, model: Path, adapters: bool) -> None:
    """Raises `InputError` if saving to `save` would replace the base, or leave a folder with both a
    model and adapters, which from_pretrained would put on top of it."""
    if save.resolve() == model.resolve():
        raise InputError(
            f"save is {str(save)!r}, the folder of the model itself: give another one."
        )
    others = "*.safetensors" if adapters else "adapter_config.json"
    found = [path for path in save.glob(others) if not path.name.startswith("adapter_model")]
    if found:
        kind = "a whole model, and adapters" if adapters else "adapters, and a whole model"
        raise InputError(
            f"save is {str(save)!r}, which holds {kind} would be added ({found[0].name}): give"
            " another folder, or delete what is there."
        )


@torch.no_grad()
def _written(model: Any, tokenizer: Any, samples: Samples, prompt: str | None, longest: int) -> str:
    """Generates text greedily from the prompt or from the start of a sample: the tokens before its
    first label, or a few tokens if there are none."""
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
