"""Planning ran hooks of the user's on tensors without values.

Symptom (0.1): a moving average of the weights that a step hook of the optimizer kept was made of fake
tensors after a run, or was four updates ahead; lists that a forward hook filled held fake tensors.
Mechanism: a trace makes the task's optimizer, hooks and all, and updates by it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

import anybatch as ab

DRAW = torch.Generator().manual_seed(1)
X, Y = torch.randn(24, 6, generator=DRAW), torch.randint(0, 3, (24,), generator=DRAW)
STEPS = 3
SEEN: list[torch.Tensor] = []


class Noting(nn.Module):
    """Notes what it computes in a global list."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 3)

    def forward(self, x):
        result = self.lin(x)
        SEEN.append(result.detach())
        return result


def _loss(model, batch):
    return ab.Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


def _task(make, model):
    return ab.Task(
        model=model,
        loss=_loss,
        optimizer=make,
        train=TensorDataset(X, Y),
        global_batch=24,
        shuffle=False,
        steps=STEPS,
    )


@pytest.mark.parametrize("micro_batch", [None, 7])
@pytest.mark.parametrize("for_all", [False, True])
def test_a_moving_average_in_a_step_hook_is_that_of_the_steps(micro_batch, for_all):
    def averaging(make_optimizer):
        shadow: list[torch.Tensor] = []

        def hook(optimizer, args, kwargs):
            now = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
            if not shadow:
                shadow.extend(now)
            for kept, value in zip(shadow, now, strict=True):
                kept.mul_(0.9).add_(value, alpha=0.1)

        def make(params):
            optimizer = make_optimizer(params)
            if not for_all:
                optimizer.register_step_post_hook(hook)
            return optimizer

        return shadow, hook, make

    def by_hand(params):
        return torch.optim.AdamW(params, lr=0.05)

    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    reference = nn.Linear(6, 3)
    reference.load_state_dict(model.state_dict())
    want, hook, make = averaging(by_hand)
    optimizer = make(reference.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        (_loss(reference, (X, Y)).sum / 24).backward()
        optimizer.step()
        if for_all:
            hook(optimizer, (), {})

    found, hook, make = averaging(by_hand)
    handle = register_optimizer_step_post_hook(hook) if for_all else None
    try:
        ab.train(_task(make, model), micro_batch=micro_batch, progress=False)
    finally:
        if handle is not None:
            handle.remove()
    assert not any(isinstance(value, FakeTensor) for value in found)
    for kept, value in zip(found, want, strict=True):
        torch.testing.assert_close(kept, value)


def test_what_forward_and_its_hooks_note_is_of_real_passes():
    SEEN.clear()
    noted = []
    model = Noting()
    model.lin.register_forward_hook(lambda module, args, result: noted.append(result.detach()))
    task = _task(lambda params: torch.optim.SGD(params, lr=0.1), model)
    ab.plan(task, micro_batch=8)
    assert SEEN == noted == []
    ab.train(task, micro_batch=8, progress=False)
    assert len(SEEN) == len(noted) == 3 * STEPS
    assert not any(isinstance(value, FakeTensor) for value in (*SEEN, *noted))
