"""Planning for an absent GPU: the model is traced with fake tensors, and no weight is allocated.

    python examples/plan_for_a_gpu_elsewhere.py

The peak memory is an estimate for a device that is not present: CPU tensors are used in place of the
device's, and the allocator's rounding and a constant for context and libraries are added.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab

LAYERS, WIDTH, TOKENS, VOCABULARY = 6, 768, 512, 32_000


class Sentences(torch.utils.data.Dataset[Tensor]):
    """Placeholder for the real data: planning reads two samples and uses only their shapes."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(TOKENS + 1, dtype=torch.long)


class Language(nn.Module):
    """Language model from tokens (B, T) to logits (B, T, VOCABULARY)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, WIDTH // 64, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def loss(model: nn.Module, tokens: Tensor) -> ab.Loss:
    logits = model(tokens[:, :-1])
    total = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return ab.Loss(total, tokens[:, 1:].numel())


task = ab.Task(
    model=Language,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
    train=Sentences(),
    global_batch=512,
    steps=1000,
    name="language",
)
for size in ("24GiB", "1GiB"):
    print(f"\n{size}")
    try:
        plan = ab.plan(task, ab.Machine.describe(size), precision="bf16")
    except ab.NoPlanFits as error:
        print(error)
        continue
    for what, how in plan.explain():
        print(f"  {what:15}{how}")
