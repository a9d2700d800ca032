"""Sums over micro-batches: exact, whatever they are made of."""

import pytest
import torch
from tests.equivalence.test_synchronisation import as_on_a_device

from anybatch.engine.totals import Means, Totals, _Series
from anybatch.errors import LossError
from anybatch.task import Loss

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=["cpu", "as on a device"])
def home(request, monkeypatch):
    """Numbers on a device are gathered first and added up later: the same must come out."""
    if request.param != "cpu":
        monkeypatch.setattr(_Series, "add", as_on_a_device)


def means(losses):
    totals = Totals(CPU)
    for loss in losses:
        totals.add(loss)
    return Means(totals.tensor().tolist(), totals.names)


def test_numbers_and_tensors_of_any_dtype_add_up():
    found = means(
        [
            Loss(torch.tensor(1.0), 2),
            Loss(torch.tensor(2.0, dtype=torch.float64), torch.tensor(3)),
            Loss(torch.tensor(4.0, dtype=torch.bfloat16), torch.tensor(1.5)),
        ]
    )
    assert (found.loss_sum, found.weight, found.num_negative) == (7.0, 6.5, 0)
    assert found.loss == 7.0 / 6.5


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
def test_many_micro_batches(count):
    found = means(
        Loss(torch.tensor(float(i)), torch.tensor(i), {"m": (torch.tensor(i * 2), 1)})
        for i in range(count)
    )
    assert found.loss_sum == found.weight == count * (count - 1) / 2
    assert found.metrics["m"] == count - 1


def test_a_large_sum_of_float32_is_added_up_in_float64():
    found = means(Loss(torch.tensor(2.0**25 if i == 0 else 1.0), 1) for i in range(1001))
    assert found.loss_sum == 2.0**25 + 1000


def test_metrics_are_weighed_by_the_loss_or_by_themselves():
    found = means(
        [
            Loss(torch.tensor(1.0), 2, {"a": 1.0, "b": (3.0, 4.0)}),
            Loss(torch.tensor(1.0), 6, {"a": torch.tensor(3), "b": (torch.tensor(1.0), 4)}),
        ]
    )
    assert found.metrics == {"a": 0.5, "b": 0.5}


def test_metrics_stay_in_the_order_in_which_they_are_given():
    found = means(
        [
            Loss(torch.tensor(1.0), 1, {"b": 2.0, "a": (1.0, 2.0), "c": 3.0}),
            Loss(torch.tensor(1.0), 1, {"c": 5.0, "b": 4.0, "a": (3.0, 2.0)}),
        ]
    )
    assert list(found.metrics.items()) == [("b", 3.0), ("a", 1.0), ("c", 4.0)]


def test_nothing_weighed_is_no_number():
    found = means([Loss(torch.tensor(0.0), 0, {"a": (0.0, 0.0)})])
    assert found.loss != found.loss
    assert found.metrics["a"] != found.metrics["a"]


def test_a_negative_weight_is_seen_though_the_sum_is_positive():
    assert means([Loss(torch.tensor(1.0), torch.tensor(w)) for w in (5, -1)]).num_negative == 1


def test_losses_that_are_not_finite_are_found():
    totals = Totals(CPU)
    for value in (1.0, 2.0, float("inf"), float("nan")):
        totals.add(Loss(torch.tensor(value), 1))
    assert totals.not_finite() == [2, 3]


def test_metrics_must_stay_the_same():
    totals = Totals(CPU)
    totals.add(Loss(torch.tensor(1.0), 1, {"a": 1}))
    with pytest.raises(LossError, match=r"metrics \['b'\]"):
        totals.add(Loss(torch.tensor(1.0), 1, {"b": 1}))
    with pytest.raises(LossError, match="metric 'a' is of type list"):
        totals.add(Loss(torch.tensor(1.0), 1, {"a": [1]}))
