"""Training with lm_loss is training with the plain loss, whatever the plan does to the model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.equivalence.decoder import Decoder, next_word
from tests.equivalence.reference import train, train_plainly
from tests.equivalence.sharding import Sharded
from torch.utils.data import TensorDataset

import anybatch as ab

WORDS = 23


def without_logits(backend):
    """The loss in the place of the head, which is the embedding too."""

    def loss(model, batch):
        (tokens,) = batch
        targets = tokens[:, 1:]
        head, model.head = model.head, torch.nn.Identity()
        try:
            hidden = model(tokens[:, :-1])
        finally:
            model.head = head
        return ab.lm_loss(hidden, model.embed, targets, backend=backend, chunk=5)

    return loss


def task(loss, dtype=torch.float64):
    def model():
        torch.manual_seed(0)
        return Decoder(dtype=dtype, words=WORDS)

    generator = torch.Generator().manual_seed(1)
    return ab.Task(
        model=model,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        train=TensorDataset(torch.randint(WORDS, (30, 9), generator=generator)),
        global_batch=7,
        last="keep",
        epochs=2,
        clip_norm=0.5,
    )


def check(found, plain, tolerance):
    assert found.losses == pytest.approx(plain.losses, rel=tolerance)
    for name, value in plain.model.state_dict().items():
        distance = (found.model.state_dict()[name].double() - value.double()).norm()
        assert distance <= tolerance * value.double().norm(), name


@pytest.mark.parametrize("backend", ["plain", "tokens", "vocabulary"])
@pytest.mark.parametrize("micro_batch", [1, 3, 7])
def test_any_micro_batch_trains_as_the_plain_loss(backend, micro_batch):
    plain = train_plainly(task(next_word))
    check(train(task(without_logits(backend)), micro_batch), plain, 1e-9)


@pytest.mark.parametrize("backend", ["tokens", "vocabulary"])
def test_with_recompute(backend):
    plain = train_plainly(task(next_word))
    knobs = {"recompute": {"blocks": ("layers.*",)}}
    check(train(task(without_logits(backend)), 3, **knobs), plain, 1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-weights", "fp16-weights", "bf16-pure"])
def test_lower_precision_follows_the_plain_loss_in_it(precision):
    plain = train(task(next_word, torch.float32), 3, precision=precision)
    found = train(task(without_logits("vocabulary"), torch.float32), 3, precision=precision)
    assert found.losses == pytest.approx(plain.losses, rel=5e-3)


# --------------------------------------------------------------------- models of transformers


def language_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def samples():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (30, 9), generator=generator)
    labels = ids.clone()
    labels[::3, 4:] = -100
    return [{"input_ids": one, "labels": other} for one, other in zip(ids, labels, strict=True)]


def chunked(model, batch):
    return ab.causal_lm_loss(model, batch, backend="tokens", chunk=5)


def mean_of_the_model(model, batch):
    labels = batch["labels"]
    return ab.Loss(
        model(**batch).loss * (labels[:, 1:] != -100).sum(), int((labels[:, 1:] != -100).sum())
    )


def model_task(loss):
    return dataclasses.replace(task(loss), model=language_model, train=samples())


@pytest.mark.parametrize("micro_batch", [1, 3, 7])
def test_a_model_of_transformers_trains_as_its_own_loss_would(micro_batch):
    plain = train_plainly(model_task(mean_of_the_model))
    check(train(model_task(chunked), micro_batch), plain, 1e-4)


def as_ranks(rank, size):
    return Sharded(model_task(chunked), 2, (1.0,) * size).train()


@pytest.mark.slow
def test_a_head_that_is_divided_over_ranks_is_whole_where_the_loss_is_computed(crew):
    plain = train_plainly(model_task(mean_of_the_model))
    ranks = crew(2, as_ranks)
    for run in ranks:
        assert run.losses == pytest.approx(plain.losses, rel=1e-4)
    for name, value in plain.model.state_dict().items():
        assert (ranks[0].state[name] - value).norm() <= 1e-4 * value.norm(), name


def outside_forward(rank, size):
    def loss(model, batch):
        hidden = torch.zeros(1, 3, 16)
        return ab.lm_loss(hidden, model.lm_head, torch.zeros(1, 3, dtype=torch.int64))

    run = Sharded(dataclasses.replace(model_task(chunked), loss=loss), 2, (1.0,) * size)
    with pytest.raises(ab.InputError, match="divided over ranks, and whole only while") as caught:
        run._loss(run.model, {})
    return str(caught.value)


@pytest.mark.slow
def test_a_head_that_is_divided_is_refused_outside_the_forward_pass(crew):
    assert "causal_lm_loss does" in crew(2, outside_forward)[0]
