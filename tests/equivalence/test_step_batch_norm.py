"""BatchNorm in a Step is that of the plain loop while a batch runs in one piece; a cut is told."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab


class Small(nn.Module):
    """Convolutions with BatchNorm and dropout."""

    def __init__(self, channels=8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(channels, 5)

    def forward(self, images):
        return self.head(self.body(images))


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def batches_of(sizes, side=8):
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 3, side, side, generator=draw), torch.randint(5, (n,), generator=draw))
        for n in sizes
    ]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("memory", [None, "512MiB"])
def test_one_piece_is_the_plain_loop_to_the_bit(memory):
    """Parameters, running statistics, dropout's draws, and the generator afterwards."""
    torch.manual_seed(0)
    model = Small()
    other = copy.deepcopy(model)
    batches = batches_of([32, 32, 64, 8])  # powers of two divide without rounding
    torch.manual_seed(1)
    optimizer = sgd(other)
    for batch in batches:
        optimizer.zero_grad()
        loss(other, batch).backward()
        optimizer.step()
    expected, after = other.state_dict(), torch.get_rng_state()
    torch.manual_seed(1)
    with (
        warnings.catch_warnings(),
        ab.Step(model, sgd(model), loss, memory=memory, verbose=False) as step,
    ):
        warnings.simplefilter("error")
        passes = [step(batch).num_micro_batches for batch in batches]
    assert passes == [1] * 4
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.slow
def test_what_does_not_fit_is_cut_into_ghost_batches_as_large_as_fit_and_told():
    model = Small(channels=64)
    batches = batches_of([64, 64], side=64)
    # Each layer keeps 64 x 64 x 64 x 64 numbers of 4 bytes, 64 MiB.
    with ab.Step(model, sgd(model), loss, memory="160MiB", verbose=False) as step:
        with pytest.warns(UserWarning, match=r"does not fit the memory in one piece.*ghost"):
            outcome = step(batches[0])
        ghost = step.plan.task.ghost_batch
        assert outcome.num_micro_batches >= 2
        assert 64 % ghost == 0
        assert ghost >= 8
        assert outcome.peak_bytes <= 176 << 20  # what the heap keeps in pieces may go beyond
        again = step(batches[1])
        assert step.plan.task.ghost_batch == ghost
        assert again.weight == 64


def test_the_first_call_prints_the_plan_and_can_be_silent(capfd):
    model = Small()
    for verbose in (True, False):
        with ab.Step(model, sgd(model), loss, memory="512MiB", verbose=verbose) as step:
            for batch in batches_of([16, 16]):
                step(batch)
            assert "in one piece" in step.report()
        told = capfd.readouterr().err
        assert told.count("16 samples per step, in one piece") == verbose
        assert ("rehearsed peak" in told) == verbose


def test_a_later_batch_that_does_not_fit_is_cut_in_its_own_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.BatchNorm1d(256), nn.Linear(256, 3)).double()
    seen = []
    model[1].register_forward_hook(lambda module, args, result: seen.append(len(args[0])))

    def batch(number):
        return torch.randn(number, 8, dtype=torch.float64), torch.randint(3, (number,))

    with ab.Step(model, sgd(model), loss, memory="24MiB", verbose=False) as step:
        step(batch(1000))
        with pytest.warns(UserWarning, match="does not fit the memory in one piece") as warned:
            passes = step(batch(8000)).num_micro_batches
    assert passes > 1
    assert seen == [1000, *[8000 // passes] * passes]
    assert {one.filename for one in warned} == {__file__}
