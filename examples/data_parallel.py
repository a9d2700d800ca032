"""Several devices in one process, for a loop in the style of `nn.DataParallel`.

    python examples/data_parallel.py

Outputs and losses stay on the device that computes them, so the first device needs no more memory than
the others. The loss is the exact mean over the whole batch: here a third of the labels is ignored,
unevenly across the devices. Without several GPUs, the CPU is used as three devices.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.parallel.data_parallel import (
    BalancedDataParallel,
    DataParallelCriterion,
    DataParallelModel,
    gather,
)

devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
if len(devices) < 2:
    devices = ["cpu"] * 3
home = devices[0]

torch.manual_seed(0)
inputs = torch.randn(1000, 32, dtype=torch.float64)
labels = inputs[:, :5].argmax(dim=1)
labels[:333] = -100
inputs, labels = inputs.to(home), labels.to(home)


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5)).double().to(home)


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# The gradient equals that of the plain model, even if one device gets more samples than another, and if
# the mean of the per-device means is not the mean of the batch.
plain = build()
expected = gradient(plain, F.cross_entropy(plain(inputs), labels))
model = DataParallelModel(build(), devices, shares=[2.0] + [1.0] * (len(devices) - 1))
criterion = DataParallelCriterion(nn.CrossEntropyLoss())
outputs = model(inputs)
found = gradient(model, criterion(outputs, labels))
means = [
    F.cross_entropy(output, part.to(output.device)).to(home)
    for output, part in zip(model(inputs), labels.split(outputs.sizes), strict=True)
]
wrong = gradient(model, torch.stack(means).mean())
print(f"{len(inputs)} samples on {len(outputs)} devices: {', '.join(map(str, outputs.sizes))}")
for name, ours in (("DataParallelCriterion", found), ("mean of the devices' means", wrong)):
    distance = float((ours - expected).norm() / expected.norm())
    print(f"{name}: gradient {distance:.0e} from that of the plain model")

# Training and evaluation, with a last batch that is not evenly divisible.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(3):
    for batch in torch.randperm(len(inputs), device=home).split(128):
        loss = criterion(model(inputs[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = gather(model(inputs), "cpu").argmax(dim=1) == labels.cpu()
    counted = labels.cpu() >= 0
    print(f"epoch {epoch}: {float(right[counted].double().mean()):.0%} right")

# State dicts are compatible with plain modules: names have no "module." prefix.
plain.load_state_dict(model.state_dict())

# If the first device must gather the whole output, it can get fewer samples.
balanced = BalancedDataParallel(100, plain, devices=devices)
print(f"balanced: {balanced.sizes(1000)} samples, output {tuple(balanced(inputs).shape)}")
