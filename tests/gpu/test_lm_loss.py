"""lm_loss where its memory is scarce: the same numbers, less memory, no waiting for the device."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gpu_parts import vocabulary
from benchmarks.memory.models import KINDS as MODELS

import anybatch as ab
from anybatch.compute.lm_loss import wrong_target
from anybatch.events import StepDone

pytestmark = pytest.mark.gpu


def problem(dtype, tokens=512, words=8192, width=256):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda", generator=generator).to(dtype)
    weight = torch.randn(words, width, device="cuda", generator=generator).mul_(0.05).to(dtype)
    targets = torch.randint(words, (tokens,), device="cuda", generator=generator)
    targets[7] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def run(given, backend):
    hidden, weight, targets = given
    found = ab.lm_loss(hidden, weight, targets, backend=backend)
    return [found.sum.detach(), *torch.autograd.grad(found.sum, (hidden, weight))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "tokens", "vocabulary"])
def test_every_backend_agrees_with_the_plain_loss(backend, dtype):
    given = problem(dtype)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(run(given, backend), run(given, "plain"), strict=True):
        assert (one.double() - other.double()).norm() <= close * other.double().norm()


@pytest.mark.parametrize("backend", ["plain", "tokens", "vocabulary"])
def test_the_host_does_not_wait(backend):
    given = problem(torch.bfloat16)
    run(given, backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(given, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["plain", "tokens", "vocabulary"])
def test_a_wrong_target_makes_the_loss_nan_and_is_told_later(backend):
    hidden, weight, targets = problem(torch.float32)
    targets[5] = 9000
    found = ab.lm_loss(hidden, weight, targets, backend=backend)
    assert found.sum.isnan()
    told = wrong_target()
    assert told is not None
    assert "target number 5 of its micro-batch is 9000, and the head has 8192 words" in told
    assert ab.lm_loss(hidden, weight, targets.clamp(max=1), backend=backend).sum.isfinite()
    assert wrong_target() is None


def test_a_vocabulary_of_256_000_words_takes_no_more_than_its_gradient():
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("the plain loss, to compare with, needs 30 GB")
    cells = {cell["backend"]: cell for cell in vocabulary()}
    assert cells["auto"]["extra_bytes"] <= 1_400_000_000
    assert cells["plain"]["extra_bytes"] > 8 * cells["auto"]["extra_bytes"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_task_that_knows_nothing_of_chunks_trains_the_same_in_less_memory(precision):
    kind = MODELS["gpt, tied"]
    task = kind.task("gpt")
    found = {}
    for chunked in (False, True):
        plan = ab.plan(
            task,
            precision=precision,
            micro_batch=kind.batch,
            recompute="none",
            chunked_loss=chunked,
        )
        events = []
        ended = ab.train(task, plan=plan, progress=False, sinks=[events.append]).ended
        losses = [event.loss for event in events if isinstance(event, StepDone)]
        found[chunked] = losses, ended
    (whole, plain), (cut, ended) = found[False], found[True]
    assert cut == pytest.approx(whole, rel=1e-4 if precision == "fp32" else 2e-2)
    logits = 4 * kind.batch * 128 * 4000
    freed = plain.measured_totals["allocated"] - ended.measured_totals["allocated"]
    assert freed > logits
    assert ended.measured_totals["allocated"] <= 1.03 * ended.predicted_totals["allocated"]
