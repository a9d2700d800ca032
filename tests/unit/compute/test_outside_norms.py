"""BatchNorm that a loss runs and the model does not hold."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def networks():
    torch.manual_seed(0)
    judge = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return nn.Linear(3, 4), judge


def told(model, loss, micro_batch=4, steps=2, parameters=None):
    """What is warned of in so many steps."""
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ab.Step(model, optimizer, loss, micro_batch=micro_batch) as step:
            for _ in range(steps):
                step(X)
    return [str(one.message) for one in caught]


def test_it_is_named_once_where_a_step_is_cut():
    made, judge = networks()

    def fooled(model, noise):
        return F.softplus(-judge(model(noise))).mean()

    (sentence,) = told(made, fooled)
    assert "fooled' runs 'judge.1' (BatchNorm1d), which is in training mode" in sentence
    assert "Make it a part of the model" in sentence


@pytest.mark.parametrize("held", ["whole batch", "evaluation mode", "part of the model"])
def test_each_remedy_ends_it(held):
    made, judge = networks()

    def fooled(model, noise):
        return F.softplus(-judge(made(noise))).mean()

    if held == "evaluation mode":
        judge.eval()
    model = nn.ModuleList([made, judge]) if held == "part of the model" else made
    size = 4 if held == "evaluation mode" else len(X)
    assert told(model, fooled, size, parameters=made.parameters()) == []


class Objective:
    """A loss that is an object, with what it uses in a list."""

    def __init__(self, judge):
        self.judges = [judge]

    def __call__(self, model, noise):
        return scored(self.judges[0], model(noise))


def scored(judge, made):
    return F.softplus(-judge(made)).mean()


def by_helper(made, judge):
    def score(images):
        return scored(judge, images)

    return lambda model, noise: score(model(noise))


def by_partial(made, judge):
    return functools.partial(lambda judge, model, noise: scored(judge, model(noise)), judge)


WAYS = {
    "object": lambda made, judge: Objective(judge),
    "method": lambda made, judge: Objective(judge).__call__,
    "helper": by_helper,
    "partial": by_partial,
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_found_however_the_loss_has_it(way):
    made, judge = networks()
    (sentence,) = told(made, WAYS[way](made, judge))
    assert "(BatchNorm1d), which is in training mode and no part of the model" in sentence


def test_nothing_is_said_of_one_that_the_loss_has_and_does_not_run():
    made, judge = networks()

    def fooled(model, noise):
        return model(noise).square().mean() + 0 * len(list(judge.parameters()))

    assert told(made, fooled) == []
    assert not any(module._forward_pre_hooks for module in judge.modules())
