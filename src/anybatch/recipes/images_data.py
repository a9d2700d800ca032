"""Folders of images, one folder per class, as torchvision's ImageFolder reads them.

    FOLDER/cat/a.png ...               no split: some images of each class are held out
    FOLDER/dog/b.jpg ...

    FOLDER/train/cat/a.png ...         two splits: val is held out
    FOLDER/val/cat/c.png ...

Files are listed when the task is created and opened when a sample is requested. Augmentation uses
torch's default generator, which the loader seeds for each sample, so a sample of an epoch is the same
on any rank, in any worker and in any micro-batch.
"""

from __future__ import annotations

import errno
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from anybatch.errors import DataError, InputError, some

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
HELD_OUT_NAMES = ("val", "valid", "validation")
_TRIES = 10  # attempts to find a crop inside the image
_CENTRE = 0.875  # fraction of the shorter side, in evaluation: the usual 224 of 256 pixels
_ASPECTS = (3 / 4, 4 / 3)


Files: TypeAlias = "list[tuple[str, int]]"
"""Paths of images, with their class indices."""


class Found(NamedTuple):
    """Class names in alphabetical order, and the files of the training and held-out parts."""

    classes: list[str]
    train: Files
    held_out: Files


@dataclass(frozen=True)
class RandomCrop:
    """Random crop of an image with at least the fraction `smallest` of its area, resized to
    `[3, size, size]` uint8, and flipped horizontally with probability 0.5 if `flip`: see Szegedy et al.
    (2015), "Going deeper with convolutions", section 6. Uses torch's default generator."""

    size: int
    smallest: float
    flip: bool

    def __call__(self, image: Image) -> Tensor:
        from PIL.Image import Resampling

        size, box = (self.size, self.size), self._box(*image.size)
        pixels = _pixels(image.resize(size, Resampling.BILINEAR, box=box))
        return pixels.flip(2) if self.flip and float(torch.rand(())) < 0.5 else pixels

    def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
        low, high = (math.log(aspect) for aspect in _ASPECTS)
        for _ in range(_TRIES):
            area, aspect, x, y = torch.rand(4).tolist()
            taken = width * height * (self.smallest + (1 - self.smallest) * area)
            ratio = math.exp(low + (high - low) * aspect)
            across, down = math.sqrt(taken * ratio), math.sqrt(taken / ratio)
            if across <= width and down <= height:
                left, top = x * (width - across), y * (height - down)
                return left, top, left + across, top + down
        # The image is so long that no drawn shape fits: the middle, of the least area.
        across = min(width, max(height, self.smallest * width))
        down = min(height, max(width, self.smallest * height))
        return (width - across) / 2, (height - down) / 2, (width + across) / 2, (height + down) / 2


@dataclass(frozen=True)
class CentreCrop:
    """Center crop of an image, resized to `[3, size, size]` uint8."""

    size: int

    def __call__(self, image: Image) -> Tensor:
        from PIL.Image import Resampling
        from PIL.ImageOps import fit

        size, edge = (self.size, self.size), (1 - _CENTRE) / 2
        return _pixels(fit(image, size, Resampling.BILINEAR, bleed=edge))


class Images(Dataset[tuple[Tensor, int]]):
    """Dataset of image files. A sample is `(transformed image [3, H, W] uint8, class index)`.

    Args:
        view: transform from an image in RGB mode to a tensor.

    A file that cannot be read raises `DataError` with its name.
    """

    def __init__(self, files: Files, view: Callable[[Image], Tensor]) -> None:
        self.files = files
        self._view = view

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        return self._view(opened(path)), label


def opened(path: str) -> Image:
    """Reads an image file in RGB mode. Transparency is discarded; of 16-bit values, the upper 8 bits
    are kept.

    Raises `DataError`, with the name of the file, if the file is not a complete image.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            return _in_rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders also raise SyntaxError and struct.error
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise
        raise DataError(f"the file {path!r} cannot be read as an image ({error})") from error


def find(folder: Path, held_out: float, seed: int) -> Found:
    """Lists the images in `folder`; see the module for its layout. If the folder has no held-out part,
    about the fraction `held_out` of each class is held out, chosen by `seed` and the file names alone.

    Hidden files are skipped. Other files without an image suffix are skipped with a warning that names
    some of them.

    Raises `InputError` if the folder does not exist, it has fewer than two classes, a class has no
    images, or a held-out class is not among the training classes.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "is not there"
        raise InputError(
            f"the folder of images {str(folder)!r} {what}: give a folder that has a folder for each"
            " class (-s data=FOLDER)."
        )
    train = folder / "train"
    # A class can be called "train"; then the folder has images and no subfolders.
    root = train if train.is_dir() and _folders(train) else folder
    classes = _folders(root)
    if len(classes) < 2:
        raise InputError(_too_few(root, classes))
    passed_over: list[str] = []
    files = list(_images(root, classes, passed_over))
    labels = {label for _, label in files}
    empty = [name for label, name in enumerate(classes) if label not in labels]
    if empty:
        raise InputError(
            f"{str(root)!r} has no image of the class{'es' if len(empty) > 1 else ''}"
            f" {some(empty)}: put some there ({', '.join(SUFFIXES)}), or remove the folder."
        )
    own = next((folder / n for n in HELD_OUT_NAMES if (folder / n).is_dir()), None)
    if root is train and own is not None:
        _check_classes(own, root, classes)
        parts = files, list(_images(own, classes, passed_over))
    else:
        parts = _divided(files, held_out, seed)
    if passed_over:
        warnings.warn(
            f"{len(passed_over):,} file{'s' if len(passed_over) > 1 else ''} in {str(folder)!r} that"
            f" by name are no images are left out: {some(passed_over)}.",
            stacklevel=3,
        )
    return Found(classes, *parts)


# -------------------------------------------------------------------------------------- the pixels


def _in_rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of an unknown range")
    if image.mode.startswith("I"):  # Pillow's conversion would clip values above 255
        import numpy as np

        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
    if image.mode == "P":
        image = image.convert("RGBA")  # a palette can have transparent colors
    return image.convert("RGB")


def _pixels(image: Image) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


# --------------------------------------------------------------------------------------- the files


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def _images(
    root: Path, classes: Sequence[str], passed_over: list[str]
) -> Iterator[tuple[str, int]]:
    """Yields the images of each class, from its folder in `root` and the subfolders, sorted in each
    folder. Appends other files to `passed_over`."""
    for label, name in enumerate(classes):
        for place, inner, names in os.walk(root / name, followlinks=True):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            for name in sorted(name for name in names if not name.startswith(".")):
                path = os.path.join(place, name)
                if name.lower().endswith(SUFFIXES):
                    yield path, label
                else:
                    passed_over.append(path)


def _divided(files: Files, held_out: float, seed: int) -> tuple[Files, Files]:
    """Splits off the fraction `held_out` of each class, rounded to whole images: at least one if
    `held_out` is not zero, but at least one image stays in the training part."""
    generator = torch.Generator().manual_seed(seed)
    kept: Files = []
    out: Files = []
    for _, group in groupby(files, key=lambda file: file[1]):
        of_class = list(group)
        size = len(of_class)
        count = min(math.floor(size * held_out + 0.5), size - 1)
        if held_out and size > 1:
            count = max(1, count)
        chosen = set(torch.randperm(size, generator=generator)[:count].tolist())
        for number, file in enumerate(of_class):
            (out if number in chosen else kept).append(file)
    return kept, out


def _check_classes(folder: Path, train: Path, classes: Sequence[str]) -> None:
    unknown = [name for name in _folders(folder) if name not in classes]
    if unknown:
        raise InputError(
            f"{str(folder)!r} has the class{'es' if len(unknown) > 1 else ''} {some(unknown)}, of"
            f" which {str(train)!r} has no image: put some there, or remove the folder."
        )


def _too_few(root: Path, classes: Sequence[str]) -> str:
    loose = sum(1 for path in root.iterdir() if path.suffix.lower() in SUFFIXES)
    if classes:
        has = f"has one class only ({classes[0]!r})"
    elif loose:
        has = f"has {loose:,} images, but no folder for each class"
    else:
        has = "has no folder in it"
    return (
        f"the folder of images {str(root)!r} {has}: give one that has a folder for each of two classes"
        " or more."
    )
