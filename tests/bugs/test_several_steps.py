"""Several `ab.Step`s at once, closed in any order.

Symptom (0.1): of two steps on one model with BatchNorm, closing the first took the ghost batches of the
second, and closing that raised AttributeError; while a step was open, the model could not be pickled or
saved ("Can't pickle local object"). Mechanism: each deleted the `forward` in the module's dict and
put back what it had found there; and this dict, with the closures that undo, was what was pickled.
"""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.plans import Recompute


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh()).double()
        self.head = nn.Linear(5, 2).double()

    def forward(self, x):
        return self.head(self.body(x))


def squares(model, x):
    return model(x).square().mean()


def net():
    torch.manual_seed(0)
    return Net()


def steps_on(model, sizes=(4, 6, 8)):
    """Steps on the same model, each with ghost batches and a micro-batch of its own."""
    return [
        ab.Step(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            squares,
            micro_batch=size,
            ghost_batch=size,
            recompute=Recompute(blocks=("body",)),
        )
        for size in sizes
    ]


BATCH = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_hand(model, size):
    """A step over ghost batches of that size, by a plain loop."""
    parts = BATCH.split(size)
    sum(squares(model, part) for part in parts).div(len(parts)).backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
            param.grad = None


def assert_alike(ours, plain):
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_steps_on_one_model_are_closed_in_any_order_and_keep_their_ghost_batches(order):
    model, plain, sizes = net(), net(), (4, 6, 8)
    steps = steps_on(model, sizes)
    left = set(range(3))
    for closed in (None, *order):
        if closed is not None:
            steps[closed].close()
            left.remove(closed)
        for one in sorted(left):
            steps[one](BATCH)
            by_hand(plain, sizes[one])
            assert_alike(model, plain)
    assert all(not {"forward", "__getstate__"} & vars(m).keys() for m in model.modules())


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-weights"])
@pytest.mark.parametrize("taken", [pickled, saved, copy.deepcopy])
def test_what_is_saved_of_a_model_in_training_is_the_plain_model(taken, precision):
    model = net().float()
    before = [set(vars(module)) for module in model.modules()]
    batch = BATCH.float()
    with ab.Step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        squares,
        ghost_batch=4,
        micro_batch=8,
        precision=precision,
        recompute=Recompute(blocks=("body",)),
    ) as step:
        step(batch)
        twin = taken(model)
        assert [set(vars(module)) for module in twin.modules()] == before
        held = {name: value.clone() for name, value in model.state_dict().items()}
        step(batch)  # which is no matter of the copy's
        for name, value in twin.state_dict().items():
            assert torch.equal(value, held[name])
    assert [set(vars(module)) for module in model.modules()] == before


def test_a_forward_of_the_users_own_on_a_module_comes_back():
    model = net()
    plain = model.body[1].forward
    doubled = lambda x: 2 * plain(x)  # noqa: E731
    model.body[1].forward = doubled
    first, second = steps_on(model, (4, 6))
    first(BATCH)
    second(BATCH)
    first.close()
    second(BATCH)
    second.close()
    assert vars(model.body[1])["forward"] is doubled


class Stateful(nn.BatchNorm1d):
    """A norm that says itself what is saved of it."""

    def __getstate__(self):
        return {**vars(self), "told": True}


def test_a_module_that_says_what_is_saved_of_it_is_asked():
    model = nn.Sequential(nn.Linear(4, 3), Stateful(3)).double()
    with ab.Step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), squares, ghost_batch=4
    ) as step:
        step(BATCH)
        twin = copy.deepcopy(model)
    assert twin[1].told
    assert "forward" not in vars(twin[1])
