"""The peak with the loss in pieces, told from a trace of the whole loss, against a trace of the pieces;
and what is found to be the loss at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.estimate import Ledger, footprint, ledger, loss_in_pieces, subject_of
from anybatch.machine import Device, Machine
from anybatch.plans import Choice

CPU = Machine.here("2GiB", device="cpu").device
ABSENT = Machine.describe("80GiB").device
WORDS, WIDTH, LENGTH, BATCH = 20_000, 64, 128, 32
LOGITS = 4 * BATCH * LENGTH * WORDS


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids_bt: Tensor) -> Tensor:
        return F.gelu(self.mix(self.emb(ids_bt)))


class Language(nn.Module):
    """Returns logits, or its loss with them, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids_bt: Tensor, targets_bt: Tensor | None = None) -> Any:
        logits = self.head(self.body(ids_bt))
        if targets_bt is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets_bt.flatten()), logits


def task(loss: Callable[[Any, Tensor], Any], model: Callable[[], nn.Module] = Language) -> ab.Task:
    return ab.Task(
        model=model,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=[torch.zeros(LENGTH, dtype=torch.int64)] * 2,
        collate=torch.stack,
        global_batch=BATCH,
        steps=1,
    )


def plain(model: nn.Module, ids_bt: Tensor) -> Tensor:
    return F.cross_entropy(model(ids_bt).flatten(0, 1), ids_bt.flatten())


def inside(model: nn.Module, ids_bt: Tensor) -> Tensor:
    return model(ids_bt, ids_bt)[0]


def in_pieces(model: Any, ids_bt: Tensor) -> ab.Loss:
    return ab.lm_loss(model.body(ids_bt), model.head, ids_bt)


def choice(precision: Any = "fp32") -> Choice:
    return Choice(micro_batch=BATCH, evaluation_batch=1, precision=precision)


def account(loss: Callable[[Any, Tensor], Any], device: Device = ABSENT) -> Ledger:
    return ledger(subject_of(task(loss)), choice(), device)


@pytest.mark.parametrize("device", [CPU, ABSENT], ids=["cpu", "absent"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", [plain, inside])
def test_the_peak_of_a_loss_in_pieces_is_told_from_the_whole(
    loss: Any, precision: str, device: Device
):
    whole = subject_of(task(loss))
    told = loss_in_pieces(whole, choice(precision), device)
    assert told is not None
    before = footprint(whole, choice(precision), device).peak
    real = footprint(subject_of(task(in_pieces)), choice(precision), device).peak
    freed = before.num_bytes - real.num_bytes
    assert before.num_bytes - told.num_bytes == pytest.approx(freed, rel=0.05)
    assert sum(told.by_kind.values()) == told.num_bytes


def test_a_loss_that_is_in_pieces_or_small_is_left_alone():
    assert loss_in_pieces(subject_of(task(in_pieces)), choice(), ABSENT) is None

    def few(model: nn.Module, ids_bt: Tensor) -> Tensor:
        return F.cross_entropy(model(ids_bt[:, :2])[..., :8].flatten(0, 1), ids_bt[:, :2].flatten())

    assert loss_in_pieces(subject_of(task(few)), choice(), ABSENT) is None


def test_logits_of_a_convolution_are_not_those_of_words():
    def loss(model: nn.Module, ids_bt: Tensor) -> Tensor:
        pixels = ids_bt.float()[:, None, :, None].expand(-1, 3, -1, 64)
        return F.cross_entropy(model(pixels), ids_bt[:, :, None].expand(-1, -1, 64))

    painted = task(loss, lambda: nn.Conv2d(3, 100, 1))
    found = ledger(subject_of(painted), choice(), ABSENT)
    assert found.by_kind["loss and logits"] > 0.25 * found.num_bytes
    assert found.in_pieces is None


def test_a_loss_inside_the_model_is_the_loss_all_the_same():
    one, other = account(plain), account(inside)
    assert one.by_kind["loss and logits"] >= 3 * LOGITS
    assert other.by_kind["loss and logits"] >= one.by_kind["loss and logits"]
    for found in (one, other):
        assert found.peak.phase == "backward"
        assert found.peak.module == "the loss"
        assert found.held[0].module == "the loss"
        assert found.in_pieces is not None
        phases = [moment.phase for moment in found.curve]
        assert "loss" in phases
        assert "loss" not in phases[: phases.index("forward")]
