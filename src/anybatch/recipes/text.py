"""Text: a decoder-only language model, trained on text that every machine has.

The task on which memory is a matter of sequences and of the vocabulary. Without `data` it reads the
sources of Python's own library, so it needs no network and no package; with `data` any file or
folder of text. Its loss counts tokens, not samples, and never holds the logits (`anybatch.lm_loss`).
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

    A token is a byte, or the end of a text. A sample is a window of `context` tokens. The last 16th of
    the text is held out. `bits_per_byte` and `perplexity` are over all held-out tokens, each predicted
    once, from those before it in its window.

    Args:
        global_batch: windows per optimizer step.
        epochs: passes over the text.
        steps: optimizer steps, in place of epochs.
        data: file or folder of text (UTF-8); without it the sources of Python's own library.
        limit: bytes of text to read at most, such as 64MiB.
        context: tokens of a window.
        width: of the vectors between the blocks.
        depth: number of blocks.
        heads: of attention in each block.
        tied: whether the head is the embedding.
        dropout: probability to drop a feature of the embedding, or of what a block adds.
        lr: peak learning rate at 4096 tokens per step; see `scaled_lr` for others.
        weight_decay: of AdamW, on weight matrices only.
        prompt: what the text that is shown at the end begins with.
        seed: of the order of windows, of initialisation, of dropout and of the text at the end.

    Raises:
        InputError: naming every option out of range, or what is wrong with the data.
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
    source = read(data, parse_bytes(limit, "limit"))
    train = Windows(source.train, context, "the text to train on")
    valid = Windows(source.held_out, context, "the text that is held out")
    batch = max(1, min(global_batch, len(train)))  # below 1, the task says what is wrong
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
        tell=partial(told, context=context, prompt=prompt, seed=seed, origin=source.origin),
        seed=seed,
        name="text",
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """Cross-entropy in nats, summed over the tokens that windows `[B, context + 1]` predict, and
    their number; bits per byte, over the bytes `[B]` of these tokens."""
    inputs, targets = _divided(batch[0])
    nats, counted = model(inputs, targets)
    bits = nats.detach() / math.log(2)
    return Loss(nats, counted, metrics={"bits_per_byte": (bits, batch[1].sum())})


def measured(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Nats, number of targets, and how many of them were the likeliest token: see `TokenScore`."""
    inputs, targets = _divided(batch[0])
    return model(inputs, targets, with_right=True)


def _divided(windows: Tensor) -> tuple[Tensor, Tensor]:
    windows = windows.long()
    return windows[:, :-1].clamp(min=0), windows[:, 1:]  # what counts nothing is no token either


class TokenScore:
    """A metric over all tokens of an evaluation, exact over any batches and ranks: sums are kept,
    and the figure is computed from those of all.

    Args:
        figure: of the sums of nats, tokens and tokens that were right, in that order.
    """

    def __init__(self, figure: Callable[[float, float, float], float]) -> None:
        self._figure = figure
        self._sums = [0.0, 0.0, 0.0]

    def update(self, nats: Tensor, tokens: Tensor, right: Tensor) -> None:
        """Add the sums of one batch."""
        self._add([float(nats), float(tokens), float(right)])

    def merge_state(self, others: list[Self]) -> None:
        """Add the sums of other ranks."""
        for other in others:
            self._add(other._sums)

    def compute(self) -> float:
        """The figure; NaN over no tokens."""
        return self._figure(*self._sums) if self._sums[1] else math.nan

    def reset(self) -> None:
        """Forget all."""
        self._sums = [0.0, 0.0, 0.0]

    def _add(self, sums: list[float]) -> None:
        self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)]


def perplexity(nats: float, tokens: float, _right: float) -> float:
    """e to the mean cross-entropy; infinite beyond the range of numbers."""
    try:
        return math.exp(nats / tokens)
    except OverflowError:
        return math.inf


def accuracy(_nats: float, tokens: float, right: float) -> float:
    """The share of tokens that were the likeliest."""
    return right / tokens


def steps_between(num_samples: int, global_batch: int, epochs: int, steps: int | None) -> int:
    """Steps from one evaluation to the next: four evaluations in a run, and one in each epoch."""
    batch = max(1, min(global_batch, num_samples))  # below 1, the task says what is wrong
    epoch_steps = -(-num_samples // batch)
    return max(1, min(epoch_steps, -(-(steps or epoch_steps * epochs) // _EVALUATIONS)))


# ------------------------------------------------------------------------------ text at the end


def told(model: nn.Module, context: int, prompt: str, seed: int, origin: str) -> str:
    """What the text was, and what the model makes of `prompt`."""
    begin = list(prompt.encode(errors="replace")) or [END]
    made = bytes(generated(model, begin, END, context, seed)).decode(errors="replace")
    return (
        f"The text: {origin}. What the model writes after {prompt!r} (at temperature"
        f" {_TEMPERATURE}, seed {seed}):\n\n{printable(prompt + made)}\n"
    )


def printable(text: str) -> str:
    """`text` without control characters and without blanks at its ends."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text).strip()


@torch.no_grad()
def generated(
    model: nn.Module, begin: Sequence[int], end: int, context: int, seed: int
) -> Iterator[int]:
    """Tokens drawn one after the other from what `model` (in evaluation mode) expects after `begin`
    and those before: at most 300, none from `end` on. The same for a seed, but for the rounding of
    the device."""
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
