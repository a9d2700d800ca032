"""What a loss function may return, and what it is told if it returns anything else."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab
from anybatch.compute.loss import read_loss
from anybatch.compute.loss_reduction_check import warn_of_reduction
from anybatch.errors import LossError
from anybatch.task import Loss

GRAPH = torch.ones(2, requires_grad=True).sum()


@pytest.mark.parametrize(
    ("returned", "total", "weight"),
    [
        (GRAPH, 10.0, 5),
        ((GRAPH, 3), 2.0, 3),
        ((GRAPH, torch.tensor(3)), 2.0, 3),
        (Loss(GRAPH, 0.0), 2.0, 0.0),
        (Loss(GRAPH, 1.5), 2.0, 1.5),
    ],
)
def test_forms_of_a_loss(returned, total, weight):
    loss = read_loss(returned, lambda: 5)
    assert loss.sum.item() == total
    assert float(loss.weight) == weight


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "None .is a return statement missing"),
        (1.0, "a value of type float"),
        ((GRAPH,), "a tuple of 1"),
        ([GRAPH, 1], "a list of 2"),
        ({"loss": GRAPH}, "a value of type dict"),
        ((GRAPH, 1, 2), "a tuple of 3"),
        (GRAPH.expand(1), r"shape \(1,\)"),
        ((GRAPH.expand(2), 2), r"shape \(2,\)"),
        (torch.tensor(1), "dtype torch.int64"),
        (GRAPH.detach(), "does not depend on any parameter"),
        ((2.0, 1), "sum of the loss is a value of type float"),
        ((GRAPH, None), "weight of the loss is None"),
        ((GRAPH, "1"), "weight of the loss is a value of type str"),
        ((GRAPH, True), "weight of the loss is a value of type bool"),
        ((GRAPH, -1), "weight of the loss is -1"),
        ((GRAPH, float("nan")), "weight of the loss is nan"),
        ((GRAPH, float("inf")), "weight of the loss is inf"),
        (
            (GRAPH, GRAPH),
            "weight of the loss requires a gradient, so it is no count, but another loss",
        ),
        ((GRAPH, torch.ones(1)), r"weight of the loss has the shape \(1,\)"),
        ((GRAPH, np.ones(2)), "weight of the loss is a value of type ndarray"),
    ],
)
def test_what_is_no_loss(returned, message):
    with pytest.raises(LossError, match=message):
        read_loss(returned, lambda: 5)


def test_evaluation_needs_no_graph():
    assert float(read_loss(GRAPH.detach(), lambda: 2, training=False).sum) == 4.0


@pytest.mark.parametrize(
    ("dtype", "num"),
    [(torch.bfloat16, 257), (torch.float16, 2049), (torch.float16, 70_000)],
    ids=str,
)
def test_a_mean_in_half_precision_counts_every_sample(dtype, num):
    """No half precision has a place for these numbers: the nearest ones are 256, 2048, infinity."""
    mean = torch.ones(3, dtype=dtype, requires_grad=True).mean()
    assert read_loss(mean, lambda: num).sum.item() == num


# ------------------------------------------------------------------------------------- reductions

OUTPUT = torch.randn(4, 3, requires_grad=True)
LABELS, TARGETS = torch.tensor([0, 1, 2, 0]), torch.zeros(4, 3)


def told(returned, num_samples=4):
    """What is warned of a loss function that returns this."""

    def loss():
        raise NotImplementedError

    loss.__qualname__ = f"loss_{id(loss)}_{len(SEEN)}"
    SEEN.append(loss)  # so that each is another one
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_reduction(loss, returned, num_samples)
        warn_of_reduction(loss, returned, num_samples)
    assert len(caught) <= 1
    return [str(warning.message) for warning in caught]


SEEN = []


@pytest.mark.parametrize(
    "total",
    [
        nn.CrossEntropyLoss(reduction="sum")(OUTPUT, LABELS),
        F.mse_loss(OUTPUT, TARGETS, reduction="sum"),
        F.binary_cross_entropy_with_logits(OUTPUT, TARGETS, reduction="sum"),
    ],
)
def test_a_sum_that_is_taken_for_a_mean_is_told_once(total):
    (sentence,) = told(total)
    assert "returns a sum (reduction='sum') by itself" in sentence
    assert "Return anybatch.Loss(sum, weight)" in sentence
    for right in (Loss(total, 4), (total, 4), (total, torch.tensor(4)), total / 4):
        assert not told(right)
    assert not told(total, num_samples=1)


def test_a_mean_that_is_taken_for_a_sum_is_told_once():
    mean = F.cross_entropy(OUTPUT, LABELS)
    for wrong in (Loss(mean, 4), (mean, 4), Loss(mean, 1), Loss(mean, torch.tensor(4))):
        (sentence,) = told(wrong)
        assert "returns a mean (reduction='mean') as its sum" in sentence
    for right in (mean, Loss(mean * 4, 4), mean + OUTPUT.square().sum()):
        assert not told(right)


@pytest.mark.parametrize("returned", [None, 1.0, (1.0,), GRAPH.detach(), Loss(GRAPH.detach(), 1)])
def test_nothing_is_said_of_reductions_where_none_is_seen(returned):
    assert not told(returned)


def test_a_mean_that_weighs_classes_is_told_wherever_it_is_added():
    mean = F.cross_entropy(OUTPUT, LABELS, weight=torch.rand(3))
    for wrong in (mean, mean / 2 + OUTPUT.square().mean(), 0.3 * mean):
        (sentence,) = told(wrong)
        assert "weighs classes (weight=)" in sentence
    summed = F.cross_entropy(OUTPUT, LABELS, weight=torch.rand(3), reduction="sum")
    for right in (Loss(summed, 3), Loss(mean * 2.5, 2.5), F.cross_entropy(OUTPUT, LABELS)):
        assert not told(right)


@pytest.mark.parametrize("ignored", [-100, 2])
def test_a_mean_that_leaves_targets_out_is_told(ignored):
    labels = torch.tensor([0, 1, ignored, 0])
    (sentence,) = told(F.cross_entropy(OUTPUT, labels, ignore_index=ignored))
    assert f"leaves out targets (those of {ignored}, ignore_index)" in sentence
    assert not told(F.cross_entropy(OUTPUT, torch.tensor([0, 1, 1, 0]), ignore_index=ignored))


def test_samples_that_are_told_from_one_another_are_seen_in_both_directions_of_a_loss():
    one, other = (F.normalize(torch.randn(6, 4, requires_grad=True), dim=1) for _ in range(2))
    scores, each = one @ other.T, torch.arange(6)
    both = (F.cross_entropy(scores, each) + F.cross_entropy(scores.T, each)) / 2
    for wrong in (both, Loss(both * 6, 6)):
        (sentence,) = told(wrong, num_samples=6)
        assert "tells the samples of a pass from one another" in sentence
    assert not told(F.cross_entropy(scores, each.flip(0)), num_samples=6)


def test_numbers_that_are_not_there_are_not_asked_for():
    with torch._subclasses.FakeTensorMode():
        output, labels = torch.randn(8, 8, requires_grad=True), torch.zeros(8, dtype=torch.int64)
        assert not told(F.cross_entropy(output, labels), num_samples=8)
        (sentence,) = told(F.cross_entropy(output, labels, weight=torch.rand(8)), num_samples=8)
    assert "weighs classes" in sentence


@pytest.mark.parametrize("function", [F.mse_loss, F.l1_loss])
def test_a_loss_that_has_run_backward_itself_is_told_so(function):
    def run(model, batch):
        loss = function(model(batch[0]), batch[1])
        loss.backward()
        return loss

    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    task = ab.Task(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)),
        loss=run,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=data,
        global_batch=4,
        epochs=1,
    )
    for start in (ab.plan, ab.train):
        with pytest.raises(LossError, match=r"calls backward\(\) itself, which anybatch does"):
            start(task)


def test_a_task_whose_loss_is_a_sum_by_itself_is_warned_of_when_it_is_planned():
    def summed(model, batch):
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum")

    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    task = ab.Task(
        model=lambda: nn.Linear(3, 1),
        loss=summed,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=data,
        global_batch=4,
        epochs=1,
    )
    with pytest.warns(UserWarning, match=r"summed' returns a sum .* taken as the mean") as caught:
        ab.plan(task)
    place = summed.__code__
    assert [(w.filename, w.lineno) for w in caught] == [(place.co_filename, place.co_firstlineno)]


@pytest.mark.parametrize("second", [0.75, 0.0])
def test_a_metric_in_the_place_of_the_weight_is_told(second):
    (sentence,) = told((F.mse_loss(OUTPUT, TARGETS), torch.tensor(second)))
    assert f"taken as the weight of the first, and that is {second:.3g} for 4 samples" in sentence
    assert "anybatch.Loss(sum, weight, metrics={...})" in sentence
    total = F.mse_loss(OUTPUT, TARGETS, reduction="sum")
    for right in (
        (total, torch.tensor(1.5)),
        (total, torch.tensor(1)),
        Loss(total, torch.tensor(0.5)),
    ):
        assert told(right) == []
    assert told((total, torch.tensor(0.5)), num_samples=1) == []
