"""What a loss function may return, and what it is told if it returns anything else."""

import numpy as np
import pytest
import torch

from anybatch.compute.loss import read_loss
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
        ((GRAPH, torch.ones(1)), r"weight of the loss has the shape \(1,\)"),
        ((GRAPH, np.ones(2)), "weight of the loss is a value of type ndarray"),
    ],
)
def test_what_is_no_loss(returned, message):
    with pytest.raises(LossError, match=message):
        read_loss(returned, lambda: 5)


def test_evaluation_needs_no_graph():
    assert float(read_loss(GRAPH.detach(), lambda: 2, training=False).sum) == 4.0
