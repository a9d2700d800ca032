"""A step that went over the ends of several epochs was taken to have ended one.

Symptom: with 10 samples, a global batch of 25 and last="wrap", the evaluations after steps 1 to 4 told
epochs 1, 3, 6 and 8, and so did checkpoints; the samples that came next were of 2, 5, 7 and 10.

Mechanism: the epoch after a step was the one in which it began, and one more if any ended in it.
"""

from __future__ import annotations

import pytest
import torch
from tests.equivalence.reference import plan_for
from torch import nn
from torch.utils.data import IterableDataset

import anybatch as ab
from anybatch.events import Evaluated

SAMPLES = [(torch.ones(3), torch.ones(1))] * 10


class Stream(IterableDataset):
    def __iter__(self):
        return iter(SAMPLES)


@pytest.mark.parametrize("data", [SAMPLES, Stream()], ids=["by index", "stream"])
def test_the_epoch_after_a_step_is_that_of_the_next_sample(data):
    task = ab.Task(
        model=lambda: nn.Linear(3, 1),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=data,
        valid=SAMPLES,
        global_batch=25,
        last="wrap",
        steps=4,
        evaluate_every=1,
    )
    events = []
    with ab.Session(task, plan_for(task, 25), [events.append]) as session:
        began = [step.epoch for step in session.steps()]
    assert began == [0, 2, 5, 7]
    assert [event.epoch for event in events if isinstance(event, Evaluated)] == [2, 5, 7, 10]
