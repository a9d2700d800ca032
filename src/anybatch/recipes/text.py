"""Text: a decoder-only language model, trained on text that every machine has.

Memory in this task depends on the context length and the vocabulary. Without `data`, it reads the
sources of Python's standard library, so it needs no network and no package; with `data`, any file or
folder of text. The loss is weighted by tokens, not samples, and never stores all logits
(`anybatch.lm_loss`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.errors import worded
from anybatch.recipes.digits import decay_groups
from anybatch.recipes.options import ABOVE_ZERO, AT_LEAST_ZERO, COUNT, PART, check
from anybatch.recipes.schedules import scaled_lr, warmup_cosine
from anybatch.recipes.text_data import END, NUM_TOKENS, Windows, read
from anybatch.recipes.text_model import Decoder, Shape
from anybatch.task import Loss, Task
from anybatch.units import parse_bytes

REFERENCE_TOKENS = 4096
LARGEST_LR = 6e-3
TOKENS_TOLD = 300
_EVALUATIONS = 4
_TEMPERATURE = 0.8


def text(
    global_batch: int = 16,
    epochs: int = 1,
    steps: int | None = None,
    data: Path | None = None,
    limit: str = "2MiB",
    context: int = 256,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    tied: bool = True,
    dropout: float = 0.0,
    lr: float = 3e-3,
    weight_decay: float = 0.1,
    prompt: str = "def ",
    seed: int = 0,
) -> Task:
    """Predict each byte of a text from those before it, with a transformer.

    A token is a byte or the end of a text. A sample is a window of `context` tokens. The last 16th of
    the text is held out. `bits_per_byte` and `perplexity` are computed over all held-out tokens; each
    is predicted once, from the previous tokens in its window.

    Args:
        global_batch: windows per optimizer step.
        epochs: passes over the text.
        steps: optimizer steps, in place of epochs.
        data: file or folder of text. Default: the sources of Python's standard library.
        limit: maximum size of the text to read, such as 64MiB.
        context: tokens per window.
        width: size of the hidden vectors between blocks.
        depth: number of blocks.
        heads: number of attention heads per block.
        tied: whether the head shares its weight with the embedding.
        dropout: dropout probability after the embedding and after each branch of a block.
        lr: peak learning rate at 4096 tokens per step; see `scaled_lr` for other batch sizes.
        weight_decay: weight decay of AdamW, applied to weight matrices except the embedding.
        prompt: start of the text that is generated at the end.
        seed: random seed for the order of windows, initialization, dropout and the generated text.

    Raises:
        InputError: if options are out of range (names all of them), or the data is invalid.
    """
    shape = Shape(NUM_TOKENS, context, width, depth, heads, dropout, tied)
    ranges = {
        "context": (context, COUNT),
        "width": (width, COUNT),
        "depth": (depth, COUNT),
        "lr": (lr, ABOVE_ZERO),
        "weight_decay": (weight_decay, AT_LEAST_ZERO),
        "dropout": (dropout, PART),
    }
    check("text", ranges, _faults_of_heads(width, heads))
    source = read(data, parse_bytes(limit, worded("limit", "-s limit")))
    train = Windows(source.train, context, "the text to train on")
    valid = Windows(source.held_out, context, "the text that is held out")
    batch = max(1, min(global_batch, len(train)))  # a value below 1 is reported by Task
    rate = scaled_lr(lr, batch * context, REFERENCE_TOKENS, LARGEST_LR)
    return Task(
        model=partial(Decoder, shape),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=rate, betas=(0.9, 0.95)),
        parameters=partial(decay_groups, weight_decay=weight_decay),
        schedule=warmup_cosine(0.1, floor=0.1),
        clip_norm=1.0,
        train=train,
        valid=valid,
        metrics=ab.Metrics(
            {"perplexity": TokenScore(perplexity), "accuracy": TokenScore(accuracy)}, measured
        ),
        global_batch=global_batch,
        epochs=epochs if steps is None else None,
        steps=steps,
        evaluate_every=steps_between(len(train), global_batch, epochs, steps),
        tell=partial(report, context=context, prompt=prompt, seed=seed, origin=source.origin),
        seed=seed,
        name="text",
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """Cross-entropy in nats, summed over the target tokens of windows `[B, context + 1]`, weighted by
    their number; and bits per byte, with the number of target bytes `[B]`."""
    inputs, targets = _divided(batch[0])
    nats, counted = model(inputs, targets)
    bits = nats.detach() / math.log(2)
    return Loss(nats, counted, metrics={"bits_per_byte": (bits, batch[1].sum())})


def measured(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Returns nats, number of targets, and number of targets predicted correctly, for `TokenScore`."""
    inputs, targets = _divided(batch[0])
    return model(inputs, targets, with_right=True)


def _divided(windows: Tensor) -> tuple[Tensor, Tensor]:
    windows = windows.long()
    return windows[:, :-1].clamp(min=0), windows[:, 1:]  # IGNORED is not a valid input token


class TokenScore:
    """A metric over all tokens of an evaluation. It accumulates sums and computes the value from
    the totals, so it is exact for any division into batches and ranks.

    Args:
        figure: function of the totals of nats, tokens and correct tokens, in this order.
    """

    def __init__(self, figure: Callable[[float, float, float], float]) -> None:
        self._figure = figure
        self.reset()

    def update(self, *sums: Tensor | float) -> None:
        """Adds the sums of one batch."""
        self._sums = [a + float(b) for a, b in zip(self._sums, sums, strict=True)]

    def merge_state(self, others: list[Self]) -> None:
        """Adds the sums of other ranks."""
        for other in others:
            self.update(*other._sums)

    def compute(self) -> float:
        """Returns the value, or NaN if there are no tokens."""
        return self._figure(*self._sums) if self._sums[1] else math.nan

    def reset(self) -> None:
        """Sets all sums to zero."""
        self._sums = [0.0, 0.0, 0.0]


def perplexity(nats: float, tokens: float, _right: float) -> float:
    """Returns the exponential of the mean cross-entropy, or infinity if it overflows."""
    try:
        return math.exp(nats / tokens)
    except OverflowError:
        return math.inf


def accuracy(_nats: float, tokens: float, right: float) -> float:
    """Returns the fraction of correct tokens."""
    return right / tokens


def steps_between(num_samples: int, global_batch: int, epochs: int, steps: int | None) -> int:
    """Returns the number of steps between evaluations, for about four per run, and at least one per
    epoch."""
    batch = max(1, min(global_batch, num_samples))  # a value below 1 is reported by Task
    epoch_steps = -(-num_samples // batch)
    return max(1, min(epoch_steps, -(-(steps or epoch_steps * epochs) // _EVALUATIONS)))


# ------------------------------------------------------------------------------ text at the end


def report(model: nn.Module, context: int, prompt: str, seed: int, origin: str) -> str:
    """Returns a report: the origin of the text, and a text that the model generates from `prompt`."""
    begin = list(prompt.encode(errors="replace")) or [END]
    made = bytes(generated(model, begin, END, context, seed)).decode(errors="replace")
    return (
        f"The text: {origin}. What the model writes after {prompt!r} (at temperature"
        f" {_TEMPERATURE}, seed {seed}):\n\n{printable(prompt + made)}\n"
    )


def printable(text: str) -> str:
    """Replaces control characters in `text`, and removes whitespace at its ends."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text).strip()


@torch.no_grad()
def generated(
    model: nn.Module, begin: Sequence[int], end: int, context: int, seed: int
) -> Iterator[int]:
    """Yields tokens sampled one by one from `model` (in evaluation mode), starting after `begin`, until
    `end` or 300 tokens. Deterministic for a seed, except for rounding differences between devices."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(begin)
    for _ in range(TOKENS_TOLD):
        logits = model(torch.tensor([tokens[-context:]], device=device))[0].float().cpu()
        chances = torch.softmax(logits / _TEMPERATURE, dim=0)
        token = int(torch.multinomial(chances, 1, generator=generator))
        if token == end:
            return
        tokens.append(token)
        yield token


def _faults_of_heads(width: int, heads: int) -> Iterator[str]:
    if heads < 1:
        yield f"heads is {heads!r}; give a whole number of at least 1"
    elif width >= 1 and width % heads:
        yield f"width is {width} and heads {heads}; give a width that the heads divide evenly"
    elif width >= 1 and width // heads % 2:
        yield (
            f"width is {width} and heads {heads}, {width // heads} features each; give each head an"
            " even number of them, since positions turn them in pairs"
        )
