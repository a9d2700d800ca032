"""The layer that makes the logits: where it is found, what chunks free and what they cost; and what is
found to be the loss at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.compute.lm_loss import PLAIN_LOGITS
from anybatch.estimate import Head, Ledger, footprint, head_of, ledger, subject_of
from anybatch.estimate.calibration import nominal
from anybatch.estimate.seconds import Pace
from anybatch.machine import Device, Machine
from anybatch.plans import Choice, Recompute

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


def found(loss: Callable[[Any, Tensor], Any], device: Device = ABSENT, **more: Any) -> Head | None:
    return head_of(subject_of(task(loss)), choice(**more), device)


@pytest.mark.parametrize("device", [CPU, ABSENT], ids=["cpu", "absent"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", [plain, inside])
def test_chunks_free_what_a_loss_that_is_written_in_chunks_frees(
    loss: Any, precision: str, device: Device
):
    subject, whole = subject_of(task(loss)), choice(precision)
    head = head_of(subject, whole, device)
    assert head is not None
    assert (head.name, head.words, head.width, head.num_computed) == ("head", WORDS, WIDTH, 0)
    assert head.tokens == LENGTH
    before = footprint(subject, whole, device).peak
    chunked = whole.model_copy(update={"chunked_head": "head"})
    peak = footprint(subject, chunked, device).peak
    written = footprint(subject_of(task(in_pieces)), whole, device).peak
    assert before.num_bytes - written.num_bytes > 1.9 * LOGITS
    assert peak.num_bytes == pytest.approx(written.num_bytes, rel=0.02)


def test_logits_that_are_looked_at_are_counted():
    def with_hits(model: nn.Module, ids_bt: Tensor) -> ab.Loss:
        logits = model(ids_bt)
        total = F.cross_entropy(logits.flatten(0, 1), ids_bt.flatten(), reduction="sum")
        hits = (logits.argmax(-1) == ids_bt).sum()
        return ab.Loss(total, ids_bt.numel(), {"hits": hits})

    head = found(with_hits)
    assert head is not None
    assert head.num_computed == 1


def test_a_loss_in_chunks_or_small_or_differentiated_twice_has_no_head():
    assert found(in_pieces) is None

    def few(model: nn.Module, ids_bt: Tensor) -> Tensor:
        return F.cross_entropy(model(ids_bt[:, :1]).flatten(0, 1), ids_bt[:, :1].flatten())

    assert found(few) is None

    def smooth(model: Any, ids_bt: Tensor) -> Tensor:
        loss = plain(model, ids_bt)
        (slope,) = torch.autograd.grad(loss, [model.body.mix.weight], create_graph=True)
        return loss + slope.square().sum()

    assert found(smooth) is None


def test_logits_that_are_computed_again_cost_their_product():
    head = found(plain)
    assert head is not None
    pace = Pace(subject_of(task(plain)), CPU, nominal(CPU), "fp32")
    whole = pace.micro(BATCH, Recompute())
    assert pace.micro(BATCH, Recompute(), head) == whole
    twice = replace(head, num_computed=2)
    more = pace.micro(BATCH, Recompute(), twice)[0] - whole[0]
    flops = 2 * BATCH * LENGTH * WORDS * WIDTH
    assert more >= 2 * flops / CPU.rates.flops
    half = replace(head, dtype=torch.bfloat16)
    assert pace.micro(BATCH, Recompute(), half)[0] > whole[0]
    few = PLAIN_LOGITS // (WORDS * LENGTH)
    assert not twice.is_left_out(few)
    assert pace.micro(few, Recompute(), twice) == pace.micro(few, Recompute())


def test_logits_of_a_convolution_are_not_those_of_words():
    def loss(model: nn.Module, ids_bt: Tensor) -> Tensor:
        pixels = ids_bt.float()[:, None, :, None].expand(-1, 3, -1, 64)
        return F.cross_entropy(model(pixels), ids_bt[:, :, None].expand(-1, -1, 64))

    painted = task(loss, lambda: nn.Conv2d(3, 100, 1))
    found = ledger(subject_of(painted), choice(), ABSENT)
    # As CUDA has them: with channels last, which the softmax reads from a copy.
    copied = found.by_kind["kernels' scratch"]
    others = found.num_bytes - found.by_kind["device context"]
    assert found.by_kind["loss and logits"] + copied > 0.25 * others
    assert copied == pytest.approx(found.by_kind["loss and logits"] / 2, rel=0.01)


def test_a_loss_inside_the_model_is_the_loss_all_the_same():
    one, other = account(plain), account(inside)
    assert one.by_kind["loss and logits"] >= 3 * LOGITS
    assert other.by_kind["loss and logits"] >= one.by_kind["loss and logits"]
    for found in (one, other):
        assert found.peak.phase == "backward"
        assert found.peak.module == "the loss"
        assert found.held[0].module == "the loss"
        phases = [moment.phase for moment in found.curve]
        assert "loss" in phases
        assert "loss" not in phases[: phases.index("forward")]
