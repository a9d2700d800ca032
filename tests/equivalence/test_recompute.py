"""Recompute changes what is kept, never what is computed."""

import copy
import dataclasses
import itertools
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.decoder import Decoder, next_word
from tests.equivalence.reference import assert_equal, deviation, plan_for, train, train_plainly
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.compute import Replica
from anybatch.errors import InputError
from anybatch.estimate.kernels import CudaKernels
from anybatch.estimate.trace import alive, tracing
from anybatch.plans import Choice, Recompute

KIND = {"dtype": torch.float64}


class Block(nn.Module):
    """A residual block with keyword arguments, dropout, and work in place on a matrix product."""

    def __init__(self, width=6, dropout=0.0):
        super().__init__()
        self.up = nn.Linear(width, 12, **KIND)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(12, width, **KIND)

    def forward(self, x, *, scale=1.0):
        return x + scale * self.down(self.drop(self.act(self.up(x).mul_(0.5).add_(0.1))))


class Stack(nn.Module):
    """Blocks in a list, called with keyword arguments."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(4))
        self.head = nn.Linear(6, 3, **KIND)

    def forward(self, x):
        scale = torch.tensor(0.5, **KIND)
        for block in self.blocks:
            x = block(x, scale=scale)
        return self.head(x)


def chain(dropout=0.0):
    """Blocks in a sequence."""
    return nn.Sequential(*(Block(dropout=dropout) for _ in range(5)), nn.Linear(6, 3, **KIND))


def loss(model, batch):
    x, y = batch
    return ab.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def task_of(model, steps=20):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(30, 6, generator=draw, **KIND)
    y = torch.randint(0, 3, (30,), generator=draw)
    return ab.Task(
        model=model,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        train=TensorDataset(x, y),
        global_batch=12,
        steps=steps,
    )


WAYS = {
    "nothing": (Stack, Recompute()),
    "one by name": (Stack, Recompute(blocks=("blocks.1",))),
    "wildcard": (Stack, Recompute(blocks=("blocks.*",))),
    "matmuls kept": (Stack, Recompute(blocks=("blocks.*",), keep="matmuls")),
    "matmuls kept, on host": (Stack, Recompute(blocks=("blocks.*",), keep="matmuls", to_host=True)),
    "host": (Stack, Recompute(to_host=True)),
    "whole": (Stack, Recompute(blocks=(".",))),
    "nested": (chain, Recompute(blocks=(".",), nested=True)),
    "nested, on host": (chain, Recompute(blocks=(".",), nested=True, to_host=True)),
    "chain, each": (chain, Recompute(blocks=("*",))),
    "overlapping names": (Stack, Recompute(blocks=("blocks.0", "blocks.0.*", "blocks.2"))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("micro_batch", [5, 12])
def test_parameters_are_those_of_the_plain_loop(way, micro_batch):
    model, recompute = WAYS[way]
    task = task_of(model)
    assert_equal(train(task, micro_batch, recompute=recompute), train_plainly(task), 1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_dropout_draws_the_same_masks_again(way):
    model, recompute = WAYS[way]
    task = task_of(lambda: model(dropout=0.4), steps=8)
    kept = train(task, 4)
    again = train(task, 4, recompute=recompute)
    assert deviation(again.model, kept.model) < 1e-12
    other = train(dataclasses.replace(task, seed=1, model=own(task)), 4)
    assert deviation(other.model, kept.model) > 1e-3  # the masks do matter


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"keep": "matmuls"},
        {"to_host": True},
        {"blocks": ()},
        {"blocks": (".",)},
        {"chunked_attention": True},
        {"chunked_attention": True, "keep": "matmuls"},
    ],
)
@pytest.mark.parametrize("length", [9, pytest.param(21, marks=pytest.mark.nightly)])
def test_mlps_in_tiles_train_as_the_plain_loop(length, more):
    draw = torch.Generator().manual_seed(0)
    task = ab.Task(
        model=Decoder,
        loss=next_word,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        train=TensorDataset(torch.randint(0, 23, (20, length), generator=draw)),
        global_batch=5,
        steps=8,
    )
    tiled = Recompute(**{"blocks": ("layers.*",), "tiled": ("layers.*.mlp",), **more})
    assert_equal(train(task, 2, recompute=tiled), train_plainly(task), 1e-9)


def own(task):
    """The initial model of `task`, whatever the seed."""
    return task.build_model()


class Counting(nn.Module):
    """Counts its calls in each of the ways that modules do, and computes with the count."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6, **KIND)
        self.register_buffer("in_place", torch.zeros((), **KIND))
        self.register_buffer("replaced", torch.zeros((), **KIND))
        self.register_buffer("constant", torch.ones(100, **KIND))
        self.register_buffer("absent", None)
        self.passes = []

    def forward(self, x):
        if self.training:
            self.passes.append(len(x))
            self.in_place += 1
            self.replaced = self.replaced * 0.5 + x.detach().mean()
        return torch.tanh(self.lin(x)) * self.in_place.clone() + self.replaced


@pytest.mark.parametrize("recompute", [(), ("0", "1"), (".",), "nested"])
def test_a_module_that_counts_counts_once_and_computes_the_same(recompute):
    def model():
        return nn.Sequential(Counting(), Counting(), nn.Linear(6, 3, **KIND))

    task = task_of(model, steps=6)
    way = (
        Recompute(blocks=(".",), nested=True)
        if recompute == "nested"
        else Recompute(blocks=recompute)
    )
    kept, again = train(task, 4), train(task, 4, recompute=way)
    assert deviation(again.model, kept.model) < 1e-12
    # 30 samples in global batches of 12 are batches of 12, 12, 6: 3 + 3 + 2 micro-batches, twice.
    assert float(again.model[0].in_place) == 16
    assert again.model[0].passes == 2 * [4, 4, 4, 4, 4, 4, 4, 2]


class Observing(nn.Module):
    """Counts in each of the ways that modules do, but only from some step on."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6, **KIND)
        for name in ("in_place", "replaced", "by_data"):
            self.register_buffer(name, torch.zeros((), **KIND))
        self.register_buffer("large", torch.zeros((1 << 17) + 1, **KIND))
        self.register_buffer("constant", torch.ones(1, **KIND).expand(6))
        self.register_buffer("absent", None)
        self.is_calm = True

    def forward(self, x):
        if not self.is_calm:
            self.in_place += 1
            self.replaced = self.replaced * 0.5 + x.detach().mean()
            self.by_data.data.add_(1)
            self.large += 1
            self.absent = x.detach().mean() if self.absent is None else self.absent * 0.5
            x = x * self.absent.clone() + self.by_data.clone()
        return torch.tanh(self.lin(x)) * self.in_place.clone() + self.replaced + self.constant


@pytest.mark.parametrize(
    "way",
    [Recompute(blocks=("0", "1")), Recompute(blocks=(".",), nested=True)],
    ids=["blocks", "nested"],
)
def test_a_module_that_begins_to_count_later_counts_once_and_computes_the_same(way):
    def trained(recompute):
        task = task_of(
            lambda: nn.Sequential(Observing(), Observing(), nn.Linear(6, 3, **KIND)), steps=5
        )
        with ab.Session(task, plan_for(task, 4, recompute=recompute)) as session:
            for event in session.steps():
                for observing in session.model[:2]:
                    observing.is_calm = event.step in (1, 4)
            return session.model.state_dict()

    found, wanted = trained(way), trained(Recompute())
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)
    # Steps 3 and 4, of 6 and 12 samples, are 2 and 3 micro-batches.
    for name in ("0.in_place", "0.by_data", "1.large"):
        assert found[name].unique().item() == 5


def test_a_block_that_runs_twice_counts_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Counting()
            self.head = nn.Linear(6, 3, **KIND)

        def forward(self, x):
            return self.head(self.block(self.block(x)))

    task = task_of(Twice, steps=2)
    kept, again = train(task, 4), train(task, 4, recompute=Recompute(blocks=("block",)))
    assert deviation(again.model, kept.model) < 1e-12
    assert float(again.model.block.in_place) == 2 * (3 + 3)


@torch.no_grad()
def moving_average(average, value):
    average.data.mul_(0.5).add_(value, alpha=0.5)


class Codebook(nn.Module):
    """Writes to large buffers as vector quantizers do: without an increase of their version."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6, **KIND)
        self.register_buffer("method", torch.zeros((1 << 14) + 1, **KIND))
        self.register_buffer("function", torch.zeros((1 << 14) + 1, **KIND))

    def forward(self, x):
        x = self.lin(x) + self.method.mean() + self.function.mean()
        self.move(x.detach().mean())
        moving_average(self.function, x.detach().mean())
        return torch.tanh(x)

    def move(self, value):
        self.method.data.copy_(self.method.data + value)


class Mover(nn.Module):
    """Has no buffer, and writes to one of a module within it."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6, **KIND)
        self.lin.register_buffer("method", torch.zeros((1 << 14) + 1, **KIND))

    def forward(self, x):
        x = torch.tanh(self.lin(x) + self.lin.method.mean())
        self.lin.method.data.add_(x.detach().mean())
        return x


@pytest.mark.parametrize("nested", [False, True])
def test_a_large_codebook_written_through_data_moves_once(nested):
    def model():
        return nn.Sequential(Codebook(), Mover(), nn.Linear(6, 3, **KIND))

    task = task_of(model, steps=4)
    way = Recompute(blocks=(".",) if nested else ("0", "1"), nested=nested)
    kept, again = train(task, 4), train(task, 4, recompute=way)
    assert deviation(again.model, kept.model) < 1e-12
    assert float(kept.model[0].method.abs().max()) > 0


@pytest.mark.parametrize("nested", [False, True])
def test_a_spectral_norm_is_iterated_once(nested):
    def model():
        return nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6, **KIND)),
            nn.Tanh(),
            nn.Linear(6, 3, **KIND),
        )

    task = task_of(model, steps=6)
    way = Recompute(blocks=(".",), nested=nested)
    kept, again = train(task, 4), train(task, 4, recompute=way)
    assert deviation(again.model, kept.model) < 1e-12


def test_running_statistics_of_instance_norm_advance_once():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.InstanceNorm1d(2, track_running_stats=True, **KIND)
            self.head = nn.Linear(6, 3, **KIND)

        def forward(self, x):
            return self.head(self.norm(x.unflatten(1, (2, 3))).flatten(1))

    task = task_of(Model, steps=4)
    kept = train(task, 4)
    again = train(task, 4, recompute=Recompute(blocks=(".",)))
    assert deviation(again.model, kept.model) < 1e-12


def activations_at_peak(length, recompute):
    """The most activations alive at once while a chain of `length` equal blocks trains."""
    width, samples = 8, 4096
    with tracing(CudaKernels()) as (tracer, _):
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(length))
        )
        replica = Replica(
            model,
            lambda: torch.optim.SGD(model.parameters(), lr=0.1),
            lambda m, x: ab.Loss(m(x).sum(), len(x)),
            Choice(micro_batch=samples, evaluation_batch=1, recompute=recompute),
            torch.device("cpu"),
            samples,
        )
        replica.accumulate(torch.empty(samples, width), samples)
        replica.close()
    size = samples * width * 4
    return max(
        sum(block.num_bytes >= size for block in alive(tracer.timeline, moment))
        for moment in range(tracer.timeline.num_moments)
    )


def test_a_chain_of_n_equal_blocks_keeps_log_n_activations():
    tree = Recompute(blocks=(".",), nested=True)
    peaks = {n: activations_at_peak(n, tree) for n in (8, 16, 32, 64)}
    steps = [peaks[2 * n] - peaks[n] for n in (8, 16, 32)]
    assert max(steps) <= 2, peaks  # doubling adds a constant
    assert activations_at_peak(64, Recompute()) >= 64
    assert activations_at_peak(64, Recompute(blocks=("*",))) >= 64
    assert peaks[64] < 20


def test_fewer_activations_are_kept_where_matmuls_are_kept_than_where_all_are():
    block = Recompute(blocks=("*",), keep="matmuls")
    assert (
        activations_at_peak(32, Recompute(blocks=("*",)))
        < activations_at_peak(32, block)
        < 2 * 32 + 8
    )


def test_a_deep_copy_taken_in_training_computes_with_its_own_weights():
    task = task_of(Stack)
    x = torch.randn(5, 6, **KIND)
    with ab.Session(task, plan_for(task, 4, recompute=Recompute(blocks=("blocks.*",)))) as session:
        steps = session.steps()
        next(steps)
        twin = copy.deepcopy(session.model)
        before = twin(x).detach()
        torch.testing.assert_close(before, session.model(x).detach())
        for _ in steps:
            pass
        assert torch.equal(twin(x).detach(), before)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert not torch.equal(twin(x), before)
        assert twin(x).abs().max() == 0
        assert session.model(x).abs().max() > 0
    assert not any("forward" in vars(module) for module in session.model.modules())


def test_a_deep_copy_trains_its_own_weights_through_recomputed_blocks():
    task = task_of(Stack)
    way = Recompute(blocks=("blocks.*",))
    with ab.Session(task, plan_for(task, 4, recompute=way)) as session:
        next(session.steps())
        twin = copy.deepcopy(session.model)
        twin(torch.randn(5, 6, **KIND)).sum().backward()
        assert all(p.grad is not None for p in twin.parameters())
        assert all(p.grad is None for p in session.model.parameters())


def test_no_gradient_no_recompute():
    task = task_of(chain, steps=1)
    task = dataclasses.replace(task, valid=task.train)
    for nested in (False, True):
        way = Recompute(blocks=(".",), nested=nested)
        with ab.Session(task, plan_for(task, 4, recompute=way)) as session:
            ours = session.evaluate().loss
        with ab.Session(task, plan_for(task, 4)) as session:
            assert session.evaluate().loss == ours


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (Recompute(blocks=("layers.*",)), r"'layers\.\*', but the model has no such module"),
        (Recompute(blocks=("head",), nested=True), "needs an nn.Sequential, and 'head' is none"),
        (Recompute(blocks=("blocks",)), r"'blocks' is a list of modules.*'blocks\.\*'"),
    ],
)
def test_names_that_cannot_be_recomputed_are_refused_and_leave_the_model(way, message):
    task = task_of(Stack())
    with (
        pytest.raises(InputError, match=message),
        ab.Session(task, plan_for(task, 4, recompute=way)),
    ):
        pass
    assert not any("forward" in vars(module) for module in task.model.modules())


def gradients(blocks, times=1):
    """Of two blocks that are used so many times in a forward pass, under autocast."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.randn(16, 64)

    def repeated(model, x):
        for _ in range(times):
            x = model(x)
        return ab.Loss(x.float().square().sum(), len(x))

    choice = Choice(
        micro_batch=16, evaluation_batch=16, precision="bf16", recompute=Recompute(blocks=blocks)
    )
    replica = Replica(
        model,
        lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        repeated,
        choice,
        torch.device("cpu"),
        16,
    )
    try:
        replica.accumulate(x, 16)
        return [param.grad.clone() for param in model.parameters()]
    finally:
        replica.close()


def test_weights_that_autocast_copies_again_have_the_same_gradients():
    for ours, plain in zip(gradients(("0", "2")), gradients(()), strict=True):
        assert torch.equal(ours, plain)
    # Used twice, the gradients of two copies are added in float32, those of one copy in bfloat16.
    for ours, plain in zip(gradients(("0", "2"), times=2), gradients((), times=2), strict=True):
        assert torch.allclose(ours, plain, rtol=0, atol=float(plain.abs().max()) * 2**-7)


@pytest.mark.parametrize("keep", ["nothing", "matmuls"])
def test_a_gradient_of_a_gradient_recomputes_twice(keep):
    def of(recompute):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        inputs = torch.randn(6, 8)

        def penalised(model, x):
            x = x.detach().requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return ab.Loss(out.square().sum() + slope.square().sum(), len(x))

        choice = Choice(micro_batch=6, evaluation_batch=6, recompute=recompute)
        make = partial(torch.optim.SGD, model.parameters(), lr=0.1)
        replica = Replica(model, make, penalised, choice, torch.device("cpu"), 6)
        try:
            replica.accumulate(inputs, 6)
            return [param.grad.clone() for param in model.parameters()]
        finally:
            replica.close()

    again = of(Recompute(blocks=("0", "2"), keep=keep))
    for ours, plain in zip(again, of(Recompute()), strict=True):
        assert torch.equal(ours, plain)


ONE_OF_A_LIST = [np.random.RandomState(3)]


class Drawing(nn.Module):
    """Multiplies by a number that it draws from `source`; leaves itself out where that is small."""

    def __init__(self, source):
        super().__init__()
        self.lin = nn.Linear(6, 6, **KIND)
        self.source = source
        self.own = torch.Generator().manual_seed(7)
        self.count = 0

    def draw(self):
        match self.source:
            case "python":
                return random.random()
            case "numpy":
                return np.random.rand()  # noqa: NPY002
            case "own":
                return float(torch.rand((), generator=self.own))
            case "made late":
                self.late = getattr(self, "late", None) or np.random.default_rng(3)
                return self.late.random()
            case "global":
                return ONE_OF_A_LIST[0].rand()
        self.count += 1
        return self.count % 5 / 5

    def forward(self, x):
        if not self.training:
            return x
        factor = self.draw()
        return x + torch.tanh(self.lin(x * (0.5 + factor))) if factor > 0.3 else x


@pytest.mark.parametrize("source", ["python", "numpy", "own", "made late", "global", "counted"])
@pytest.mark.parametrize("recompute", [("0", "1", "2"), "nested"])
def test_a_second_run_draws_and_counts_as_the_first(source, recompute):
    def model():
        return nn.Sequential(*(Drawing(source) for _ in range(3)), nn.Linear(6, 3, **KIND))

    task = task_of(model, steps=6)
    way = (
        Recompute(blocks=(".",), nested=True)
        if recompute == "nested"
        else Recompute(blocks=recompute)
    )
    ONE_OF_A_LIST[0].seed(3)
    kept = train(task, 4).model
    ONE_OF_A_LIST[0].seed(3)
    again = train(task, 4, recompute=way).model
    assert deviation(again, kept) < 1e-12
    assert deviation(again, task.build_model()) > 1e-3


class Following(nn.Module):
    """Follows an iterator, which nobody can wind back."""

    def __init__(self, leaves_out):
        super().__init__()
        self.lin = nn.Linear(6, 6, **KIND)
        self.turns = itertools.count()
        self.leaves_out = leaves_out

    def forward(self, x):
        turn = next(self.turns) % 2
        if self.leaves_out:
            return x if turn else torch.tanh(self.lin(torch.tanh(self.lin(x))))
        return torch.tanh(self.lin(x)) * (1.0 + turn)


@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_second_run_that_computes_otherwise_is_named(leaves_out):
    model = nn.Sequential(Following(leaves_out), nn.Linear(6, 3, **KIND))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4, 6, **KIND)
    way = Recompute(blocks=("0",))
    with (
        ab.Step(model, optimizer, squares, micro_batch=4, recompute=way) as step,
        pytest.raises(InputError, match=r"the block '0'.*did not compute the same"),
    ):
        step(x)


def squares(model, batch):
    return model(batch).square().mean()
