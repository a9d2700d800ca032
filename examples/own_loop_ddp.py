"""A custom training loop on several ranks; the lines for anybatch are marked with an arrow.

    python examples/own_loop_ddp.py
    torchrun --nproc-per-node 3 examples/own_loop_ddp.py

The script initializes the process group, divides the data and runs the loop, as it would with
DistributedDataParallel, which is not used: `ab.Step` sums the gradients. The global batch of 1000
samples is not a multiple of 3, and the last one of an epoch is smaller; both are weighted exactly, so
the printed losses are the same on any number of ranks.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import anybatch as ab  # <-


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> ab.Loss:  # <-
    inputs, targets = batch
    error = F.mse_loss(model(inputs).squeeze(1), targets, reduction="sum")
    return ab.Loss(error, weight=len(targets))  # <-


if "RANK" in os.environ:  # started by torchrun
    dist.init_process_group("gloo")
rank = dist.get_rank() if dist.is_initialized() else 0
size = dist.get_world_size() if dist.is_initialized() else 1

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(8192, 64, generator=generator)
targets = inputs[:, :8].square().sum(dim=1)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

with ab.Step(model, optimizer, loss, clip_norm=5.0) as step:  # <- was: DistributedDataParallel
    for epoch in range(4):
        order = torch.randperm(len(inputs), generator=generator)  # the same on all ranks
        for samples in order.split(1000):
            mine = samples.tensor_split(size)[rank]
            outcome = step((inputs[mine], targets[mine]) if len(mine) else None)  # <-
        if rank == 0:
            print(f"epoch {epoch}: loss {outcome.loss:.4f} over {outcome.weight:.0f} samples")

ab.save_weights(model, "model.safetensors")  # <- rank 0 writes, with the names of the plain model
if dist.is_initialized():
    dist.destroy_process_group()
