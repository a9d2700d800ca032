"""Images in folders: a residual network or a torchvision model, trained to classify them.

Data loading is expensive in this task: files are decoded and randomly cropped during training. It
requires Pillow, reads a local folder and downloads nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.errors import InputError
from anybatch.recipes.digits import Residual, decay_groups
from anybatch.recipes.images_data import CentreCrop, Images, RandomCrop, find
from anybatch.recipes.options import ABOVE_ZERO, AT_LEAST_ZERO, PART, Range, check
from anybatch.recipes.schedules import scaled_lr, warmup_cosine
from anybatch.task import Loss, Task

MEAN = (0.485, 0.456, 0.406)
STANDARD_DEVIATION = (0.229, 0.224, 0.225)
"""Statistics of ImageNet's channels, for values from 0 to 1, as used with torchvision's models."""

REFERENCE_BATCH = 256
SGD_LR, LARGEST_SGD_LR = 0.1, 3.2
ADAMW_LR, LARGEST_ADAMW_LR = 4e-3, 1e-2  # as in the recipe `digits`
_SGD_DECAY, _ADAMW_DECAY = 1e-4, 0.05
_PIXELS, _SMALL_PIXELS = 224, 64  # for torchvision's models, and for `small`
_SMALL_WIDTH = 32
_LEAST_PIXELS = 16  # leaves 2 x 2 pixels in the last stage


def images(
    data: Path,
    global_batch: int = 128,
    epochs: int = 30,
    steps: int | None = None,
    model: str = "small",
    pixels: int | None = None,
    optimizer: Literal["adamw", "sgd"] | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    label_smoothing: float = 0.1,
    dropout: float = 0.0,
    smallest_crop: float = 0.25,
    flip: bool = True,
    held_out: float = 0.1,
    ghost_batch: int = 32,
    num_workers: int = 0,
    bad_data: Literal["stop", "skip"] = "stop",
    seed: int = 0,
) -> Task:
    """Classify images from a folder with one subfolder per class.

    If `FOLDER/train` and `FOLDER/val` exist, each with one folder per class, `val` is held out;
    otherwise a part of each class is. Training uses random crops, evaluation uses center crops.

    Args:
        data: folder with one subfolder per class, or with `train` and `val` folders of this layout.
        global_batch: images per optimizer step.
        epochs: passes over the training images.
        steps: optimizer steps, in place of epochs.
        model: small (a tenth of ResNet-18), or the name of a model of torchvision, such as resnet50.
        pixels: height and width of the model's input images. Default: 64 for small, 224 for others.
        optimizer: adamw, or sgd with Nesterov momentum of 0.9. Default: adamw for small, which learns
            from few images with it, and sgd for others.
        lr: peak learning rate at a global batch of 256; see `scaled_lr` for other batch sizes.
            Default: 0.004 for adamw, 0.1 for sgd.
        weight_decay: weight decay of kernels and matrices only. Default: 0.05 for adamw, 0.0001 for
            sgd.
        label_smoothing: fraction of a label that is spread evenly over all classes, in training.
        dropout: dropout probability before the last layer of small.
        smallest_crop: minimum area of a random crop, as a fraction of the image's area.
        flip: whether training flips half of the images horizontally.
        held_out: fraction of each class that is held out if there is no `val`.
        ghost_batch: images over which BatchNorm computes its statistics.
        num_workers: processes that load images; 0 loads in the training process. Use several with a
            GPU.
        bad_data: stop at a file that is not an image, or skip it.
        seed: random seed for the order of images, the held-out part, crops, initialization and dropout.

    Raises:
        InputError: if options are out of range (names all of them), or the folder is invalid.
    """
    ranges = {
        "pixels": (
            pixels,
            Range(
                f"a whole number of at least {_LEAST_PIXELS}", lambda size: size >= _LEAST_PIXELS
            ),
        ),
        "lr": (lr, ABOVE_ZERO),
        "weight_decay": (weight_decay, AT_LEAST_ZERO),
        "label_smoothing": (label_smoothing, PART),
        "dropout": (dropout, PART),
        "held_out": (held_out, PART),
        "smallest_crop": (
            smallest_crop,
            Range("a number above 0, up to 1", lambda area: 0 < area <= 1),
        ),
    }
    check("images", ranges)
    if importlib.util.find_spec("PIL") is None:
        raise InputError(
            "the recipe 'images' decodes images with Pillow, which is not installed:"
            " pip install anybatch[images]."
        )
    _check_model(model)
    if pixels is None:
        pixels = _SMALL_PIXELS if model == "small" else _PIXELS
    found = find(data.expanduser(), held_out, seed)
    batch = max(1, min(global_batch, len(found.train)))  # a value below 1 is reported by Task
    if optimizer == "sgd" or (optimizer is None and model != "small"):
        rate = scaled_lr(lr or SGD_LR, batch, REFERENCE_BATCH, LARGEST_SGD_LR, power=1)
        make = partial(torch.optim.SGD, lr=rate, momentum=0.9, nesterov=True)
        decay = _SGD_DECAY
    else:
        rate = scaled_lr(lr or ADAMW_LR, batch, REFERENCE_BATCH, LARGEST_ADAMW_LR)
        make = partial(torch.optim.AdamW, lr=rate)
        decay = _ADAMW_DECAY
    valid = Images(found.held_out, CentreCrop(pixels))
    return Task(
        model=partial(build, model, pixels, len(found.classes), dropout),
        loss=partial(loss, label_smoothing=label_smoothing),
        optimizer=make,
        parameters=partial(
            decay_groups, weight_decay=decay if weight_decay is None else weight_decay
        ),
        schedule=warmup_cosine(0.1),
        train=Images(found.train, RandomCrop(pixels, smallest_crop, flip)),
        valid=valid if len(valid) else None,
        global_batch=global_batch,
        epochs=epochs if steps is None else None,
        steps=steps,
        ghost_batch=ghost_batch,
        num_workers=num_workers,
        bad_data=bad_data,
        seed=seed,
        name="images",
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor], label_smoothing: float = 0.0) -> Loss:
    """Cross-entropy and accuracy, for images (B, 3, H, W) uint8 and labels (B) int64; with more than
    five classes, also top-5 accuracy. Label smoothing applies in training mode only."""
    pixels, labels = batch
    logits = model(normalised(pixels, next(model.parameters()).dtype))
    if not isinstance(logits, Tensor):  # some torchvision models add those of auxiliary heads
        logits = logits[0]
    smoothing = label_smoothing if model.training else 0.0
    total = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    scores = logits.detach()
    metrics = {"accuracy": (scores.argmax(dim=1) == labels).sum()}
    if scores.size(1) > 5:
        first = scores.topk(5, dim=1).indices
        metrics["top5_accuracy"] = (first == labels[:, None]).any(dim=1).sum()
    return Loss(total, weight=len(labels), metrics=metrics)


def normalised(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """Normalizes images (B, 3, H, W) uint8 by the mean and standard deviation of ImageNet's channels.
    The result has type `dtype`, or float32 if that is wider."""
    wide = torch.promote_types(dtype, torch.float32)
    # Channel by channel, since Python scalars need no copy from the host in every pass.
    channels = zip(pixels.unbind(1), MEAN, STANDARD_DEVIATION, strict=True)
    return torch.stack([(one.to(wide) / 255 - mean) / std for one, mean, std in channels], 1)


# ------------------------------------------------------------------------------------- the model


def build(name: str, pixels: int, num_classes: int, dropout: float) -> nn.Module:
    """Builds a model from images (B, 3, pixels, pixels) to logits (B, num_classes): torchvision's model
    `name`, with random weights and its default dropout, or `small`, a sequence of named blocks, each of
    which can be recomputed separately."""
    if name != "small":
        return _torchvision(name).get_model(name, weights=None, num_classes=num_classes)
    width = _SMALL_WIDTH
    stem = [nn.Conv2d(3, width, 3, 2 if pixels >= 64 else 1, padding=1, bias=False)]
    if pixels >= 128:  # downsampled by four before the first block
        stem = [nn.Conv2d(3, width, 7, 2, padding=3, bias=False)]
    pool = [nn.MaxPool2d(3, 2, padding=1)] if pixels >= 128 else []
    model = nn.Sequential()
    model.add_module("stem", nn.Sequential(*stem, nn.BatchNorm2d(width), nn.ReLU(), *pool))
    channels = width
    for stage in range(4):
        block = Residual(channels, width << stage, stride=2 if stage else 1)
        # The block is initially its shortcut alone: see Goyal et al. (2017), section 5.1.
        nn.init.zeros_(block.norm2.weight)
        model.add_module(f"stage{stage + 1}_block1", block)
        channels = width << stage
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout)]
    model.add_module("head", nn.Sequential(*head, nn.Linear(channels, num_classes)))
    return model


def _check_model(name: str) -> None:
    if name == "small":
        return
    models = _torchvision(name)
    known = models.list_models(module=models)
    if name not in known:
        raise InputError(
            f"torchvision has no model {name!r} that classifies images: give 'small', or one of"
            f" torchvision's {len(known)}: {', '.join(known)}."
        )


def _torchvision(name: str) -> Any:
    """Imports `torchvision.models`. Raises `InputError`, with the model's `name`, if that fails."""
    try:
        return importlib.import_module("torchvision.models")
    except Exception as error:  # a build for another torch raises RuntimeError
        raise InputError(
            f"the model {name!r} is not 'small', and torchvision, whose models go by their own names"
            f" (resnet50, say), cannot be imported ({error}): install the torchvision that belongs to"
            " your torch (pip install torchvision), or give 'small'."
        ) from error
