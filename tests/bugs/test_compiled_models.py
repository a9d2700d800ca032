"""A model that its user has compiled: blocks within it are recomputed as in any other, and what the
compiler takes is in no budget."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.alone import alone
from tests.equivalence.reference import deviation
from torch import nn

import anybatch as ab
from anybatch.plans import Recompute
from anybatch.process.compilation import num_compilations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("num_passes", torch.zeros(()))

    def forward(self, x):
        self.num_passes += 1
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model, batch):
    return model(batch).square().mean()


def trained(model, batch, **options):
    """The plan of two steps."""
    optimizer = torch.optim.AdamW(model.parameters())
    with ab.Step(model, optimizer, loss, **options) as step:
        for _ in range(2):
            step(batch)
        return step.plan


@pytest.mark.parametrize("keep", ["nothing", "matmuls"])
@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
def test_blocks_of_a_compiled_model_are_recomputed(keep, in_place):
    torch.manual_seed(0)
    model, batch = Net().double(), torch.randn(12, 8, dtype=torch.float64)
    plain, name = copy.deepcopy(model), "_orig_mod.layers.*"
    if in_place:
        model.compile(backend="aot_eager")
        compiled, name = model, "layers.*"
    else:
        compiled = torch.compile(model, backend="aot_eager")
    recompute = Recompute(blocks=(name,), keep=keep)
    plan = trained(compiled, batch, micro_batch=4, recompute=recompute)
    assert plan.choice.recompute == recompute
    trained(plain, batch, micro_batch=4)
    assert deviation(model, plain) < 1e-9
    assert model.layers[0].num_passes == 6  # three micro-batches of each step, once each


@pytest.mark.parametrize("recompute", ["all", "nested"])
def test_blocks_that_the_compiler_could_trace_through_are_recomputed(recompute):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))).double()
    plain, batch = copy.deepcopy(model), torch.randn(12, 8, dtype=torch.float64)
    compiled = torch.compile(model, backend="aot_eager")
    trained(compiled, batch, micro_batch=4, recompute=recompute)
    trained(plain, batch, micro_batch=4)
    assert deviation(model, plain) < 1e-9


@pytest.mark.nightly
@alone
def test_what_the_compiler_takes_is_in_no_budget():
    compiled = torch.compile(Net(), backend="aot_eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    before = num_compilations()
    with ab.Step(compiled, optimizer, loss, memory="64MiB") as step:
        for _ in range(2):
            result = step(torch.randn(12, 8))
        assert step.plan.enforced
        assert step.plan.prediction.rehearsed
        assert result.peak_bytes < 4 << 20  # the compiler allocates tens of MiB
        assert step.plan.prediction.step_seconds < 1  # it takes seconds
    assert num_compilations() > before
