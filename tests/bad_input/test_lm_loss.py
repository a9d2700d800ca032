"""Texts and models that do not fit each other, in a whole run."""

from __future__ import annotations

import pytest
import torch
from tests.equivalence.reference import plan_for
from torch import nn

import anybatch as ab

WORDS = 50


def run(texts, ignore=-100, num_embeddings=1000):
    def loss(model, tokens):
        hidden = model[0](tokens[:, :-1])
        return ab.lm_loss(hidden, model[1], tokens[:, 1:], ignore_index=ignore)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(num_embeddings, 8), nn.Linear(8, WORDS))
    before = [p.detach().clone() for p in model.parameters()]
    task = ab.Task(
        model=model,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=texts,
        collate=torch.stack,
        global_batch=4,
        steps=1,
    )
    try:
        ab.train(task, plan=plan_for(task, 2))
    finally:
        now = list(model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_a_tokenizer_with_more_words_than_the_head():
    texts = [torch.full((6,), 7) for _ in range(4)]
    texts[2][3] = WORDS + 20
    with pytest.raises(ab.DataError) as caught:
        run(texts)
    sentence = str(caught.value)
    assert "is 70, and the head has 50 words, 0 to 49" in sentence
    assert "a tokenizer with more words than the model needs a larger head" in sentence


def test_texts_that_are_ignored_whole():
    with pytest.raises(ab.LossError, match="total weight of step 1 is zero"):
        run([torch.full((6,), 7) for _ in range(4)], ignore=7)


def test_texts_without_a_target():
    with pytest.raises(ab.LossError, match="total weight of step 1 is zero"):
        run([torch.full((1,), 7) for _ in range(4)])


@pytest.mark.parametrize("wrong", [WORDS, -3])
def test_a_tokenizer_with_more_words_than_the_embedding(wrong):
    texts = [torch.full((6,), 7) for _ in range(4)]
    for text in texts:
        text[2] = wrong
    said = rf"the embedding '0' has 50 rows, 0 to 49, and was given {wrong} at \[0, 2\] of a micro-"
    with pytest.raises(ab.DataError, match=said):
        run(texts, num_embeddings=WORDS)


def test_another_index_error_is_the_users_own():
    def loss(model, batch):
        return model(batch).sum() + [][3]

    task = ab.Task(
        model=nn.Linear(2, 1),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=[torch.zeros(2)] * 4,
        global_batch=4,
        steps=1,
    )
    with pytest.raises(IndexError, match="list index out of range"):
        ab.train(task, plan=plan_for(task, 2))


def test_the_sample_of_a_wrong_id_is_named():
    texts = [torch.full((6,), 7) for _ in range(4)]
    texts[2][3] = WORDS
    with pytest.raises(ab.DataError, match=r"Row \d of micro-batch \d is sample 2 \(epoch 0\)\.$"):
        run(texts)
