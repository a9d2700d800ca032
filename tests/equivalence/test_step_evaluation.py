"""`Step.evaluate`: the figures of the script's own evaluation, under the budget of the steps."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from tests.alone import alone
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import anybatch as ab
from anybatch.errors import InputError

MIB = 1 << 20
X = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2)
        )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ab.Loss:
    logits = model(batch[0])
    right = (logits.argmax(1) == batch[1]).sum()
    total = F.cross_entropy(logits, batch[1], reduction="sum")
    return ab.Loss(total, len(logits), metrics={"accuracy": right})


def largest(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, int]]:
    return {"largest": (model(batch[0]).amax(1).sum(), len(batch[0]))}


@pytest.mark.parametrize("batch_size", [50, 16, 3])
def test_it_finds_what_one_piece_would(batch_size: int):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(X, Y), batch_size=batch_size)
    with ab.Step(model, optimizer, loss, micro_batch=4, ghost_batch=4, verbose=False) as step:
        step((X[:20], Y[:20]))
        before = [value.clone() for value in model.state_dict().values()]
        found = step.evaluate(loader, largest)
        assert model.training
        assert all(map(torch.equal, before, model.state_dict().values()))
    model.eval()
    with torch.no_grad():
        logits = model(X)
    assert found.samples == 50
    assert found.loss == pytest.approx(float(F.cross_entropy(logits, Y)), rel=1e-5)
    accuracy, mean = (logits.argmax(1) == Y).float().mean(), logits.amax(1).mean()
    assert found.metrics == pytest.approx({"accuracy": float(accuracy), "largest": float(mean)})


def test_it_says_what_it_needs():
    model = build()
    step = ab.Step(model, torch.optim.SGD(model.parameters()), loss, micro_batch=4, verbose=False)
    with step:
        with pytest.raises(InputError, match="there is no plan to evaluate under yet"):
            step.evaluate([(X, Y)])
        step((X, Y))
        with pytest.raises(InputError, match="evaluate was given a list_iterator"):
            step.evaluate(iter([(X, Y)]))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux only")
@alone
def test_it_is_held_to_the_budget_and_the_scripts_own_is_not():
    model = nn.Sequential(nn.Linear(6, 4000), nn.ReLU(), nn.Linear(4000, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = X.repeat(400, 1), Y.repeat(400)  # 320 MB of activations
    with ab.Step(model, optimizer, loss, memory="100MiB", verbose=False) as step:
        step((X, Y))
        found = step.evaluate([(inputs, labels)])
        with torch.no_grad():
            wanted = F.cross_entropy(model(inputs), labels)  # 320 MB and more, and not refused
        assert step((X, Y)).peak_bytes <= 100 * MIB
    assert found.samples == len(inputs)
    assert abs(found.loss - float(wanted)) < 1e-4
