"""What several ranks mean for a plan: whether ghost batches are divided, who measures shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.machine import Machine
from anybatch.plans import Exchange


def images(
    norm: type[nn.Module] = nn.BatchNorm2d, global_batch: int = 64, size: int = 256, **changes: Any
) -> ab.Task:
    """Convolutions with two norms, whose time is that of their samples."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1),
            norm(64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            norm(64),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )

    fields: dict[str, Any] = {
        "model": build,
        "loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "train": TensorDataset(torch.zeros(2, 3, size, size), torch.zeros(2, dtype=torch.long)),
        "global_batch": global_batch,
        "steps": 1,
        "last": "wrap",
        "ghost_batch": 32,
    }
    return ab.Task(**{**fields, **changes})


FOUR = Machine.describe("4 x rtx-4090")


class OwnStatistics(nn.BatchNorm2d):
    """Its forward is its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (input - input.mean((0, 2, 3), keepdim=True)) * 0.5


def test_ranks_that_would_be_idle_share_ghost_batches():
    plan = ab.plan(images(), FOUR)
    assert plan.norms == "synchronised"
    assert plan.choice.micro_batch == 8  # a ghost batch of 32 on four ranks
    assert plan.accumulation_steps == 2
    assert all(rung.micro_batch == 8 for rung in plan.ladder)
    assert plan.prediction
    assert plan.prediction.step_parts["norms over ranks"] > 0
    alone = ab.plan(images(), FOUR, norms="ghosts")
    assert alone.norms == "ghosts"
    assert alone.prediction
    assert plan.prediction.step_seconds < alone.prediction.step_seconds
    told = plan.notices[-1]
    assert "64 is 2 ghost batches of BatchNorm (32 samples)" in told
    assert "2 of 4 would be idle" in told
    assert dict(plan.explain())["global batch"].endswith("each divided over the ranks")


@pytest.mark.parametrize(
    "knobs",
    [{"micro_batch": 32}, {"parallel": "shard"}, {"exchange": Exchange(compress="bf16")}],
    ids=["micro-batch", "shard", "compressed"],
)
def test_where_it_cannot_be_had_ghost_batches_stay_whole(knobs):
    assert ab.plan(images(), FOUR, **knobs).norms == "ghosts"


@pytest.mark.parametrize(
    "task",
    [
        images(global_batch=128),  # a ghost batch for each rank
        images(size=64),  # norms would meet for longer than the samples take
        images(OwnStatistics),
        images(nn.InstanceNorm2d),
    ],
    ids=["enough ghosts", "tiny", "own statistics", "no BatchNorm"],
)
def test_where_it_does_not_pay_ghost_batches_stay_whole(task):
    assert ab.plan(task, FOUR).norms == "ghosts"


@pytest.mark.slow
def test_a_ghost_batch_that_no_rank_can_hold_is_divided():
    task = images(global_batch=256, ghost_batch=64)
    four = FOUR.with_budget("2.2GiB")
    with pytest.raises(ab.NoPlanFits):
        ab.plan(task, four, norms="ghosts")
    plan = ab.plan(task, four)
    assert plan.norms == "synchronised"
    assert plan.notices[-1].startswith("No rank has the memory for a ghost batch")


def test_a_part_of_a_ghost_batch_that_does_not_fit_is_refused_with_a_budget_that_does():
    task = images(global_batch=256, ghost_batch=64)
    with pytest.raises(ab.NoPlanFits, match="a pass of 16 samples, the part of a rank") as caught:
        ab.plan(task, FOUR.with_budget("1GiB"), norms="synchronised")
    enough = FOUR.with_budget(f"{caught.value.least_bytes}B")
    assert ab.plan(task, enough, norms="synchronised").choice.micro_batch == 16


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"norms": "both"}, "norms is 'both': choose one of ghosts, synchronised"),
        ({"balance": "fast"}, "balance is 'fast': choose one of measured, fixed"),
        ({"norms": "synchronised", "parallel": "shard"}, "parallel is 'shard'"),
        ({"norms": "synchronised", "micro_batch": 32}, "leave one of them out"),
    ],
    ids=["norms", "balance", "shard", "micro-batch"],
)
def test_what_cannot_be_had_is_refused(knobs, words):
    with pytest.raises(ab.InputError, match=words):
        ab.plan(images(), FOUR, **knobs)


@pytest.mark.parametrize("balance", ["measured", "fixed"])
def test_the_balance_that_was_asked_for_is_in_the_plan(balance):
    here = Machine.here(device="cpu", count=2)
    assert ab.plan(images(), here, balance=balance).balance == balance
    assert ab.plan(images(), here).balance == "fixed"
    assert ab.plan(images(), FOUR).balance == "measured"


def test_ranks_on_gpus_that_take_local_steps_keep_their_shares():
    machine = Machine.describe("2 x 24GiB")
    assert ab.plan(images(), machine).balance == "measured"
    plan = ab.plan(images(), machine, exchange=Exchange(every=2))
    assert (plan.balance, plan.exchange.every) == ("fixed", 2)
    with pytest.raises(ab.InputError, match="balance is 'measured'"):
        ab.plan(images(), machine, exchange=Exchange(every=2), balance="measured")


@pytest.mark.parametrize(
    ("optimizer", "update"), [("SGD", "as given"), ("Adagrad", "as given"), ("AdamW", "fused")]
)
def test_a_divided_model_is_updated_by_what_torch_has_for_its_parts(optimizer, update):
    task = images(optimizer=lambda params: getattr(torch.optim, optimizer)(params, lr=0.1))
    here = Machine.here(device="cpu", count=2)
    assert ab.plan(task, here, parallel="replicate").choice.update == "fused"
    assert ab.plan(task, here, parallel="shard").choice.update == update


def test_a_micro_batch_that_no_rank_has_is_told_with_what_they_have():
    words = "micro_batch is 64, and the global batch 64, of which a rank has 16 at most: .* 1 to 16"
    with pytest.raises(ab.InputError, match=words):
        ab.plan(images(norm=nn.Identity), FOUR, micro_batch=64)
