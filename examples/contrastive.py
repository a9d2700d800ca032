"""A contrastive loss over a global batch that does not fit in memory: which two halves of a digit
belong together?

A loss that compares every sample with every other is not a sum over micro-batches, so plain gradient
accumulation optimizes a different loss, with the few candidates of each pass instead of all 512. Split
into an encoding of each sample and a comparison, the loss is exact for any division into micro-batches.

    python examples/contrastive.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab


class Halves(nn.Module):
    """Separate encoders for the upper and lower halves of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = encoder(), encoder()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encodes images [N, 1, 8, 8] as two tensors [N, 32] with rows of norm 1."""
        above, below = images.chunk(2, dim=2)
        return F.normalize(self.upper(above), dim=1), F.normalize(self.lower(below), dim=1)


def encoder() -> nn.Module:
    """Builds a network from [N, 1, 4, 8] to [N, 32]."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 8, 32),
    )


def encode(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes each sample as one row."""
    return model(batch[0])


def compare(model: nn.Module, encoded: tuple[torch.Tensor, torch.Tensor]) -> ab.Loss:
    """Compares each upper half with every lower half of the global batch, and vice versa."""
    above, below = encoded
    scores = model.scale.exp() * above @ below.T
    own = torch.arange(len(scores), device=scores.device)
    both = F.cross_entropy(scores, own, reduction="sum") + F.cross_entropy(
        scores.T, own, reduction="sum"
    )
    found = (scores.argmax(1) == own).sum()
    return ab.Loss(both / 2, len(scores), metrics={"found": found})


def task() -> ab.Task:
    """Returns a task on the digits of scikit-learn, with 1,437 training samples."""
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images = images[order]
    return ab.Task(
        model=Halves,
        loss=ab.JointLoss(encode, compare),
        optimizer=lambda params: torch.optim.AdamW(params, lr=4e-3),
        train=TensorDataset(images[:1437]),
        valid=TensorDataset(images[1437:]),
        global_batch=512,
        epochs=20,
        evaluate_every=20,
        name="halves",
    )


if __name__ == "__main__":
    result = ab.train(task(), memory="16MiB", out="runs/contrastive")
    verdict = ab.verify(task(), result.plan)
    print(f"the gradient of the whole batch, within {verdict.deviation:.0e}")
