"""A plain mean was weighed by samples that collate had left out.

Symptom (0.1): with a collate function that drops samples (`None`, for images that cannot be read), the
update of a plain mean depended on how the step was cut.
Mechanism: each micro-batch weighed as many samples as collate was given, not as it had returned.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import anybatch as ab

KIND = {"dtype": torch.float64}
DRAW = torch.Generator().manual_seed(5)
X, Y = torch.randn(24, 4, generator=DRAW, **KIND), torch.randn(24, 2, generator=DRAW, **KIND)
MISSING = (1, 2, 7, 13, 21)
LEFT = [i for i in range(24) if i not in MISSING]


class Holed(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return None if i in MISSING else (X[i], Y[i])


def _collate(samples):
    found = [sample for sample in samples if sample is not None]
    return torch.stack([x for x, _ in found]), torch.stack([y for _, y in found])


def _loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("bad_data", ["stop", "skip"])
def test_a_mean_weighs_the_samples_that_are_left(bad_data):
    torch.manual_seed(0)
    model, by_hand = nn.Linear(4, 2, **KIND), nn.Linear(4, 2, **KIND)
    by_hand.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        _loss(by_hand, (X[LEFT], Y[LEFT])).backward()
        optimizer.step()
    want = float(_loss(by_hand, (X[LEFT], Y[LEFT])).detach())
    task = ab.Task(
        model=model,
        loss=_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.3),
        train=Holed(),
        valid=Holed(),
        collate=_collate,
        bad_data=bad_data,
        global_batch=24,
        shuffle=False,
        epochs=3,
    )
    events: list[object] = []
    result = ab.train(task, micro_batch=5, progress=False, sinks=[events.append])
    for found, right in zip(result.model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)
    last = [event for event in events if isinstance(event, ab.events.Evaluated)][-1]
    assert last.loss == pytest.approx(want, rel=1e-9)
