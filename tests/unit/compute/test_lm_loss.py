"""lm_loss against the loss with all its logits, in value, gradient, memory and complaints."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab
from anybatch.compute import lm_loss as module
from anybatch.compute.lm_loss import loss_of_logits

TOKENS, WORDS, WIDTH = (3, 13), 53, 11
CHUNKED = ("tokens", "vocabulary")


def problem(dtype=torch.float64, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, WIDTH, generator=generator).to(dtype).requires_grad_()
    shift = torch.randn(WORDS, generator=generator).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(WORDS, TOKENS, generator=generator)
    targets[0, 3] = targets[2, 5:] = -100
    return hidden, weight, shift, targets


def by_hand(hidden, weight, bias, targets, smoothing=0.0, z_loss=0.0, softcap=None, weights=None):
    """From the definition, one token at a time."""
    sums, weight_sum = [], 0.0
    for place in torch.cartesian_prod(*(torch.arange(n) for n in targets.shape)):
        target = int(targets[tuple(place)])
        if target == -100:
            continue
        logits = weight @ hidden[tuple(place)] + (0 if bias is None else bias)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        aim = torch.full((WORDS,), smoothing / WORDS, dtype=logits.dtype)
        aim[target] += 1 - smoothing
        normaliser = logits.exp().sum().log()
        loss = (aim * (normaliser - logits)).sum() + z_loss * normaliser**2
        importance = 1.0 if weights is None else float(weights[tuple(place)])
        sums.append(importance * loss)
        weight_sum += importance
    return torch.stack(sums).sum(), weight_sum


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"z_loss": 0.01},
        {"softcap": 2.0},
        {"weights": True},
        {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 3.0, "weights": True},
    ],
    ids=["nothing", "smoothing", "z-loss", "softcap", "weights", "everything"],
)
@pytest.mark.parametrize("backend", ["plain", *CHUNKED])
def test_the_sum_is_the_definition_s_to_the_last_digits(backend, options, bias):
    hidden, weight, shift, targets = problem(bias=bias)
    weights = torch.rand(TOKENS, dtype=torch.float64) if "weights" in options else None
    options = {**options, "weights": weights}
    found = ab.lm_loss(hidden, weight, targets, bias=shift, backend=backend, chunk=8, **options)
    options["smoothing"] = options.pop("label_smoothing", 0.0)
    wanted, count = by_hand(hidden, weight, shift, targets, **options)
    leaves = [leaf for leaf in (hidden, weight, shift) if leaf is not None]
    assert float(found.weight) == pytest.approx(count)
    torch.testing.assert_close(found.sum, wanted, rtol=1e-13, atol=0)
    gradients = torch.autograd.grad(found.sum * 3, leaves)
    for one, other in zip(gradients, torch.autograd.grad(wanted * 3, leaves), strict=True):
        assert (one - other).norm() <= 1e-13 * other.norm()


@pytest.mark.parametrize("chunk", [1, 7, 39, 1000])
@pytest.mark.parametrize("backend", CHUNKED)
def test_single_precision_is_near_the_plain_loss_whatever_the_chunk(backend, chunk):
    hidden, weight, bias, targets = problem(torch.float32)
    leaves = (hidden, weight, bias)
    plain = ab.lm_loss(hidden, weight, targets, bias=bias, backend="plain")
    chunked = ab.lm_loss(hidden, weight, targets, bias=bias, backend=backend, chunk=chunk)
    assert float(chunked.sum) == pytest.approx(float(plain.sum), rel=1e-6)
    pairs = zip(
        torch.autograd.grad(chunked.sum, leaves),
        torch.autograd.grad(plain.sum, leaves),
        strict=True,
    )
    for one, other in pairs:
        assert (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("backend", CHUNKED)
def test_words_too_unlikely_for_a_normal_number_add_nothing_wrong(backend):
    hidden = torch.tensor([[1.0]]).requires_grad_()
    logits = torch.tensor([0.0, -1.0, -20.0, -80.0, -95.0, -110.0, -1000.0])
    weight = logits[:, None].clone().requires_grad_()
    loss = ab.lm_loss(hidden, weight, torch.tensor([1]), backend=backend).sum
    loss.backward()
    likely = logits.double().softmax(0)
    assert float(loss.detach()) == pytest.approx(-math.log(likely[1]), rel=1e-6)
    likely[1] -= 1
    assert torch.allclose(weight.grad[:, 0].double(), likely, rtol=1e-5, atol=1e-37)


@pytest.mark.slow
@pytest.mark.parametrize("backend", CHUNKED)
def test_gradients_are_the_slopes_of_the_loss(backend):
    hidden, weight, bias, targets = problem()

    def loss(hidden, weight, bias):
        options = {"z_loss": 0.01, "label_smoothing": 0.1, "softcap": 3.0}
        return ab.lm_loss(
            hidden, weight, targets, bias=bias, backend=backend, chunk=10, **options
        ).sum

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", CHUNKED)
def test_half_precision_is_no_worse_than_the_plain_loss(backend, dtype):
    exact = problem(torch.float64, bias=False)
    half = [t.detach().to(dtype).requires_grad_() for t in exact[:2]]
    exact = [h.detach().double().requires_grad_() for h in half] + [exact[3]]

    def errors(backend):
        found = ab.lm_loss(*half, exact[2], backend=backend, chunk=8)
        assert found.sum.dtype == torch.float32
        gradients = torch.autograd.grad(found.sum, half)
        assert [g.dtype for g in gradients] == [dtype, dtype]
        return [
            float((g.double() - w).norm() / w.norm())
            for g, w in zip(gradients, wanted, strict=True)
        ]

    wanted = torch.autograd.grad(ab.lm_loss(*exact, backend="plain").sum, exact[:2])
    for chunked, plain in zip(errors(backend), errors("plain"), strict=True):
        assert chunked <= 1.1 * plain


@pytest.mark.parametrize("backend", ["plain", *CHUNKED])
def test_the_sum_of_a_long_text_is_in_the_range_of_half_precision(backend):
    hidden = torch.zeros(20_000, 2, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(100, 2, dtype=torch.float16, requires_grad=True)
    found = ab.lm_loss(hidden, weight, torch.zeros(20_000, dtype=torch.int64), backend=backend)
    assert float(found.sum) == pytest.approx(20_000 * math.log(100), rel=1e-3)  # above 65,504


@pytest.mark.parametrize("backend", ["plain", *CHUNKED])
def test_autocast_computes_in_its_dtype(backend):
    hidden, weight, _, targets = problem(torch.float32, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        found = ab.lm_loss(hidden, weight, targets, backend=backend, chunk=8)
        logits = F.linear(hidden, weight)
    assert logits.dtype == torch.bfloat16
    wanted = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    gradients = torch.autograd.grad(found.sum, (hidden, weight))
    assert [g.dtype for g in gradients] == [torch.float32, torch.float32]
    for one, other in zip(gradients, torch.autograd.grad(wanted, (hidden, weight)), strict=True):
        assert (one - other).norm() <= 0.01 * other.norm()
    assert float(found.sum) == pytest.approx(float(wanted), rel=1e-3)


def test_small_gradients_survive_float16_under_a_loss_scale():
    """Every word but the target has a probability far below what float16 can hold."""
    hidden = torch.zeros(1, 2, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(WORDS, 2, dtype=torch.float16)
    bias = torch.full((WORDS,), -17.0, dtype=torch.float16)
    bias[0] = 0
    bias.requires_grad_()
    found = ab.lm_loss(hidden, weight, torch.tensor([0]), bias=bias)
    (gradient,) = torch.autograd.grad(found.sum * 2.0**16, bias)
    assert gradient[1:].float() == pytest.approx(math.exp(-17) * 2**16, rel=1e-2)


@pytest.mark.parametrize("backend", CHUNKED)
def test_a_loss_scale_and_a_second_backward(backend):
    hidden, weight, _, targets = problem()
    found = ab.lm_loss(hidden, weight, targets, backend=backend, chunk=8).sum
    once = torch.autograd.grad(found, (hidden, weight), retain_graph=True)
    thrice = torch.autograd.grad(found * 3, (hidden, weight))
    for one, three in zip(once, thrice, strict=True):
        torch.testing.assert_close(three, 3 * one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", CHUNKED)
def test_what_cannot_be_differentiated_twice_says_so(backend):
    hidden, weight, _, targets = problem()
    found = ab.lm_loss(hidden, weight, targets, backend=backend).sum
    with pytest.raises(ab.InputError, match=r"cannot be differentiated again .* backend='plain'"):
        torch.autograd.grad(found, hidden, create_graph=True)


def test_the_plain_loss_can_be_differentiated_twice():
    hidden, weight, _, targets = problem()
    found = ab.lm_loss(hidden, weight, targets, backend="plain").sum
    (gradient,) = torch.autograd.grad(found, hidden, create_graph=True)
    assert torch.autograd.grad(gradient.square().sum(), weight)[0].isfinite().all()


@pytest.mark.parametrize("backend", CHUNKED)
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(backend, frozen):
    hidden, weight, _, targets = problem()
    still = {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    ab.lm_loss(hidden, weight, targets, backend=backend).sum.backward()
    assert still.grad is None
    assert (hidden.grad is None) != (weight.grad is None)


@pytest.mark.parametrize("backend", ["plain", *CHUNKED])
def test_without_gradient(backend):
    hidden, weight, _, targets = problem()
    with torch.no_grad():
        found = ab.lm_loss(hidden, weight, targets, backend=backend, chunk=4)
    assert not found.sum.requires_grad
    wanted = ab.lm_loss(hidden, weight, targets, backend="plain")
    torch.testing.assert_close(found.sum, wanted.sum.detach(), rtol=1e-13, atol=0)


def test_micro_batches_of_any_cut_add_up():
    hidden, weight, _, targets = problem()
    whole = ab.lm_loss(hidden, weight, targets, backend="tokens")
    (gradient,) = torch.autograd.grad(whole.sum, weight)
    total, count = torch.zeros_like(gradient), 0.0
    for part in (slice(0, 1), slice(1, 3)):
        piece = ab.lm_loss(hidden[part], weight, targets[part], backend="vocabulary")
        total += torch.autograd.grad(piece.sum, weight)[0]
        count += float(piece.weight)
    assert count == float(whole.weight)
    torch.testing.assert_close(total, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["auto", "plain", *CHUNKED])
def test_a_text_that_is_ignored_whole_weighs_nothing(backend):
    hidden, weight, _, targets = problem()
    found = ab.lm_loss(hidden, weight, torch.full_like(targets, -100), backend=backend)
    found.sum.backward()
    assert (float(found.sum), float(found.weight)) == (0.0, 0.0)
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("backend", ["auto", "plain", *CHUNKED])
def test_an_empty_text_weighs_nothing(backend):
    _, weight, _, _ = problem()
    hidden = torch.zeros(2, 0, WIDTH, dtype=torch.float64, requires_grad=True)
    found = ab.lm_loss(hidden, weight, torch.zeros(2, 0, dtype=torch.int64), backend=backend)
    found.sum.backward()
    assert (float(found.sum), float(found.weight)) == (0.0, 0.0)
    assert not weight.grad.any()


def test_a_linear_layer_brings_its_bias_and_an_embedding_has_none():
    hidden, _, _, targets = problem(torch.float32)
    linear, embedding = nn.Linear(WIDTH, WORDS), nn.Embedding(WORDS, WIDTH)
    flat = targets.flatten()
    for head, logits in (
        (linear, linear(hidden)),
        (embedding, hidden @ embedding.weight.T),
    ):
        wanted = F.cross_entropy(logits.flatten(0, 1), flat, reduction="sum")
        assert float(ab.lm_loss(hidden, head, targets).sum) == pytest.approx(float(wanted))


def test_an_index_of_the_vocabulary_can_be_ignored():
    hidden, weight, _, targets = problem()
    targets = targets.clamp_min(0)
    found = ab.lm_loss(hidden, weight, targets, ignore_index=0, backend="tokens", chunk=5)
    logits = (hidden @ weight.T).flatten(0, 1)
    wanted = F.cross_entropy(logits, targets.flatten(), ignore_index=0, reduction="sum")
    torch.testing.assert_close(found.sum, wanted)
    assert float(found.weight) == int((targets != 0).sum())


def test_logits_that_are_there_already():
    hidden, weight, _, targets = problem()
    wanted = ab.lm_loss(hidden, weight, targets, label_smoothing=0.1, z_loss=0.1)
    found = loss_of_logits(hidden @ weight.T, targets, label_smoothing=0.1, z_loss=0.1)
    torch.testing.assert_close(found.sum, wanted.sum)
    assert float(found.weight) == float(wanted.weight)


# --------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize(
    ("dtype", "words", "chosen"),
    [
        (torch.float32, 1000, "_plain"),
        (torch.float32, 300_000, "_by_tokens"),
        (torch.float64, 300_000, "_by_tokens"),
        (torch.bfloat16, 300_000, "_by_vocabulary"),
        (torch.float16, 300_000, "_by_vocabulary"),
    ],
    ids=["small", "float32", "float64", "bfloat16", "float16"],
)
def test_auto_is_plain_where_logits_are_small(monkeypatch, dtype, words, chosen):
    ran = []
    for name, run in module._BACKENDS.items():
        monkeypatch.setitem(
            module._BACKENDS, name, lambda *args, run=run: ran.append(run.__name__) or run(*args)
        )
    hidden = torch.zeros(4, 2, dtype=dtype)
    found = ab.lm_loss(
        hidden, torch.zeros(words, 2, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    )
    assert ran == [chosen]
    assert float(found.sum) == pytest.approx(4 * math.log(words), rel=1e-3)


# ------------------------------------------------------------------------------------ complaints


def complaint(match, kind=ab.InputError, **changes):
    hidden, weight, _, targets = problem()
    given = {"hidden": hidden, "head": weight, "targets": targets, **changes}
    with pytest.raises(kind, match=match):
        ab.lm_loss(**given)


@pytest.mark.parametrize("wrong", [WORDS, 2**40, -1])
def test_a_target_that_is_no_word_is_named(wrong):
    targets = problem()[3]
    targets[1, 4] = wrong
    complaint(
        rf"target at \(1, 4\) is {wrong}, and the head has 53 words, 0 to 52",
        ab.DataError,
        targets=targets,
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"hidden": torch.zeros(*TOKENS, 7)},
            r"shape \(3, 13, 7\) and the head's weight \(53, 11\)",
        ),
        ({"targets": torch.zeros(3, 12, dtype=torch.int64)}, r"targets have the shape \(3, 12\)"),
        ({"targets": torch.zeros(*TOKENS)}, "dtype torch.float32"),
        ({"bias": torch.zeros(7)}, r"bias has the shape \(7,\)"),
        ({"weights": torch.zeros(13)}, r"weights have the shape \(13,\)"),
        ({"weights": torch.zeros(TOKENS, requires_grad=True)}, "detach them"),
        ({"head": nn.Linear(WIDTH, WORDS), "bias": torch.zeros(WORDS)}, "leave bias= out"),
        ({"head": nn.Sequential(nn.Linear(WIDTH, WORDS))}, "the head is a Sequential"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"z_loss": -1.0}, "z_loss is -1.0"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"chunk": 0}, "chunk is 0"),
        (
            {"backend": "fast"},
            "backend is 'fast': choose 'auto', 'plain', 'tokens' or 'vocabulary'",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_what_does_not_fit_is_told(changes, match):
    complaint(match, **changes)


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_a_head_that_does_more_than_multiply_is_refused():
    complaint("the head is a Scaled, whose forward may do more", head=Scaled(WIDTH, WORDS))


def test_a_wrong_target_is_told_later_where_it_cannot_be_told_at_once():
    """As on an accelerator: the loss is NaN, and the place is told when it is asked for."""
    targets = torch.tensor([1, 2, 99, 3, 100])
    wrong = targets >= WORDS
    poison = module._note_wrong(wrong, targets, WORDS)
    assert poison.isnan()
    right = torch.zeros(3, dtype=torch.int64)
    assert module._note_wrong(right < 0, right, WORDS) == 1.0
    found = module.wrong_target()
    assert found is not None
    assert "target number 2 of its micro-batch is 99, and the head has 53 words" in found
    assert module.wrong_target() is None
