"""Sequences of unequal length: padded in `collate`, and weighted by real tokens in the loss.

    python examples/unequal_lengths.py

Micro-batches have different numbers of real tokens, so the mean of their means is not the mean over
the tokens of the global batch. The loss below returns the sum over the real tokens and their number;
the update divides once, by the number in the whole global batch. The last lines print both values.

`lengths` gives the length of each sequence. Micro-batches are limited by padded size: the plan's 10
refers to sequences of the longest length, and micro-batches of shorter sequences contain more of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab

VOCABULARY, PAD, IGNORED = 32, 0, -100


class Counting(torch.utils.data.Dataset[Tensor]):
    """Sequences of 4 to 40 tokens that count upwards, each by its own step."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(4, 41, (), generator=generator))
        start, stride = torch.randint(1, VOCABULARY, (2,), generator=generator).tolist()
        return (start + stride * torch.arange(length)) % (VOCABULARY - 1) + 1


def collate(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns inputs (B, T) padded with PAD, and the next tokens (B, T) padded with IGNORED."""
    inputs = nn.utils.rnn.pad_sequence([s[:-1] for s in samples], True, PAD)
    targets = nn.utils.rnn.pad_sequence([s[1:] for s in samples], True, IGNORED)
    return inputs, targets


class Model(nn.Module):
    """Tokens (B, T) to logits (B, T, VOCABULARY), computed from each token and the previous one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        self.layers = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        here = self.embed(tokens)
        before = F.pad(here, (0, 0, 1, 0))[:, :-1]
        return self.layers(torch.cat([here, before], dim=2))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ab.Loss:
    inputs, targets = batch
    logits = model(inputs)
    total = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    counted = targets != IGNORED
    right = ((logits.detach().argmax(dim=2) == targets) & counted).sum()
    return ab.Loss(total, counted.sum(), metrics={"accuracy": right})


data = Counting()
task = ab.Task(
    model=Model,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    train=data,
    collate=collate,
    lengths=[len(data[i]) for i in range(len(data))],
    global_batch=250,
    epochs=6,
    clip_norm=1.0,
    name="counting",
)
plan = ab.plan(task, micro_batch=10)
with ab.Session(task, plan) as session:
    for step in session.steps():
        if step.step % 8 == 0:
            print(
                f"step {step.step}: {step.samples} sequences, {step.weight:.0f} tokens,"
                f" loss {step.loss:.3f}, accuracy {step.metrics['accuracy']:.3f}"
            )
    model = session.model

by_length = sorted((data[i] for i in range(100)), key=len)
pieces = [collate(by_length[:50]), collate(by_length[50:])]
with torch.no_grad():
    losses = [loss(model, piece) for piece in pieces]
means = [float(one.sum / one.weight) for one in losses]
exact = float(losses[0].sum + losses[1].sum) / float(losses[0].weight + losses[1].weight)
print(f"short sequences {means[0]:.4f}, long ones {means[1]:.4f}")
print(f"mean of means {sum(means) / 2:.4f}, mean over the tokens {exact:.4f}")
