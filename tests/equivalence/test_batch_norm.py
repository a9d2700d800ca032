"""BatchNorm over ghost batches: the same parameters and running statistics under every plan."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.reference import assert_equal, deviation, plan_for, train, train_plainly
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.errors import InputError
from anybatch.plans import Recompute

WAYS = {
    "kept": Recompute(),
    "blocks": Recompute(blocks=("body.*",)),
    "matmuls kept": Recompute(blocks=("body.*",), keep="matmuls"),
    "nested": Recompute(blocks=("body",), nested=True),
    "host": Recompute(to_host=True),
    "whole model": Recompute(blocks=(".",)),
}
NORMS = {
    "usual": {},
    "cumulative": {"momentum": None},
    "not affine": {"affine": False},
    "not tracking": {"track_running_stats": False},
}


class Images(nn.Module):
    """(B, 2, 4, 4) images through blocks with BatchNorm."""

    def __init__(self, **norm):
        super().__init__()
        kind = {"dtype": torch.float64}
        self.body = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(2 if i == 0 else 4, 4, 3, padding=1, bias=False, **kind),
                    nn.BatchNorm2d(4, **norm, **kind),
                    nn.ReLU(inplace=True),
                )
                for i in range(3)
            )
        )
        self.head = nn.Linear(4, 3, **kind)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Tokens(nn.Module):
    """(B, T) tokens; BatchNorm1d over (B * T, C), the tokens flattened into the first dim."""

    def __init__(self, **norm):
        super().__init__()
        kind = {"dtype": torch.float64}
        self.embed = nn.Embedding(7, 4, **kind)
        self.body = nn.Sequential(
            nn.Linear(4, 6, bias=False, **kind),
            nn.BatchNorm1d(6, **norm, **kind),
            nn.GELU(),
            nn.Linear(6, 4, **kind),
        )
        self.head = nn.Linear(4, 3, **kind)

    def forward(self, tokens):
        x = self.body(self.embed(tokens).flatten(0, 1))
        return self.head(x).unflatten(0, tokens.shape).mean(1)


def loss(model, batch):
    x, y = batch
    return ab.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def task_of(model, num_samples=40, global_batch=20, ghost_batch=4, steps=20, tokens=False):
    draw = torch.Generator().manual_seed(0)
    x = (
        torch.randint(0, 7, (num_samples, 5), generator=draw)
        if tokens
        else torch.randn(num_samples, 2, 4, 4, generator=draw, dtype=torch.float64)
    )
    y = torch.randint(0, 3, (num_samples,), generator=draw)
    return ab.Task(
        model=model,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        train=TensorDataset(x, y),
        global_batch=global_batch,
        ghost_batch=ghost_batch,
        steps=steps,
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("micro_batch", [4, 12, 20])
def test_parameters_and_statistics_do_not_depend_on_the_plan(norm, way, micro_batch):
    task = task_of(lambda: Images(**NORMS[norm]), steps=8)
    assert_equal(train(task, micro_batch, recompute=WAYS[way]), train_plainly(task), 1e-9)


@pytest.mark.parametrize("way", ["kept", "nested", "matmuls kept"])
@pytest.mark.parametrize("micro_batch", [4, 8, 20])
def test_tokens_flattened_into_the_first_dim(way, micro_batch):
    task = task_of(Tokens, tokens=True)
    assert_equal(train(task, micro_batch, recompute=WAYS[way]), train_plainly(task), 1e-9)


@pytest.mark.parametrize(
    ("num_samples", "global_batch", "ghost_batch"),
    [(42, 21, 4), (30, 13, 4), (18, 9, 8), (10, 10, 32), (23, 10, 3)],
)
@pytest.mark.parametrize("pieces", [1, 2, 100])
def test_a_remainder_joins_or_makes_a_ghost_of_its_own(
    num_samples, global_batch, ghost_batch, pieces
):
    task = task_of(Images, num_samples, global_batch, ghost_batch, steps=7)
    whole = -(-global_batch // pieces)
    micro = min(global_batch, max(ghost_batch, whole // ghost_batch * ghost_batch))
    assert_equal(train(task, micro), train_plainly(task), 1e-9)


def test_the_ghost_batch_changes_the_result_and_the_micro_batch_does_not():
    results = {g: train(task_of(Images, ghost_batch=g), 20).model for g in (4, 20)}
    assert deviation(results[4], results[20]) > 1e-3


def test_a_frozen_norm_uses_and_keeps_its_statistics():
    def frozen():
        model = Images()
        model.body[1][1].eval().requires_grad_(False)
        model.body[1][1].running_mean.fill_(0.3)
        return model

    def keep_frozen(model, batch):
        model.body[1][1].eval()
        return loss(model, batch)

    task = dataclasses.replace(task_of(frozen), loss=keep_frozen)
    ours = train(task, 8, recompute=WAYS["blocks"])
    assert_equal(ours, train_plainly(task), 1e-9)
    assert torch.equal(ours.model.body[1][1].running_mean, frozen().body[1][1].running_mean)


class Frozen(Images):
    """All but the head frozen, as a backbone is."""

    def __init__(self):
        super().__init__()
        self.body.requires_grad_(False).eval()
        for layer in self.body:
            layer[1].running_mean.fill_(0.3)


class FrozenWhileTrained(Images):
    """The same by a method `train` of its own."""

    def __init__(self):
        super().__init__()
        self.body.requires_grad_(False)
        for layer in self.body:
            layer[1].running_mean.fill_(0.3)

    def train(self, mode=True):
        super().train(mode)
        self.body.eval()
        return self


@pytest.mark.parametrize("build", [Frozen, FrozenWhileTrained, lambda: FrozenWhileTrained().eval()])
def test_a_frozen_backbone_keeps_to_its_statistics_and_is_cut_anywhere(build):
    task = dataclasses.replace(
        task_of(build, ghost_batch=None), parameters=lambda model: model.head.parameters()
    )
    plan = ab.plan(task, micro_batch=3)
    assert plan.task.ghost_batch is None
    assert not any("BatchNorm" in notice for notice in plan.notices)
    with ab.Session(task, plan) as session:
        losses = [done.loss for done in session.steps()]
        assert not session.model.body.training
        statistics = session.model.body[1][1].running_mean
        assert torch.equal(statistics, build().body[1][1].running_mean)
        plain = train_plainly(task)
        assert losses == pytest.approx(plain.losses, rel=1e-9)
        assert deviation(session.model, plain.model) < 1e-9
    assert ab.verify(task, plan, samples=8).exact


def test_a_model_that_is_in_evaluation_mode_as_a_whole_is_trained_as_a_whole():
    """As it comes from a library."""
    task = task_of(lambda: Images().eval())
    assert ab.plan(task).task.ghost_batch == 4
    assert_equal(train(task, 8), train_plainly(task), 1e-9)


def test_a_single_value_per_channel_is_named():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.norm(x))

    task = ab.Task(
        model=Flat,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        train=TensorDataset(torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)),
        global_batch=1,
        epochs=1,
    )
    with (
        pytest.raises(InputError, match=r"BatchNorm 'norm' cannot .* single value per channel"),
        ab.Session(task, plan_for(task, 1)),
    ):
        pass


def test_a_last_step_of_one_image_is_tried_first_and_leaves_no_trace():
    task = task_of(Images, num_samples=41, steps=6)
    assert_equal(train(task, 8), train_plainly(task), 1e-9)


def test_rows_that_are_not_samples_are_named():
    class Shuffled(Tokens):
        def forward(self, tokens):
            return super().forward(tokens) + self.body[1](torch.zeros(7, 6).double()).sum()

    task = task_of(Shuffled, tokens=True)
    with (
        ab.Session(task, plan_for(task, 8)) as session,
        pytest.raises(InputError, match=r"'body.1' is given 7 rows for a micro-batch of 8 samples"),
    ):
        list(session.steps())


def test_between_steps_the_model_is_a_plain_one():
    """What the user computes with the model in the loop is not cut like the last micro-batch."""
    task = task_of(Images, ghost_batch=4)
    x = torch.randn(7, 2, 4, 4, dtype=torch.float64)
    with ab.Session(task, plan_for(task, 8)) as session:
        next(session.steps())
        plain = Images()
        plain.load_state_dict(session.model.state_dict())
        torch.testing.assert_close(session.model(x), plain(x))
