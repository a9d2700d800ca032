"""Kinds of models, as tasks whose step peaks between some MiB and a GiB on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab


class Attention(nn.Module):
    """A transformer block, pre-norm; causal or not."""

    def __init__(self, width: int, heads: int, causal: bool, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = feed or nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_btd: Tensor) -> Tensor:
        b, t, d = x_btd.shape
        qkv = self.qkv(self.norm1(x_btd)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x_btd = x_btd + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x_btd + self.feed(self.norm2(x_btd))


class Experts(nn.Module):
    """A feed-forward part of several experts, of which each token takes the best two. Every expert
    computes a fixed number of tokens, those that want it most."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, x_btd: Tensor) -> Tensor:
        x_nd = x_btd.flatten(0, -2)
        want_ne = self.gate(x_nd).softmax(-1)
        room = 2 * len(x_nd) // len(self.experts)
        out_nd = torch.zeros_like(x_nd)
        for i, expert in enumerate(self.experts):
            weight_c, index_c = want_ne[:, i].topk(room)
            out_c = expert(x_nd[index_c]) * weight_c[:, None]
            out_nd = out_nd.index_add(0, index_c, out_c.to(out_nd.dtype))
        return out_nd.view_as(x_btd)


class LanguageModel(nn.Module):
    """GPT: a decoder; its head is the embedding (tied) or not."""

    def __init__(
        self, vocabulary: int, width: int, depth: int, context: int, tied: bool, experts: int = 0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            Attention(width, width // 64, True, Experts(width, experts) if experts else None)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens_bt: Tensor) -> Tensor:
        where = torch.arange(tokens_bt.size(1), device=tokens_bt.device)
        x_btd = self.embed(tokens_bt) + self.place(where)
        for block in self.blocks:
            x_btd = block(x_btd)
        return self.head(self.norm(x_btd))


class Encoder(nn.Module):
    """torch's own encoder layers, over patches of an image, with dropout."""

    def __init__(self, width: int, depth: int, num_patches: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.place = nn.Parameter(torch.zeros(1, num_patches, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.1, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images_bchw: Tensor) -> Tensor:
        x_btd = self.patches(images_bchw).flatten(2).transpose(1, 2) + self.place
        for layer in self.layers:
            x_btd = layer(x_btd)
        return self.head(x_btd.mean(1))


class Towers(nn.Module):
    """Two texts of each sample to two vectors of length one, by two encoders."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.left, self.right = (
            nn.Sequential(*(Attention(width, 4, causal=False) for _ in range(depth)))
            for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left_bt: Tensor, right_bt: Tensor) -> tuple[Tensor, Tensor]:
        left_btd, right_btd = self.left(self.embed(left_bt)), self.right(self.embed(right_bt))
        return F.normalize(left_btd.mean(1), dim=1), F.normalize(right_btd.mean(1), dim=1)


class Recurrent(nn.Module):
    """Two LSTM layers over embedded tokens, and the next token."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, vocabulary))

    def forward(self, tokens_bt: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens_bt))[0])


class Speech(nn.Module):
    """Two LSTM layers in both directions over spectra, and how likely each of the labels is."""

    def __init__(self, width: int, num_bands: int, num_labels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.LSTM(taken, width, batch_first=True, bidirectional=True)
            for taken in (num_bands, 2 * width)
        )
        self.head = nn.Linear(2 * width, num_labels)

    def forward(self, spectra_btf: Tensor) -> Tensor:
        x_btd = spectra_btf
        for layer in self.layers:
            x_btd, _ = layer(x_btd)
        return self.head(x_btd).log_softmax(-1)


class Residual(nn.Module):
    """A residual block of two convolutions with BatchNorm."""

    def __init__(self, channels: int, wide: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, wide, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(wide)
        self.conv2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(wide)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or channels != wide:
            conv = nn.Conv2d(channels, wide, 1, stride=stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(wide))

    def forward(self, x_bchw: Tensor) -> Tensor:
        y_bchw = F.relu(self.norm1(self.conv1(x_bchw)))
        return F.relu(self.norm2(self.conv2(y_bchw)) + self.short(x_bchw))


class UNet(nn.Module):
    """Down and up again, with what was on the way down put beside what is on the way up."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [3, *[width << i for i in range(depth)]]
        self.down = nn.ModuleList(_double(a, b) for a, b in pairwise(sizes))
        back = sizes[:0:-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairwise(back))
        self.join = nn.ModuleList(_double(2 * b, b) for b in back[1:])
        self.head = nn.Conv2d(width, 10, 1)

    def forward(self, x_bchw: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for i, stage in enumerate(self.down):
            x_bchw = stage(F.max_pool2d(x_bchw, 2) if i else x_bchw)
            kept.append(x_bchw)
        kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x_bchw = join(torch.cat([up(x_bchw), kept.pop()], 1))
        return self.head(x_bchw)


def _double(channels: int, wide: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, wide, 3, padding=1),
        nn.GroupNorm(4, wide),
        nn.SiLU(),
        nn.Conv2d(wide, wide, 3, padding=1),
        nn.GroupNorm(4, wide),
        nn.SiLU(),
    )


def mlp(width: int, depth: int) -> nn.Module:
    """Equal layers, in pairs."""
    pairs = [
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        for _ in range(depth // 2)
    ]
    return nn.Sequential(*pairs, nn.Linear(width, 10))


def convolutional(width: int) -> nn.Module:
    """Three stages of convolutions with BatchNorm."""
    stages: list[nn.Module] = []
    channels = 3
    for stage in range(3):
        wide = width << stage
        stages.append(
            nn.Sequential(
                nn.Conv2d(channels, wide, 3, padding=1, bias=False),
                nn.BatchNorm2d(wide),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
        )
        channels = wide
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def residual(width: int) -> nn.Module:
    """A small ResNet: three stages of two blocks."""
    blocks = [
        Residual(width, width, 1),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 2 * width, 1),
        Residual(2 * width, 4 * width, 2),
        Residual(4 * width, 4 * width, 1),
    ]
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
    tail = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))
    return nn.Sequential(stem, *blocks, tail)


# Simonyan and Zisserman (2015), table 1, column D: the width of each convolution, by stage.
_VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(side: int, hidden: int = 4096, classes: int = 10) -> nn.Module:
    """VGG16 for images of `side` by `side`."""
    stages: list[nn.Module] = []
    channels = 3
    for widths in _VGG16:
        layers: list[nn.Module] = []
        for wide in widths:
            layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.ReLU(inplace=True)]
            channels = wide
        stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    head = nn.Sequential(
        nn.Flatten(),
        nn.Linear(512 * (side // 32) ** 2, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(hidden, classes),
    )
    return nn.Sequential(*stages, head)


def class_loss(model: nn.Module, batch: list[Tensor]) -> ab.Loss:
    """Cross-entropy over classes (or over the classes of every pixel)."""
    inputs, labels = batch
    total = F.cross_entropy(model(inputs).float(), labels, reduction="sum")
    return ab.Loss(total, labels.numel())


def token_loss(model: nn.Module, batch: list[Tensor]) -> ab.Loss:
    """Cross-entropy of the next token."""
    (tokens_bt,) = batch
    logits = model(tokens_bt[:, :-1]).float()
    targets = tokens_bt[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return ab.Loss(total, targets.numel())


def compare_pairs(model: Any, encoded: tuple[Tensor, Tensor]) -> ab.Loss:
    """Each left text against every right one, and the other way round."""
    left, right = encoded
    scores = (model.scale.exp() * left @ right.T).float()
    own = torch.arange(len(scores), device=scores.device)
    both = F.cross_entropy(scores, own, reduction="sum")
    return ab.Loss(both + F.cross_entropy(scores.T, own, reduction="sum"), 2 * len(scores))


def alignment_loss(model: nn.Module, batch: list[Tensor]) -> ab.Loss:
    """CTC, summed over all ways to lay the labels along the spectra."""
    spectra_btf, labels_bs = batch
    scores_tbl = model(spectra_btf).float().transpose(0, 1)
    steps, num_labels = (
        torch.full((len(labels_bs),), n) for n in (len(scores_tbl), labels_bs.size(1))
    )
    losses = F.ctc_loss(scores_tbl, labels_bs, steps, num_labels, reduction="none")
    return ab.Loss(losses.sum(), len(labels_bs))


def sgd(params: Any) -> torch.optim.Optimizer:
    """With momentum."""
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    """As torch has it by default."""
    return torch.optim.AdamW(params, lr=1e-4)


@dataclass(frozen=True)
class Kind:
    """One kind of model: how to build it, its loss and optimizer, its samples, and its batch."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    samples: Callable[[int], Iterable[Tensor]]
    batch: int

    def task(self, name: str) -> ab.Task:
        """Three steps of it."""
        torch.manual_seed(0)
        return ab.Task(
            model=self.model,
            loss=self.loss,
            optimizer=self.optimizer,
            train=TensorDataset(*self.samples(self.batch)),
            global_batch=self.batch,
            steps=3,
            clip_norm=1.0,
            ghost_batch=max(1, self.batch // 4),
            name=name,
        )

    def channels_last(self) -> Kind:
        """The same model and images in the layout in which the channels lie last."""

        def model() -> nn.Module:
            return self.model().to(memory_format=torch.channels_last)

        def loss(model: nn.Module, batch: list[Tensor]) -> ab.Loss:
            images, *rest = batch
            return self.loss(model, [images.contiguous(memory_format=torch.channels_last), *rest])

        return replace(self, model=model, loss=loss)


def vectors(width: int, num: int) -> Iterable[Tensor]:
    """Vectors of ten classes."""
    return torch.randn(num, width), torch.randint(10, (num,))


def images(side: int, num: int) -> Iterable[Tensor]:
    """Square images of ten classes."""
    return torch.randn(num, 3, side, side), torch.randint(10, (num,))


def masks(side: int, num: int) -> Iterable[Tensor]:
    """Square images, each pixel of ten classes."""
    return torch.randn(num, 3, side, side), torch.randint(10, (num, side, side))


def spectra(length: int, num_bands: int, num_labels: int, num: int) -> Iterable[Tensor]:
    """Spectra of `length` moments, each with a label for every eight of them; label 0 is the blank."""
    labels = torch.randint(1, num_labels, (num, length // 8))
    return torch.randn(num, length, num_bands), labels


def tokens(vocabulary: int, length: int, num: int) -> Iterable[Tensor]:
    """Random text."""
    return (torch.randint(vocabulary, (num, length)),)


def pairs(vocabulary: int, num: int) -> Iterable[Tensor]:
    """Random texts, two of each sample."""
    return torch.randint(vocabulary, (num, 12)), torch.randint(vocabulary, (num, 24))


def _language(tied: bool, experts: int, loss: Any, optimizer: Any, batch: int) -> Kind:
    model = partial(LanguageModel, 4000, 256, 4, 128, tied, experts)
    return Kind(model, loss, optimizer, partial(tokens, 4000, 129), batch)


KINDS: dict[str, Kind] = {
    "mlp": Kind(partial(mlp, 1024, 8), class_loss, adamw, partial(vectors, 1024), 4096),
    "mlp, tiny": Kind(partial(mlp, 128, 4), class_loss, adamw, partial(vectors, 128), 256),
    "convolutional": Kind(partial(convolutional, 32), class_loss, sgd, partial(images, 32), 256),
    "residual": Kind(partial(residual, 32), class_loss, sgd, partial(images, 32), 128),
    "vgg16": Kind(partial(vgg16, 32, 1024), class_loss, sgd, partial(images, 32), 64),
    "lstm": Kind(partial(Recurrent, 2000, 256), token_loss, adamw, partial(tokens, 2000, 65), 64),
    "speech": Kind(
        partial(Speech, 128, 80, 32), alignment_loss, adamw, partial(spectra, 96, 80, 32), 64
    ),
    "gpt, tied": _language(True, 0, token_loss, adamw, 32),
    "gpt, untied": _language(False, 0, token_loss, adamw, 32),
    "encoder": Kind(partial(Encoder, 192, 4, 64), class_loss, adamw, partial(images, 64), 64),
    "u-net": Kind(partial(UNet, 32, 3), class_loss, adamw, partial(masks, 64), 16),
    "towers": Kind(
        partial(Towers, 2000, 128, 2),
        ab.JointLoss(lambda model, batch: model(*batch), compare_pairs),
        adamw,
        partial(pairs, 2000),
        512,
    ),
    "experts": _language(True, 4, token_loss, adamw, 32),
}
"""The models of the benchmark."""
