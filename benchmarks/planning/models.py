"""Models to plan, none of which is ever allocated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from benchmarks.models import Decoder, adamw, class_loss, token_loss
from torch import Tensor, nn
from torch.utils.data import Dataset

import anybatch as ab


class Zeros(Dataset[list[Tensor]]):
    """So many samples of these shapes, made when they are asked for."""

    def __init__(self, length: int, *samples: tuple[tuple[int, ...], torch.dtype]) -> None:
        self._length, self._samples = length, samples

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype) for shape, dtype in self._samples]


gpt2 = partial(Decoder, 50257, 768, 12, 1024)
"""124 million parameters, the head tied to the embedding."""


def _turned(x_bhtd: Tensor, cos_td: Tensor, sin_td: Tensor) -> Tensor:
    """Rotary places (Su et al. 2021)."""
    first, second = x_bhtd.chunk(2, dim=-1)
    return x_bhtd * cos_td + torch.cat((-second, first), dim=-1) * sin_td


class LlamaBlock(nn.Module):
    """RMSNorm, rotary places, SwiGLU."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key = _line(width, width), _line(width, width)
        self.value, self.out = _line(width, width), _line(width, width)
        self.gate, self.up, self.down = (
            _line(width, hidden),
            _line(width, hidden),
            _line(hidden, width),
        )

    def forward(self, x_btd: Tensor, cos_td: Tensor, sin_td: Tensor) -> Tensor:
        b, t, d = x_btd.shape
        y_btd = self.norm1(x_btd)
        q, k, v = (
            part(y_btd).view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        q, k = _turned(q, cos_td, sin_td), _turned(k, cos_td, sin_td)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_btd = x_btd + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        y_btd = self.norm2(x_btd)
        return x_btd + self.down(F.silu(self.gate(y_btd)) * self.up(y_btd))


class Llama(nn.Module):
    """A language model in the manner of Llama 2 (Touvron et al. 2023)."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, vocabulary: int, width: int, depth: int, heads: int, hidden: int, context: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, hidden) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), _line(width, vocabulary)
        each = width // heads
        speeds = 1e4 ** (-torch.arange(0, each, 2).float() / each)
        angles = torch.outer(torch.arange(context).float(), speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x_btd, length = self.embed(tokens_bt), tokens_bt.size(1)
        for block in self.blocks:
            x_btd = block(x_btd, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x_btd))


llama_7b = partial(Llama, 32000, 4096, 32, 32, 11008, 2048)
"""6.7 billion parameters."""


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, wide, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)
        self.short = (
            nn.Conv2d(channels, wide, 1, stride, bias=False) if stride > 1 else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.short(x))


def resnet() -> nn.Module:
    """ResNet-18 (He et al. 2016, table 1), without the norms of its shortcuts."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for wide in (64, 128, 256, 512):
        layers += [Residual(channels, wide, wide // channels), Residual(wide, wide, 1)]
        channels = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def language_task(
    model: Callable[[], nn.Module], vocabulary: int, context: int, batch: int
) -> ab.Task:
    """Next token, at the full context."""
    return ab.Task(
        model=model,
        loss=token_loss,
        optimizer=adamw,
        train=Zeros(4 * batch, ((context + 1,), torch.int64)),
        global_batch=batch,
        steps=1,
        clip_norm=1.0,
        name="language",
    )


def resnet_task(batch: int) -> ab.Task:
    """Images of 224 x 224 in 1000 classes."""
    return ab.Task(
        model=resnet,
        loss=class_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train=Zeros(4 * batch, ((3, 224, 224), torch.float32), ((), torch.int64)),
        global_batch=batch,
        steps=1,
        name="resnet",
    )


def _line(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)
