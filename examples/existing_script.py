"""An existing training loop with five lines for anybatch, marked with an arrow.

    python examples/existing_script.py

The script keeps its model, optimizer, data and loop. The loader returns batches of 8192 samples, which
are processed in micro-batches that fit in memory.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import anybatch as ab  # <-


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> ab.Loss:  # <-
    inputs, targets = batch
    error = F.mse_loss(model(inputs).squeeze(1), targets, reduction="sum")
    return ab.Loss(error, weight=len(targets))  # <-


torch.manual_seed(0)
inputs = torch.randn(32768, 64)
targets = inputs[:, :8].square().sum(dim=1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8192, shuffle=True)

model = torch.nn.Sequential(
    torch.nn.Linear(64, 512),
    torch.nn.ReLU(),
    torch.nn.Linear(512, 512),
    torch.nn.ReLU(),
    torch.nn.Linear(512, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

with ab.Step(model, optimizer, loss, memory="64MiB", clip_norm=5.0) as step:  # <-
    for epoch in range(5):
        for batch in loader:
            outcome = step(batch)  # <- was: zero_grad, loss, backward, clip, optimizer.step
        print(
            f"epoch {epoch}: loss {outcome.loss:.3f}, gradient norm {outcome.grad_norm:.2f},"
            f" {outcome.num_micro_batches} micro-batches"
        )
