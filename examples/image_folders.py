"""Images in folders: from files to a trained network, without downloads.

    python examples/image_folders.py

The handwritten digits of scikit-learn are saved as PNG files, one folder per class, and the recipe
`images` is trained on them as on any other images:

    anybatch train images -s data=FOLDER -s pixels=16 -s flip=false
"""

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import anybatch as ab
from anybatch.recipes.images import images


def write_digits(folder: Path, each: int) -> None:
    """Saves `each` images of every digit as `FOLDER/DIGIT/NUMBER.png`."""
    pixels, labels = load_digits(return_X_y=True)
    for digit in range(10):
        (folder / str(digit)).mkdir()
        for number, image in enumerate(pixels[labels == digit][:each]):
            grey = np.uint8(image.reshape(8, 8) * 15.9)
            Image.fromarray(grey).save(folder / str(digit) / f"{number}.png")


with tempfile.TemporaryDirectory() as folder:
    write_digits(Path(folder), each=40)
    # A flipped digit is another sign, and half a digit is not recognizable.
    task = images(
        data=Path(folder), pixels=16, epochs=4, global_batch=32, flip=False, smallest_crop=0.6
    )
    result = ab.train(task, memory="256MiB")
    print(f"held-out accuracy {result.metrics['accuracy']:.2f}")
    print(f"and among the first five {result.metrics['top5_accuracy']:.2f}")
