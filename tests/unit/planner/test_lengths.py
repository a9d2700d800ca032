"""Plans for samples of unequal length."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import anybatch as ab
from anybatch.estimate import subject_of
from anybatch.plans import Plan

MIB = 1 << 20
LONGEST = 512


class Encoder(nn.Module):
    """(B, T) tokens to (B, T, 256) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(64, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sequences(count: int = 400) -> list[Tensor]:
    """Of 5 to 50 tokens, and number 17 of 512."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 51, (count,), generator=draw).tolist()
    lengths[17] = LONGEST
    return [torch.randint(1, 256, (length,), generator=draw) for length in lengths]


def loss(model: nn.Module, tokens: Tensor) -> ab.Loss:
    total = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")
    return ab.Loss(total, tokens.numel())


def collate(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def task(**changes: Any) -> ab.Task:
    data = sequences()
    fields: dict[str, Any] = {
        "model": Encoder,
        "loss": loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3),
        "train": data,
        "lengths": [len(sample) for sample in data],
        "collate": collate,
        "global_batch": 100,
        "epochs": 1,
    }
    return ab.Task(**{**fields, **changes})


def test_a_step_is_counted_in_samples_of_the_longest():
    subject = subject_of(task())
    assert subject.identity.longest == LONGEST
    assert subject.template.shape == (2, LONGEST)
    real = sum(task().lengths) / LONGEST / 4  # four global batches
    assert real <= subject.whole <= 2 * real
    assert "number 17, has length 512" in subject.long


def test_a_plan_reads_in_padded_size_and_round_trips():
    plan = ab.plan(task(), memory="24MiB")
    assert plan.task.longest == LONGEST
    assert any("number 17" in notice and "padded size" in notice for notice in plan.notices)
    assert Plan.from_json(plan.to_json()) == plan
    told = dict(plan.model_copy(update={"choice": plan.choice}).explain())["global batch"]
    assert f"padded size of at most {plan.choice.micro_batch * LONGEST:,}" in told


def test_a_plan_for_other_lengths_is_refused():
    plan = ab.plan(task(), micro_batch=1)
    shorter = [sample[:100] for sample in sequences()]
    other = task(train=shorter, lengths=[len(sample) for sample in shorter])
    with (
        pytest.raises(ab.InputError, match="longest is 512 in the plan and 100 in the task"),
        ab.Session(other, plan),
    ):
        pass


@pytest.mark.slow
def test_what_fits_no_plan_is_named():
    with pytest.raises(ab.NoPlanFits) as error:
        ab.plan(task(), memory="8MiB")
    assert "number 17, has length 512 (the median is" in str(error.value)


def test_a_part_of_several_ranks_is_planned_by_total_length():
    alone = ab.plan(task(), memory="100MiB")
    shared = ab.plan(task(), memory="100MiB", ranks=2)
    assert shared.choice.micro_batch <= alone.choice.micro_batch
    assert alone.choice.micro_batch <= subject_of(task()).whole


def test_without_lengths_the_first_samples_are_planned_for():
    plain = dataclasses.replace(task(), lengths=None)
    subject = subject_of(plain)
    assert subject.identity.longest is None
    assert subject.whole == 100
    assert not subject.long
