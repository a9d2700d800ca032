"""A task in a user's file.

    anybatch train examples/own_task.py --memory 24MiB
    anybatch plan examples/own_task.py --global-batch 4096
    anybatch recipes examples/own_task.py

The command line calls the function `task`. Its arguments are set with `-s` and converted by their
annotations: `-s width=128` passes the number 128.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import anybatch as ab


def task(global_batch: int = 512, epochs: int = 4, width: int = 32, lr: float = 3e-3) -> ab.Task:
    """Count the bright corners of small noisy images.

    Args:
        global_batch: samples per optimizer step.
        epochs: passes over the training images.
        width: channels of the convolutions.
        lr: learning rate of AdamW.
    """
    return ab.Task(
        model=lambda: build(width),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr),
        train=corners(4096, seed=0),
        valid=corners(512, seed=1),
        global_batch=global_batch,
        epochs=epochs,
        schedule=ab.warmup_cosine(0.1),
        clip_norm=1.0,
    )


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> ab.Loss:
    """Returns the sum of the losses, their number, and the number of correct predictions."""
    images, labels = batch
    logits = model(images)
    total = F.cross_entropy(logits, labels, reduction="sum")
    right = (logits.detach().argmax(dim=1) == labels).sum()
    return ab.Loss(total, weight=len(labels), metrics={"accuracy": right})


def build(width: int) -> torch.nn.Module:
    """Builds a network from images (B, 1, 12, 12) to logits (B, 5)."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, width, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(width, width, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(width * 36, 5),
    )


def corners(num_images: int, seed: int) -> TensorDataset:
    """Returns images (1, 12, 12) with 0 to 4 bright corners, labeled with the number of these."""
    generator = torch.Generator().manual_seed(seed)
    bright = torch.rand(num_images, 2, 2, generator=generator) < 0.5
    images = 0.3 * torch.randn(num_images, 1, 12, 12, generator=generator)
    for row in (0, 1):
        for column in (0, 1):
            corner = images[:, :, 9 * row : 9 * row + 3, 9 * column : 9 * column + 3]
            corner += bright[:, row, column].float()[:, None, None, None]
    return TensorDataset(images, bright.sum(dim=(1, 2)))


if __name__ == "__main__":
    result = ab.train(task(), memory="24MiB")
    print(f"accuracy {result.metrics['accuracy']:.3f}, {result.plan.choice.describe()}")
