"""A reproducible run that was evaluated before its first step ended in an error of `zip`.

Ranks agree on an evaluation by the same call as on a step, which then looks at the parameters that the
step has used: before the first step there was not even a list of them.
"""

from __future__ import annotations

import torch
from torch import nn

import anybatch as ab


def test_a_reproducible_run_is_evaluated_before_its_first_step():
    data = [(torch.ones(3), torch.ones(1))] * 8
    task = ab.Task(
        model=lambda: nn.Linear(3, 1),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=data,
        valid=data,
        global_batch=8,
        steps=1,
        reproducible=True,
    )
    with ab.Session(task, ab.plan(task)) as session:
        before = session.evaluate().loss
        assert len(list(session.steps())) == 1
        assert session.evaluate().loss < before
