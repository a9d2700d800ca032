"""A small GPT, with gradients accumulated over four micro-batches."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab

WORDS, WIDTH, LENGTH = 50, 32, 16


class Block(nn.Module):
    """Attention and a feed-forward part (B, T, WIDTH), pre-norm. A bias of the keys would have no
    gradient but rounding, which AdamW makes large."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.attention(self.ln_1(x)).unflatten(-1, (3, 4, -1)).movedim(2, 0).transpose(2, 3)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.projection(mixed)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Tokens (B, T) and targets (B, T) to logits (B, T, WORDS) and the mean loss; the head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.ln = nn.LayerNorm(WIDTH)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(idx) + self.places(torch.arange(idx.size(1)))
        logits = self.ln(self.blocks(x)) @ self.tokens.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(cuttable: bool) -> Any:
    """Model, optimizer with and without decay, learning rates, and batches."""
    del cuttable  # it has no dropout
    model = GPT()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    texts = [torch.randint(WORDS, (16, LENGTH + 1)) for _ in range(10)]
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95)),
        rates=[
            1e-3 * min(1.0, (i + 1) / 3) * (1 + math.cos(math.pi * i / 10)) / 2 for i in range(10)
        ],
        batches=[(text[:, :-1], text[:, 1:]) for text in texts],
        trained=[model],
    )


def by_hand(work: Any) -> None:
    model, optimizer = work.model, work.optimizer
    for rate, (x, y) in zip(work.rates, work.batches, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for part_x, part_y in zip(x.split(4), y.split(4), strict=True):
            _, loss = model(part_x, part_y)
            (loss / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def by_step(work: Any, **options: Any) -> None:
    model, optimizer = work.model, work.optimizer
    step = ab.Step(
        model, optimizer, lambda model, batch: model(*batch)[1], clip_norm=1.0, **options
    )
    for rate, (x, y) in zip(work.rates, work.batches, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        step((x, y))
    step.close()
