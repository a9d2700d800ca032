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


_LLAMAS = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
    "405b": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126},
}


def llama_task(name: str, batch: int) -> ab.Task:
    """Next token with transformers' `LlamaForCausalLM` of 7, 70 or 405 billion parameters, 32,000
    words and 2,048 tokens. Larger ones share keys and values among 8 heads (Llama 3)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = _LLAMAS[name]
    heads = shape["hidden_size"] // 128
    config = LlamaConfig(
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=heads if name == "7b" else 8,
        vocab_size=32000,
        max_position_embeddings=2048,
    )
    return ab.Task(
        model=lambda: LlamaForCausalLM(config),
        loss=lambda model, batch: model(input_ids=batch[0], labels=batch[0]).loss,
        optimizer=adamw,
        train=Zeros(4 * batch, ((2048,), torch.int64)),
        global_batch=batch,
        steps=1,
        name="llama",
    )


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
