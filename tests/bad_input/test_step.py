"""Options of `ab.Step` that cannot be: each is a sentence with the value and the remedy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab
from anybatch.errors import DataError, InputError

SAMPLES = torch.randn(20, 8), torch.randint(3, (20,))


def loss(model: nn.Module, batch: Any) -> ab.Loss:
    return ab.Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


def cut(batch: Any, start: int, stop: int) -> Any:
    return [part[start:stop] for part in batch]


def step(**options: Any) -> ab.Step:
    model = nn.Sequential(nn.Linear(8, 3))
    given = {"loss": loss, "micro_batch": 6, "verbose": False, **options}
    return ab.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_norm": float("nan")}, "clip_norm is nan; give a number above zero"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0"),
        ({"clip_norm": "1"}, "clip_norm is '1'"),
        ({"ghost_batch": 0}, "ghost_batch is 0: give a whole number of at least 1"),
        ({"ghost_batch": 2.5}, "ghost_batch is 2.5"),
        ({"recompute": "all"}, "recompute is 'all', but the model has no repeated blocks"),
        ({"recompute": True}, "recompute is True, which names no module"),
        ({"precision": torch.bfloat16}, "precision is torch.bfloat16: choose one of fp32"),
        ({"precision": None}, "precision is None: choose one of"),
        ({"sinks": print}, "sinks is .*: give a list of functions"),
        ({"count_samples": 3, "slice_batch": cut}, "count_samples is 3: give a function"),
        ({"loss": lambda batch: batch[0].sum()}, "cannot be called with model, batch"),
    ],
)
def test_an_option_that_cannot_be(options: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words):
        step(**options)


def test_sinks_may_come_from_a_generator():
    assert step(sinks=(sink for sink in [print]))._sinks == (print,)


def test_an_optimizer_that_is_given_twice():
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="the same SGD is given twice"):
        ab.Step(model, [optimizer, optimizer], loss)


@pytest.mark.parametrize("number", [20.0, "20", None, -1])
def test_a_count_that_is_no_whole_number(number: Any):
    with pytest.raises(DataError, match=r"count_samples returned .*: return the number of samples"):
        step(count_samples=lambda batch: number, slice_batch=cut)(SAMPLES)


def test_a_count_may_be_a_tensor():
    done = step(count_samples=lambda batch: torch.tensor(len(batch[1])), slice_batch=cut)(SAMPLES)
    assert done.num_micro_batches == 4


@pytest.mark.parametrize("recompute", ["none", "0"])
def test_recompute_by_name(recompute: str):
    with step(recompute=recompute) as one:
        one(SAMPLES)
        assert one.plan is not None
        assert one.plan.choice.recompute.blocks == (() if recompute == "none" else ("0",))


@pytest.mark.parametrize(
    "disabled", [torch.no_grad(), torch.inference_mode()], ids=["no_grad", "i"]
)
def test_where_gradients_are_disabled(disabled: AbstractContextManager[None]):
    one = step()
    with disabled, pytest.raises(InputError, match="gradients are disabled where it is called"):
        one(SAMPLES)
