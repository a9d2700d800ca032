"""Handwritten digits: a residual convolutional network on real images, trained in seconds.

A small task with everything that makes large batches difficult: BatchNorm, which depends on the other
samples of the batch; blocks that can be recomputed; a data set whose size no power of two divides; and
a held-out accuracy that drops if a step is computed incorrectly. The images ship with scikit-learn, so
no network access is needed; with `data`, the recipe reads MNIST or any data in its format.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from anybatch.errors import InputError
from anybatch.recipes.idx import load_folder
from anybatch.recipes.options import ABOVE_ZERO, AT_LEAST_ZERO, COUNT, PART, check
from anybatch.recipes.schedules import scaled_lr, warmup_cosine
from anybatch.task import Loss, Task

REFERENCE_BATCH = 128
LARGEST_LR = (
    1e-2  # the square-root rule assumes noisy gradients; a full-data-set batch has no noise
)


def digits(
    global_batch: int = 128,
    epochs: int = 30,
    data: Path | None = None,
    lr: float = 3e-3,
    width: int = 24,
    weight_decay: float = 0.05,
    dropout: float = 0.0,
    ghost_batch: int = 32,
    seed: int = 0,
) -> Task:
    """Classify handwritten digits with a small residual network.

    Without `data`, uses the 1797 images (8 x 8, one channel) of scikit-learn: 1437 for training, 360
    held out. With `data`, uses training and test files in MNIST's format, with images of any size.

    Args:
        global_batch: samples per optimizer step; if larger than the data set, all samples.
        epochs: passes over the training images.
        data: folder with data in MNIST's IDX format.
        lr: peak learning rate at a global batch of 128; see `scaled_lr` for other batch sizes.
        width: channels of the first block; doubled whenever the image size is halved.
        weight_decay: weight decay of AdamW, applied to weight matrices and kernels only.
        dropout: dropout probability before the last layer.
        ghost_batch: samples over which BatchNorm computes its statistics.
        seed: random seed for the order of samples, initialization and dropout.

    Raises:
        InputError: if options are out of range (names all of them), or the data is invalid.
    """
    ranges = {
        "lr": (lr, ABOVE_ZERO),
        "width": (width, COUNT),
        "weight_decay": (weight_decay, AT_LEAST_ZERO),
        "dropout": (dropout, PART),
    }
    check("digits", ranges)
    train_x, train_y, test_x, test_y = _scikit_learn() if data is None else _mnist(data)
    num_train, _, image_height, image_width = train_x.shape
    batch = max(1, min(global_batch, num_train))  # a value below 1 is reported by Task
    return Task(
        model=partial(
            build,
            image=(image_height, image_width),
            num_classes=1 + max(int(train_y.max()), int(test_y.max())),
            width=width,
            dropout=dropout,
        ),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=scaled_lr(lr, batch, REFERENCE_BATCH, LARGEST_LR)),
        parameters=partial(decay_groups, weight_decay=weight_decay),
        schedule=warmup_cosine(0.1),
        train=TensorDataset(train_x, train_y),
        valid=TensorDataset(test_x, test_y),
        global_batch=global_batch,
        epochs=epochs,
        ghost_batch=ghost_batch,
        seed=seed,
        name="digits",
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """Cross-entropy and accuracy, for images (B, 1, H, W) float32 and labels (B) int64."""
    images, labels = batch
    logits = model(images)
    correct = (logits.detach().argmax(dim=1) == labels).sum()
    total = F.cross_entropy(logits, labels, reduction="sum")
    return Loss(total, weight=len(labels), metrics={"accuracy": correct})


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Parameter groups for AdamW, with weight decay on weights of two or more dimensions. Biases and
    norm scales are not decayed, since decay would only pull them towards disabling a channel.
    Embeddings (and a head tied to one) are not decayed: decay shrinks every row in every step, while
    the row of a rare token only occasionally gets a gradient that counteracts it."""
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for param in (p for p in model.parameters() if p.requires_grad):
        (decayed if param.ndim >= 2 and id(param) not in embedded else others).append(param)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


# ------------------------------------------------------------------------------------- the model


class Residual(nn.Module):
    """Residual block of two convolutions with a shortcut: (B, in, H, W) -> (B, out, H/stride, W/stride)
    (He et al. (2016), "Deep residual learning", figure 2)."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1: nn.Conv2d = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.norm1: nn.BatchNorm2d = nn.BatchNorm2d(num_out)
        self.conv2: nn.Conv2d = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norm2: nn.BatchNorm2d = nn.BatchNorm2d(num_out)
        self.shortcut: nn.Module = (
            nn.Identity()
            if num_in == num_out and stride == 1
            else nn.Conv2d(num_in, num_out, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def build(image: tuple[int, int], num_classes: int, width: int, dropout: float) -> nn.Sequential:
    """Builds a network from images (B, 1, H, W) to logits (B, num_classes), as a sequence of named
    blocks, each of which can be recomputed separately.

    The image is halved until its shorter side is at most 4. Every BatchNorm comes before the head and
    gets more than one value per channel even for a batch of one image, so a global batch of 1 can be
    trained too.
    """
    blocks: dict[str, nn.Module] = {
        "stem": nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        ),
        "block1": Residual(width, width, stride=1),
    }
    height, length = image
    while min(height, length) > 4:
        height, length = (height + 1) // 2, (length + 1) // 2
        blocks[f"block{len(blocks)}"] = Residual(width, 2 * width, stride=2)
        width *= 2
    blocks["head"] = nn.Sequential(
        nn.Flatten(), nn.Dropout(dropout), nn.Linear(width * height * length, num_classes)
    )
    model = nn.Sequential()
    for name, block in blocks.items():
        model.add_module(name, block)
    return model


# -------------------------------------------------------------------------------------- the data


_Images: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Images (N, 1, H, W) float32 in the range 0 to 1, and labels (N) int64, for training and held out."""


def _scikit_learn() -> _Images:
    """The images of scikit-learn's `load_digits`, with pixels from 0 to 16. Its file is read without
    scikit-learn, whose import, with SciPy, takes each rank as long as that of torch."""
    package = find_spec("sklearn")
    places = package.submodule_search_locations if package is not None else None
    files = (Path(place, "datasets", "data", "digits.csv.gz") for place in places or ())
    if (file := next(filter(Path.is_file, files), None)) is None:
        raise InputError(
            "the recipe 'digits' takes its images from scikit-learn, which is not installed: pip"
            " install anybatch[recipes], or give a folder with MNIST's files (-s data=FOLDER)."
        )
    table = np.loadtxt(file, delimiter=",")
    x = torch.as_tensor(table[:, :-1], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.as_tensor(table[:, -1], dtype=torch.int64)
    # Hold out every fifth image in the order of the labels: the split is the same on every machine and
    # for every seed, and a fifth of each digit is held out.
    by_label = y.argsort(stable=True)
    held_out = by_label[::5]
    kept = torch.ones(len(y), dtype=torch.bool).index_fill(0, held_out, False)
    return x[kept], y[kept], x[held_out], y[held_out]


def _mnist(folder: Path) -> _Images:
    arrays = load_folder(folder)
    (height, width), test_size = arrays.train_images.shape[1:], arrays.test_images.shape[1:]
    fault = ""
    if tuple(test_size) != (height, width):
        test = " x ".join(map(str, test_size))
        fault = f"images are {height} x {width} for training, and {test} for testing"
    elif min(height, width) < 2:
        fault = f"images are {height} x {width}, and have to be at least 2 x 2"
    if fault:
        raise InputError(f"the data in {str(folder)!r} cannot be classified: {fault}; give others.")
    return (
        arrays.train_images.unsqueeze(1).float() / 255,
        arrays.train_labels.long(),
        arrays.test_images.unsqueeze(1).float() / 255,
        arrays.test_labels.long(),
    )
