"""The loss in chunks as a choice of the search: weighed, taken where it pays, fixed by the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.estimate import subject_of
from anybatch.machine import Machine
from anybatch.planner import account
from anybatch.plans import Plan

WORDS, WIDTH, LENGTH, BATCH = 8_000, 32, 64, 64
LOGITS = 4 * BATCH * LENGTH * WORDS
MIB = 1 << 20


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids_bt: Tensor) -> Tensor:
        x_btd = self.embed(ids_bt)
        for block in self.blocks:
            x_btd = x_btd + block(x_btd)
        return self.head(x_btd)


def plain(model: nn.Module, ids_bt: Tensor) -> Tensor:
    return F.cross_entropy(model(ids_bt).flatten(0, 1), ids_bt.flatten())


def task(loss: Callable[[Any, Tensor], Any] = plain) -> ab.Task:
    return ab.Task(
        model=Language,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=[torch.zeros(LENGTH, dtype=torch.int64)] * 4,
        collate=torch.stack,
        global_batch=BATCH,
        last="wrap",
        steps=1,
    )


def planned(memory: str = "64MiB", loss: Any = plain, **wishes: Any) -> Plan:
    return ab.plan(task(loss), Machine.describe("24GiB"), memory=memory, **wishes)


def test_it_is_taken_where_the_logits_do_not_fit():
    budget = "1092MiB"  # of which CUDA's context takes three quarters
    whole = planned(budget, chunked_loss=False)
    chosen = planned(budget)
    assert whole.choice.chunked_head == ""
    assert chosen.choice.chunked_head == "head"
    assert chosen.choice.micro_batch > whole.choice.micro_batch
    assert whole.prediction is not None
    assert chosen.prediction is not None
    assert chosen.prediction.step_seconds < whole.prediction.step_seconds
    assert all(rung.chunked_head for rung in chosen.ladder)
    assert any(not one.choice.chunked_head and one.reason for one in chosen.rejected)


def test_where_memory_is_plenty_the_loss_stays_as_it_is_written():
    chosen = planned("20GiB")
    assert chosen.choice.chunked_head == ""
    assert chosen.choice.micro_batch == BATCH
    assert chosen.ladder[-1].chunked_head == "" or chosen.ladder[-1].optimizer_states == "host"
    assert "head" in {rung.chunked_head for rung in chosen.ladder}


def test_it_can_be_asked_for_and_forbidden():
    asked = planned("20GiB", chunked_loss=True)
    assert asked.choice.chunked_head == "head"
    assert ("loss", "chunked: the logits of head are never whole in memory") in asked.explain()
    assert Plan.model_validate_json(asked.model_dump_json()) == asked
    forbidden = planned("1092MiB", chunked_loss=False)
    every = [forbidden.choice, *forbidden.ladder, *(one.choice for one in forbidden.rejected)]
    assert not any(choice.chunked_head for choice in every)


def by_hand(model: nn.Module, ids_bt: Tensor) -> Tensor:
    rows = torch.log_softmax(model(ids_bt).flatten(0, 1), -1)
    return F.nll_loss(rows, ids_bt.flatten())


def twice(model: Any, ids_bt: Tensor) -> Tensor:
    loss = plain(model, ids_bt)
    (slope,) = torch.autograd.grad(loss, [model.head.weight], create_graph=True)
    return loss + slope.square().sum()


@pytest.mark.parametrize("loss", [by_hand, twice])
def test_a_loss_that_gains_nothing_is_never_taken_in_chunks(loss: Any):
    chosen = planned("1392MiB", loss)
    every = [chosen.choice, *chosen.ladder, *(one.choice for one in chosen.rejected)]
    assert not any(choice.chunked_head for choice in every)
    with pytest.raises(ab.InputError, match="chunked_loss is True, but"):
        planned("1392MiB", loss, chunked_loss=True)


def test_what_is_compiled_keeps_its_head():
    with pytest.raises(ab.InputError, match="outside of what is compiled"):
        ab.plan(
            ab.Task(
                model=lambda: nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)),
                loss=plain,
                optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
                train=[torch.zeros(LENGTH, dtype=torch.int64)] * 64,
                global_batch=BATCH,
                steps=1,
            ),
            Machine.describe("24GiB"),
            compile=True,
            chunked_loss=True,
        )
    assert planned("20GiB", compile=True, chunked_loss=True).choice.chunked_head == "head"


def test_no_answer_is_an_error():
    with pytest.raises(ab.InputError, match="chunked_loss is 'yes': give True, False or None"):
        planned(chunked_loss="yes")


def test_where_the_bytes_go_says_what_chunks_would_free():
    machine = Machine.describe("24GiB")
    whole = account(subject_of(task()), machine, planned("20GiB", chunked_loss=False))
    (chunks,) = (knob for knob in whole.knobs if knob.what == "loss in chunks")
    assert whole.ledger.num_bytes - chunks.peak_bytes > 1.9 * LOGITS
    cut = account(subject_of(task()), machine, planned("20GiB", chunked_loss=True))
    assert "loss in chunks" not in [knob.what for knob in cut.knobs]
    assert cut.ledger.num_bytes == chunks.peak_bytes


def test_the_pass_of_a_loss_that_looks_at_its_logits_costs_one_more_product():
    def looking(model: nn.Module, ids_bt: Tensor) -> ab.Loss:
        logits = model(ids_bt)
        total = F.cross_entropy(logits.flatten(0, 1), ids_bt.flatten(), reduction="sum")
        return ab.Loss(total, ids_bt.numel(), {"hits": (logits.argmax(-1) == ids_bt).sum()})

    def more(loss: Any) -> float:
        whole, cut = (planned("20GiB", loss, chunked_loss=chunked) for chunked in (False, True))
        assert whole.prediction is not None
        assert cut.prediction is not None
        return cut.prediction.step_seconds - whole.prediction.step_seconds

    assert more(looking) > more(plain)
