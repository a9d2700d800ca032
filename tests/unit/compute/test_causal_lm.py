"""causal_lm_loss: the loss that the model itself gives, without its logits where that is right."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab
from anybatch.compute import causal_lm

transformers = pytest.importorskip("transformers")

WORDS = 101
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BUILT = {
    "gpt2": partial(
        transformers.GPT2Config, vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),
    "llama": partial(transformers.LlamaConfig, **SIZES),
    "llama tied": partial(transformers.LlamaConfig, **SIZES, tie_word_embeddings=True),
    "gemma 2": partial(transformers.Gemma2Config, **SIZES, head_dim=8),
    "gemma 3": partial(transformers.Gemma3TextConfig, **SIZES, head_dim=8),
    "cohere": partial(transformers.CohereConfig, **SIZES, logit_scale=0.0625),
    "granite": partial(transformers.GraniteConfig, **SIZES, logits_scaling=8.0),
    "phi": partial(transformers.PhiConfig, **SIZES),  # its head has a bias
    "mixtral": partial(transformers.MixtralConfig, **SIZES, num_local_experts=4),
}


def built(name, **options):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(BUILT[name](**options)).eval()


def batch(rows=4, length=17):
    ids = torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[1, 5:] = labels[3, :9] = -100
    return {"input_ids": ids, "labels": labels}


def own(model, batch):
    """The model's mean times the tokens that it is over."""
    output = model(**batch, use_cache=False)
    return output.loss * (batch["labels"][:, 1:] != -100).sum()


def gradients(model, total):
    model.zero_grad()
    total.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def check(model, batch, **options):
    found = ab.causal_lm_loss(model, batch, **options)
    wanted = own(model, batch)
    assert int(found.weight) == int((batch["labels"][:, 1:] != -100).sum())
    assert float(found.sum.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    one, other = gradients(model, found.sum), gradients(model, wanted)
    assert (one - other).norm() <= 1e-6 * other.norm()


def way(model):
    return causal_lm._KNOWN[model][1]


@pytest.mark.parametrize("backend", ["plain", "tokens", "vocabulary"])
@pytest.mark.parametrize("name", sorted(BUILT))
def test_loss_and_gradient_are_the_model_s_own(name, backend):
    model = built(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "causal_lm_loss")
        check(model, batch(), backend=backend, chunk=7)
    assert way(model) == "head"


def test_the_logits_are_never_there(monkeypatch):
    model = built("llama")
    ab.causal_lm_loss(model, batch())  # the first batch is checked
    sizes = []
    monkeypatch.setattr(
        model.lm_head, "forward", lambda *_: pytest.fail("the head computed logits")
    )
    handle = model.register_forward_hook(lambda *args: sizes.append(args[-1].logits.shape))
    ab.causal_lm_loss(model, batch(), backend="tokens")
    handle.remove()
    assert sizes == [(4, 17, 1)]


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_the_check_leaves_no_trace(mode):
    model = built("gpt2").train(mode)
    model.transformer.drop.eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    forward = model.lm_head.forward
    causal_lm._check(model, model.lm_head, batch()["input_ids"][:1, :8])
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert model.lm_head.forward == forward
    assert all(p.grad is None for p in model.parameters())


def test_dropout_draws_what_it_draws_in_the_model_itself():
    model = built("gpt2").train()
    ab.causal_lm_loss(model, batch())
    torch.manual_seed(1)
    found = ab.causal_lm_loss(model, batch()).sum
    torch.manual_seed(1)
    assert float(found.detach()) == pytest.approx(float(own(model, batch()).detach()), rel=1e-6)


def test_an_auxiliary_loss_is_kept_and_told():
    model = built("mixtral", output_router_logits=True)
    with pytest.warns(UserWarning, match="MixtralForCausalLM.*its own loss is taken, weighed by"):
        check(model, batch())
    assert way(model) == "own"
    nothing = {**batch(), "labels": torch.full_like(batch()["labels"], -100)}
    empty = ab.causal_lm_loss(model, nothing)
    assert (float(empty.sum.detach()), int(empty.weight)) == (0.0, 0)
    with pytest.raises(ab.InputError, match="label_smoothing and z_loss cannot be put into it"):
        ab.causal_lm_loss(model, batch(), z_loss=0.1)


class Adapted(nn.Linear):
    """A head with an adapter that does nothing yet, as they begin."""

    def __init__(self, head):
        super().__init__(head.in_features, head.out_features, bias=False)
        self.weight = head.weight
        self.more = nn.Parameter(torch.zeros_like(head.weight))

    def forward(self, input):
        return super().forward(input) + F.linear(input, self.more)


def test_an_adapter_on_the_head_is_not_passed_over():
    model = built("llama")
    check(model, batch())
    model.lm_head = Adapted(model.lm_head)
    with pytest.warns(UserWarning, match=r"not those of its head \(Adapted\) alone"):
        check(model, batch())
    assert way(model) == "logits"
    nn.init.normal_(model.lm_head.more)
    check(model, batch())


def test_a_bound_that_is_not_in_the_configuration_is_found(monkeypatch):
    """Logits of a model that is not trained are far below the bound: on them nothing would show."""
    model = built("gemma 2")
    monkeypatch.setattr(causal_lm, "_finish_of", lambda model: causal_lm._Finish(1.0, None))
    with pytest.warns(UserWarning, match="not those of its"):
        check(model, batch())
    assert way(model) == "logits"


def test_smoothing_and_z_loss():
    model, given = built("cohere"), batch()
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    logits = model(input_ids=given["input_ids"]).logits
    found = ab.causal_lm_loss(model, given, backend="tokens", **options)
    wanted = causal_lm.loss_of_logits(logits[:, :-1], given["labels"][:, 1:], **options)
    assert float(found.sum.detach()) == pytest.approx(float(wanted.sum.detach()), rel=1e-5)


def test_labels_may_be_moved_already_or_missing():
    model, given = built("llama"), batch()
    wanted = float(ab.causal_lm_loss(model, given).sum.detach())
    moved = F.pad(given["labels"][:, 1:], (0, 1), value=-100)
    already = {"input_ids": given["input_ids"], "shift_labels": moved}
    assert float(ab.causal_lm_loss(model, already).sum.detach()) == wanted

    ids = given["input_ids"]
    mask = torch.ones_like(ids)
    mask[2, 10:] = 0
    padded = {"input_ids": ids, "attention_mask": mask}
    named = {**padded, "labels": ids.where(mask != 0, -100)}
    assert int(ab.causal_lm_loss(model, padded).weight) == 3 * 16 + 9
    found, wanted = (ab.causal_lm_loss(model, one).sum.detach() for one in (padded, named))
    assert float(found) == float(wanted)
    assert int(ab.causal_lm_loss(model, ids).weight) == 4 * 16


def test_micro_batches_add_up():
    model, given = built("gpt2"), batch()
    whole = ab.causal_lm_loss(model, given)
    wanted = gradients(model, whole.sum)
    model.zero_grad()
    count = 0
    for rows in (slice(0, 1), slice(1, 4)):
        part = ab.causal_lm_loss(model, {k: v[rows] for k, v in given.items()}, backend="tokens")
        part.sum.backward()
        count += int(part.weight)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert count == int(whole.weight)
    assert (found - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ((torch.zeros(2, 3),), "was given a tuple"),
        ({"tokens": torch.zeros(2, 3)}, "was given a dict with 'tokens'"),
        (torch.zeros(3, dtype=torch.int64), r"shape \(3,\)"),
        (
            {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "labels": torch.zeros(2, 2)},
            r"labels have the shape \(2, 2\)",
        ),
    ],
    ids=["tuple", "other names", "flat", "labels"],
)
def test_a_batch_that_cannot_be_read(given, match):
    with pytest.raises(ab.InputError, match=match):
        ab.causal_lm_loss(built("gpt2"), given)


def test_a_label_that_is_no_word():
    given = batch()
    given["labels"][2, 6] = WORDS
    with pytest.raises(ab.DataError, match=rf"at \(2, 5\) is {WORDS}"):
        ab.causal_lm_loss(built("gpt2"), given)


class Prompted(nn.Module):
    """With virtual tokens before those of the batch, as prompt tuning of peft adds them."""

    def __init__(self):
        super().__init__()
        self.inner = built("gpt2")
        self.prompt = nn.Parameter(torch.randn(4, 32))

    def get_output_embeddings(self):
        return self.inner.get_output_embeddings()

    def forward(self, input_ids, labels=None):
        words = self.inner.get_input_embeddings()(input_ids)
        prompt = self.prompt.expand(len(words), -1, -1)
        if labels is not None:
            labels = F.pad(labels, (4, 0), value=-100)
        return self.inner(inputs_embeds=torch.cat([prompt, words], 1), labels=labels)


def test_a_model_with_virtual_tokens_is_refused_and_has_a_loss_of_its_own():
    model, given = Prompted(), batch()
    said = (
        r"Prompted computes logits at \[1, 12\] positions for input_ids of \[1, 8\]"
        r".* give anybatch\.model_loss"
    )
    with pytest.raises(ab.InputError, match=said):
        ab.causal_lm_loss(model, given)
    with pytest.raises(ab.InputError, match=r"at \[4, 21\] positions .* give anybatch\.model_loss"):
        causal_lm._through_head(
            model,
            model.get_output_embeddings(),
            {"input_ids": given["input_ids"]},
            given["labels"],
            {},
        )
    found = ab.model_loss(model, given)  # the first token is predicted from the last virtual one
    assert int(found.weight) == int((given["labels"] != -100).sum())
    torch.testing.assert_close(found.sum, model(**given).loss * found.weight)


def test_a_model_without_a_head():
    with pytest.raises(ab.InputError, match=r"Linear has no get_output_embeddings\(\)"):
        ab.causal_lm_loss(nn.Linear(2, 2), batch())
