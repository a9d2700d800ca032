"""Fused SGD left half-precision parameters as they were on a CPU.

Symptom (0.1): a run in bf16-pure or fp16-pure with plain SGD did not train, and nothing said so.
Mechanism: the plan chose torch's fused kernel, which computes new values of tensors that fill a SIMD
vector, and stores none of them.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.errors import InputError

DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(32, 4, generator=DRAW), torch.randn(32, 8, generator=DRAW)
HALVES = {"bf16-pure": torch.bfloat16, "fp16-pure": torch.float16}


def _loss(model, batch):
    outputs = model(batch[0])
    return (outputs.float() - batch[1].float()).square().mean()


def _build():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))


@pytest.mark.parametrize("precision", HALVES)
def test_half_precision_trains_as_the_plain_update_does(precision):
    make = torch.optim.SGD
    torch.manual_seed(0)
    model = _build()
    half = HALVES[precision]
    by_hand = _build().to(half)
    by_hand.load_state_dict(model.state_dict())
    optimizer = make(by_hand.parameters(), lr=0.05, foreach=False)
    for _ in range(4):
        optimizer.zero_grad()
        _loss(by_hand, (X.to(half), Y)).backward()
        optimizer.step()
    task = ab.Task(
        model=model,
        loss=_loss,
        optimizer=partial(make, lr=0.05),
        train=TensorDataset(X, Y),
        global_batch=32,
        shuffle=False,
        steps=4,
    )
    trained = ab.train(task, precision=precision, progress=False).model
    for found, want in zip(trained.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(found.float(), want.float(), atol=4e-3, rtol=2e-2)


def test_a_fused_sgd_of_the_script_is_refused_in_half_precision_on_a_cpu():
    model = _build().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    batch = X.bfloat16(), Y.bfloat16()
    with (
        ab.Step(model, optimizer, _loss, micro_batch=8) as step,
        pytest.raises(InputError, match="leave fused out"),
    ):
        step(batch)
