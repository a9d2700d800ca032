"""Residual networks for images of any size, and torchvision's models as they are."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.errors import InputError, listed
from anybatch.recipes.digits import Residual


class Size(NamedTuple):
    """Of a residual network: blocks of each stage, channels of the first stage, whether blocks have a
    bottleneck, and the pixels of each side of its images unless something else is asked for."""

    depths: Sequence[int]
    width: int
    bottleneck: bool
    pixels: int


SIZES = {"small": Size((1, 1, 1, 1), 32, False, 64), "large": Size((3, 4, 6, 3), 64, True, 224)}
"""`large` has the layers of ResNet-50 (He et al. (2016), "Deep residual learning", table 1), with the
stride in the middle of a bottleneck (Goyal et al. (2017), section 5.1). `small` is a tenth of
ResNet-18: one block per stage and half the channels."""

_LARGE_STEM = 128  # pixels from which an image is made smaller by four before the first stage


class Bottleneck(nn.Module):
    """(B, in, H, W) -> (B, 4 * width, H/stride, W/stride): three convolutions around a shortcut (He et
    al. (2016), figure 5)."""

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = 4 * width
        self.conv1: nn.Conv2d = nn.Conv2d(num_in, width, 1, bias=False)
        self.norm1: nn.BatchNorm2d = nn.BatchNorm2d(width)
        self.conv2: nn.Conv2d = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2: nn.BatchNorm2d = nn.BatchNorm2d(width)
        self.conv3: nn.Conv2d = nn.Conv2d(width, num_out, 1, bias=False)
        self.norm3: nn.BatchNorm2d = nn.BatchNorm2d(num_out)
        self.shortcut: nn.Module = (
            nn.Identity()
            if num_in == num_out and stride == 1
            else nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def build(name: str, pixels: int, num_classes: int, dropout: float) -> nn.Module:
    """Images (B, 3, pixels, pixels) to logits (B, num_classes).

    Args:
        name: a key of `SIZES`, or the name of a classification model of torchvision, without trained
            weights.
        pixels: of each side of the images.
        num_classes: of the last layer.
        dropout: probability to drop a feature before the last layer; of torchvision's models their own.

    Raises `InputError` if there is no model of that name.
    """
    if name not in SIZES:
        return _torchvision(name).get_model(name, weights=None, num_classes=num_classes)
    return _residual(SIZES[name], pixels, num_classes, dropout)


def checked(name: str) -> str:
    """`name`, if there is a model of that name. Raises `InputError` otherwise."""
    if name in SIZES:
        return name
    models = _torchvision(name)
    known = models.list_models(module=models)
    if name not in known:
        raise InputError(
            f"torchvision has no model {name!r} that classifies images: give {listed(SIZES)}, or one of"
            f" torchvision's {len(known)}: {', '.join(known)}."
        )
    return name


def _torchvision(name: str) -> Any:
    """torchvision's `models`."""
    try:
        models: ModuleType = importlib.import_module("torchvision.models")
    except Exception as error:  # one that was built for another torch raises RuntimeError
        raise InputError(
            f"the model {name!r} is not {listed(SIZES)}, and torchvision, whose models go by their own"
            f" names, cannot be imported ({error}): install the torchvision that belongs to your torch"
            f" (pip install torchvision), or give {listed(SIZES)}."
        ) from error
    return models


def _residual(size: Size, pixels: int, num_classes: int, dropout: float) -> nn.Sequential:
    """Named blocks in a row, so that each of them can be recomputed by itself."""
    width = size.width
    if pixels >= _LARGE_STEM:
        stem = [nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        stem += [nn.MaxPool2d(3, 2, padding=1)]
    else:
        stride = 2 if pixels >= _LARGE_STEM // 2 else 1
        stem = [nn.Conv2d(3, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)]
        stem += [nn.ReLU()]
    model = nn.Sequential()
    model.add_module("stem", nn.Sequential(*stem))
    channels = width
    for stage, depth in enumerate(size.depths):
        for number in range(depth):
            stride = 2 if stage and not number else 1
            if size.bottleneck:
                block, after = Bottleneck(channels, width, stride), 4 * width
            else:
                block, after = Residual(channels, width, stride), width
            model.add_module(f"stage{stage + 1}_block{number + 1}", block)
            channels = after
        width *= 2
    model.add_module(
        "head",
        nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(channels, num_classes),
        ),
    )
    for block in model.modules():
        # Each block begins as its shortcut alone: see Goyal et al. (2017), section 5.1.
        if isinstance(block, Bottleneck | Residual):
            nn.init.zeros_((block.norm3 if isinstance(block, Bottleneck) else block.norm2).weight)
    return model
