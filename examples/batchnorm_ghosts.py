"""BatchNorm under gradient accumulation: why ghost batches are part of the task.

    python examples/batchnorm_ghosts.py

BatchNorm normalizes over all samples of a forward pass, so with plain accumulation the gradient
depends on the micro-batch size. With ghost batches, the global batch is always divided into the same
groups, and a micro-batch contains a whole number of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab

torch.manual_seed(0)
images = torch.randn(256, 3, 8, 8)
labels = (images.mean(dim=(1, 2, 3)) > 0).long()


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 36, 2),
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ab.Loss:
    inputs, targets = batch
    return ab.Loss(F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets))


def plain(micro_batch: int) -> Tensor:
    """Returns the parameters after one step of a loop that accumulates without ghost batches."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in zip(images.split(micro_batch), labels.split(micro_batch), strict=True):
        (loss(model, (inputs, targets)).sum / len(images)).backward()
    optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def exact(micro_batch: int) -> Tensor:
    """Returns the parameters after one global step with ghost batches of 32."""
    task = ab.Task(
        model=build,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(images, labels),
        shuffle=False,
        global_batch=256,
        steps=1,
        ghost_batch=32,
    )
    result = ab.train(task, micro_batch=micro_batch, progress=False)
    return nn.utils.parameters_to_vector(result.model.parameters()).detach()


for name, update in (("plain accumulation", plain), ("ghost batches of 32", exact)):
    reference = update(256)
    for size in (128, 64, 32):
        distance = float((update(size) - reference).norm() / reference.norm())
        print(f"{name}, micro-batch {size:3}: {distance:.1e} from the one-piece update")
