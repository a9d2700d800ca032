"""A custom training loop: `Session` runs one global step per iteration.

    python examples/own_the_loop.py

The script decides when to evaluate, what to save and when to stop; the plan determines the step itself
(division into micro-batches, accumulation, normalization, recovery).
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import anybatch as ab


def spirals(num_points: int, seed: int) -> TensorDataset:
    """Returns points (2) on one of three noisy spirals, labeled with the number of the spiral."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (num_points,), generator=generator)
    radius = torch.rand(num_points, generator=generator) * 2 + 0.2
    angle = 2.5 * radius + arm * 2.094
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points + 0.05 * torch.randn(points.shape, generator=generator), arm)


def build() -> torch.nn.Module:
    layers = [torch.nn.Linear(2, 128), torch.nn.Tanh()]
    for _ in range(3):
        layers += [torch.nn.Linear(128, 128), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(128, 3))


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> ab.Loss:
    points, arms = batch
    logits = model(points)
    right = (logits.detach().argmax(dim=1) == arms).sum()
    return ab.Loss(
        F.cross_entropy(logits, arms, reduction="sum"), len(arms), metrics={"accuracy": right}
    )


task = ab.Task(
    model=build,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3),
    train=spirals(6000, seed=0),
    valid=spirals(600, seed=1),
    global_batch=1000,
    steps=200,
    last="wrap",  # an epoch can end within a step
    evaluate_every=10**9,  # the loop below evaluates
    name="spirals",
)
plan = ab.plan(task, memory="8MiB")
print(plan.choice.describe())

best = 0.0
weights = Path(tempfile.mkdtemp()) / "best.safetensors"
with ab.Session(task, plan) as session:
    for step in session.steps():
        if step.step % 20:
            continue
        accuracy = session.evaluate().metrics["accuracy"]
        print(f"step {step.step}: loss {step.loss:.4f}, held-out accuracy {accuracy:.3f}")
        if accuracy > best:
            best = accuracy
            ab.save_weights(session.model, weights)
        if accuracy >= 0.99:
            break
    print(f"peak memory {session.peak_bytes / 2**20:.1f} MiB")

model = build()
ab.load_weights(model, weights)
print(f"best accuracy {best:.3f}, weights read back: {sum(p.numel() for p in model.parameters())}")
