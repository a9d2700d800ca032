"""A decoder: the transformer that predicts each token from those before it.

    tokens  ->  embedding  ->  block 0  ->  ...  ->  block n-1  ->  norm  ->  head
    [B, T]      [B, T, W]      x + attention(norm(x)), then x + mlp(norm(x))    [B, T, V]

Pre-norm blocks with rotary positions and SwiGLU, no biases: as in Llama (Touvron et al. 2023,
"LLaMA: open and efficient foundation language models", section 2.2), but with LayerNorm, which torch
has as one kernel on every device. The loss is a part of forward, where the head's weight is whole
also if it is divided over ranks; the logits are never in memory at once.

    B samples   T tokens of context   W width   H heads   D = W / H   V vocabulary
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab

ROTARY_BASE = 10_000.0
INIT_STD = 0.02
_LOGITS_AT_ONCE = 1 << 20


class Shape(NamedTuple):
    """Sizes of a decoder; `width` is a multiple of `heads`, and that quotient is even."""

    vocabulary: int
    context: int
    width: int
    depth: int
    heads: int
    dropout: float = 0.0
    tied: bool = True


class Attention(nn.Module):
    """x [B, T, W] -> [B, T, W]: each place looks at itself and those before it."""

    turns: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads: int = shape.heads
        self.qkv: nn.Linear = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out: nn.Linear = nn.Linear(shape.width, shape.width, bias=False)
        self.register_buffer(
            "turns", rotary(shape.context, shape.width // shape.heads), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotated(q, self.turns), rotated(k, self.turns)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, D]
        return self.out(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """x [B, T, W] -> [B, T, W] (Shazeer 2020, "GLU variants improve transformer"). Its inner width is
    8/3 W, so that it has as many weights as a plain one of 4 W."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner = 8 * math.ceil(shape.width / 3)
        self.up: nn.Linear = nn.Linear(shape.width, 2 * inner, bias=False)
        self.out: nn.Linear = nn.Linear(inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


class Block(nn.Module):
    """x [B, T, W] -> [B, T, W]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1: nn.LayerNorm = nn.LayerNorm(shape.width, bias=False)
        self.attention: Attention = Attention(shape)
        self.norm2: nn.LayerNorm = nn.LayerNorm(shape.width, bias=False)
        self.mlp: SwiGLU = SwiGLU(shape)
        self.drop: nn.Dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """See the module. Dropout is on the embedding and on what each block adds.

    Weights are drawn from a normal distribution of 0.02, those at the end of a branch from one that
    is narrower by the root of the number of branches, so that their sum does not grow with depth
    (Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding: nn.Embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.drop: nn.Dropout = nn.Dropout(shape.dropout)
        self.blocks: nn.Sequential = nn.Sequential(*(Block(shape) for _ in range(shape.depth)))
        self.norm: nn.LayerNorm = nn.LayerNorm(shape.width, bias=False)
        self.head: nn.Linear = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                narrower = math.sqrt(2 * shape.depth) if name.endswith(".out") else 1.0
                nn.init.normal_(module.weight, std=INIT_STD / narrower)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, with_right: bool = False
    ) -> Tensor | tuple[Tensor, ...]:
        """Without targets the logits of what follows the last token, `[B, V]`.

        With targets, int64 `[B, T]` with -100 for none: the sum of the cross-entropies in nats and
        the number of targets; `with_right` also how many of them were the likeliest token. `tokens`
        are integers `[B, T]`, T at most the context.
        """
        hidden = self.norm(self.blocks(self.drop(self.embedding(tokens))))
        if targets is None:
            return self.head(hidden[:, -1])
        loss = ab.lm_loss(hidden, self.head, targets)
        counted = (targets != -100).sum()
        if not with_right:
            return loss.sum, counted
        return loss.sum, counted, self._num_right(hidden.flatten(0, 1), targets.flatten())

    def _num_right(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """How many targets `[N]` are the likeliest token, with a part of the logits at a time."""
        size = max(1, _LOGITS_AT_ONCE // self.head.out_features)
        pairs = zip(hidden.split(size), targets.split(size), strict=True)
        return torch.stack([(self.head(h).argmax(-1) == t).sum() for h, t in pairs]).sum()


def rotary(context: int, head_size: int) -> Tensor:
    """The turns of rotary positions `[2, T, D/2]`, cosines and sines: place p turns pair i by
    `p * 10000 ** (-2 i / D)` (Su et al. 2021, "RoFormer", section 3.2.2)."""
    steps = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    angles = torch.outer(torch.arange(context, dtype=torch.float64), ROTARY_BASE**-steps)
    return torch.stack([angles.cos(), angles.sin()]).to(torch.get_default_dtype())


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Queries or keys `[B, H, T, D]`, turned by their places; pair i is the elements i and i + D/2."""
    cos, sin = turns[:, : x.size(-2)].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
