"""Ranks of a run in which memory is refused to one when all have agreed on a step, for
`test_after_the_vote.py`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.launch import find
from anybatch.runs.session import joined

STEP, SAVED = 4, 2
"""The step whose update is refused memory, and the one after which the run was saved."""


def task_of(refuses: bool) -> ab.Task:
    """Six steps. If it `refuses`, the optimizer finds no memory in step `STEP`."""

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made, updates = torch.optim.SGD(params, lr=0.1, momentum=0.9), count(1)

        def refuse(*_: object) -> None:
            if next(updates) == STEP and refuses:
                raise MemoryError("no room")

        made.register_step_pre_hook(refuse)
        return made

    draw = torch.Generator().manual_seed(0)
    return ab.Task(
        model=lambda: nn.Linear(4, 1),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=optimizer,
        train=TensorDataset(torch.randn(48, 4, generator=draw), torch.randn(48, 1, generator=draw)),
        global_batch=8,
        steps=6,
    )


def train(folder: str, bad_rank: int) -> tuple[int, list[int], Tensor]:
    """What each rank does; in the first attempt, memory is refused to one.

    Returns the number of the attempt, the steps done in it, and the weights in the end.
    """
    member = find()
    assert member is not None
    task = task_of(member.rank == bad_rank and member.attempt == 0)
    with joined():
        plan = ab.plan(task, micro_batch=2, rehearsal=False)
        with ab.Session(task, plan, checkpoints=folder) as session:
            session.resume()
            done: list[int] = []
            for step in session.steps():
                done.append(step.step)
                if step.step == SAVED:
                    session.save(wait=True)
            weights = [param.detach().flatten() for param in session.model.parameters()]
            return member.attempt, done, torch.cat(weights)
