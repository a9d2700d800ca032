"""Small tasks of different kinds, to compare predictions with measurements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab


class Block(nn.Module):
    """A transformer block, pre-norm, causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        b, t, d = x_btd.shape
        heads = self.qkv(self.norm1(x_btd)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_btd = x_btd + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x_btd + self.down(F.gelu(self.up(self.norm2(x_btd))))


class Decoder(nn.Module):
    """A small language model; the head is tied to the embedding."""

    def __init__(self, vocabulary: int, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        where = torch.arange(tokens_bt.size(1), device=tokens_bt.device)
        x_btd = self.embed(tokens_bt) + self.place(where)
        for block in self.blocks:
            x_btd = block(x_btd)
        return self.norm(x_btd) @ self.embed.weight.T


def mlp(width: int, depth: int) -> nn.Module:
    """A multilayer perceptron with `depth` hidden layers of the same width."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def convolutional(width: int) -> nn.Module:
    """Three stages of convolutions with BatchNorm."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in range(3):
        wide = width << stage
        layers += [nn.Conv2d(channels, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        channels = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def class_loss(model: nn.Module, batch: list[torch.Tensor]) -> ab.Loss:
    """Cross-entropy over classes, as a sum and the number of samples."""
    inputs, labels = batch
    return ab.Loss(F.cross_entropy(model(inputs).float(), labels, reduction="sum"), len(labels))


def token_loss(model: nn.Module, batch: list[torch.Tensor]) -> ab.Loss:
    """Cross-entropy of the next token."""
    (tokens_bt,) = batch
    logits = model(tokens_bt[:, :-1]).float()
    targets = tokens_bt[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return ab.Loss(total, targets.numel())


def adamw(params: object) -> torch.optim.Optimizer:
    """The optimizer of all tasks."""
    return torch.optim.AdamW(params, lr=1e-3)  # pyright: ignore[reportArgumentType]


def tasks(scale: int) -> dict[str, ab.Task]:
    """One task of each kind; `scale` 1 suits a CPU, 8 a GPU."""
    torch.manual_seed(0)
    num = 64 * scale
    labels = torch.randint(10, (num,))
    images = torch.randn(num, 3, 32, 32)
    vectors = torch.randn(num, 256 * scale)
    tokens = torch.randint(1000 * scale, (num, 129))
    make: dict[str, tuple[Callable[[], nn.Module], object, object]] = {
        "mlp": (partial(mlp, 256 * scale, 6), class_loss, TensorDataset(vectors, labels)),
        "convolutional": (partial(convolutional, 32), class_loss, TensorDataset(images, labels)),
        "decoder": (
            partial(Decoder, 1000 * scale, 64 * scale, 4, 128),
            token_loss,
            TensorDataset(tokens),
        ),
    }
    return {
        name: ab.Task(
            model=model,
            loss=loss,  # pyright: ignore[reportArgumentType]
            optimizer=adamw,
            train=data,
            global_batch=num,
            steps=4,
            clip_norm=1.0,
            ghost_batch=16,
            name=name,
        )
        for name, (model, loss, data) in make.items()
    }
