"""A small decoder: repeated blocks, and an embedding that is its head too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab


class Block(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.qkv = nn.Linear(width, 3 * width, dtype=dtype)
        self.out = nn.Linear(width, width, dtype=dtype)
        up = nn.Linear(width, 4 * width, dtype=dtype)
        self.mlp = nn.Sequential(up, nn.GELU(), nn.Linear(4 * width, width, dtype=dtype))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """`repeated`: how often each block is run. `counted`: with BatchNorm, which has buffers."""

    def __init__(
        self, width=16, depth=3, words=23, dtype=torch.float64, repeated=1, counted=False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width, dtype=dtype)
        self.layers = nn.ModuleList([Block(width, dtype) for _ in range(depth)])
        self.count = nn.BatchNorm1d(width, dtype=dtype) if counted else None
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.head = nn.Linear(width, words, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("places", torch.arange(64), persistent=False)
        self.repeated = repeated

    def forward(self, tokens):
        x = self.embed(tokens) + 0.01 * self.embed(self.places[: tokens.shape[1]] % 2)
        for _ in range(self.repeated):
            for layer in self.layers:
                x = layer(x)
        if self.count is not None:
            x = self.count(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x))


def next_word(model, batch):
    """Cross entropy of each next word, and how many there are."""
    (tokens,) = batch
    logits = model(tokens[:, :-1])
    logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
    return ab.Loss(losses, tokens[:, 1:].numel())
