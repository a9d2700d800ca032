"""Decoder-only transformer, which predicts each token from the previous ones.

    tokens  ->  embedding  ->  block 0  ->  ...  ->  block n-1  ->  norm  ->  head
    [B, T]      [B, T, W]      x + attention(norm(x)), then x + mlp(norm(x))    [B, T, V]

Pre-norm blocks with rotary position embeddings and SwiGLU, without biases, as in Llama (Touvron et al.
2023, "LLaMA: open and efficient foundation language models", section 2.2), but with LayerNorm, which
torch has as a single kernel on every device. The loss is computed in forward, where the head's weight
is complete even if it is sharded across ranks. The logits are never all in memory.

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
    """Sizes of a decoder. `width / heads` must be an even integer."""

    vocabulary: int
    context: int
    width: int
    depth: int
    heads: int
    dropout: float = 0.0
    tied: bool = True


class Attention(nn.Module):
    """Causal self-attention, x [B, T, W] -> [B, T, W]."""

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
    """Gated MLP, x [B, T, W] -> [B, T, W] (Shazeer 2020, "GLU variants improve transformer"). Its inner
    width is 8/3 W, so it has as many weights as a plain MLP with inner width 4 W."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner = 8 * math.ceil(shape.width / 3)
        self.up: nn.Linear = nn.Linear(shape.width, 2 * inner, bias=False)
        self.out: nn.Linear = nn.Linear(inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


class Block(nn.Module):
    """Transformer block, x [B, T, W] -> [B, T, W]."""

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
    """Decoder; see the module. Dropout applies to the embedding and to the output of each branch.

    Weights are initialized from a normal distribution with standard deviation 0.02. For the last layer
    of a branch, this is divided by the square root of the number of branches, so that the sum of the
    branches does not grow with depth (Radford et al. 2019, "Language models are unsupervised multitask
    learners", section 2.3).
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
        """Without targets, returns the logits `[B, V]` of the token after the last one.

        With targets, int64 `[B, T]` (-100 is ignored), returns the sum of cross-entropies in nats and
        the number of targets; `with_right` adds the number of correctly predicted targets. `tokens` are
        integers `[B, T]`, where T is at most the context.
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
        """Counts the targets `[N]` with the largest logit, computing the logits in chunks."""
        size = max(1, _LOGITS_AT_ONCE // self.head.out_features)
        pairs = zip(hidden.split(size), targets.split(size), strict=True)
        return torch.stack([(self.head(h).argmax(-1) == t).sum() for h, t in pairs]).sum()


def rotary(context: int, head_size: int) -> Tensor:
    """Returns cosines and sines of rotary position embeddings, `[2, T, D/2]`: at position p, pair i is
    rotated by the angle `p * 10000 ** (-2 i / D)` (Su et al. 2021, "RoFormer", section 3.2.2)."""
    steps = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    angles = torch.outer(torch.arange(context, dtype=torch.float64), ROTARY_BASE**-steps)
    return torch.stack([angles.cos(), angles.sin()]).to(torch.get_default_dtype())


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotates queries or keys `[B, H, T, D]` by their positions; pair i is elements i and i + D/2."""
    cos, sin = turns[:, : x.size(-2)].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
