"""The decoder: it looks back and never ahead, and its loss is that of its logits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.recipes import text_model
from anybatch.recipes.text_model import Decoder, Shape, rotary, rotated

SHAPE = Shape(vocabulary=31, context=12, width=24, depth=3, heads=2)


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SHAPE).double().eval()
    for parameter in model.parameters():  # far from the first weights, where all looks alike
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(31, (5, 13), generator=torch.Generator().manual_seed(1))


def test_no_place_looks_ahead(model, tokens):
    whole = model.norm(model.blocks(model.embedding(tokens[:, :12])))
    for length in (1, 5, 11):
        part = model.norm(model.blocks(model.embedding(tokens[:, :length])))
        torch.testing.assert_close(part, whole[:, :length])
    changed = tokens[:, :12].clone()
    changed[:, 0] = (changed[:, 0] + 1) % 31
    assert not torch.allclose(model(changed), model(tokens[:, :12]))


def test_without_targets_it_gives_the_logits_of_what_follows(model, tokens):
    logits = model.head(model.norm(model.blocks(model.embedding(tokens[:, :7]))))
    torch.testing.assert_close(model(tokens[:, :7]), logits[:, -1])


@pytest.mark.parametrize("at_once", [31, 100, 1 << 20])
def test_the_loss_is_that_of_its_logits(model, tokens, at_once, monkeypatch):
    monkeypatch.setattr(text_model, "_LOGITS_AT_ONCE", at_once)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[2, 3:] = -100
    logits = model.head(model.norm(model.blocks(model.embedding(inputs))))
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    nats, counted, right = model(inputs, targets, with_right=True)
    torch.testing.assert_close(nats, plain)
    assert counted == 5 * 12 - 9
    assert right == (logits.argmax(-1) == targets).sum()
    assert len(model(inputs, targets)) == 2


def test_positions_are_turns_that_only_differences_show():
    turns = rotary(20, 8).double()
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 20, 8)
    scores = rotated(q, turns)[0, 0] @ rotated(k, turns)[0, 0].T
    for apart in (-4, 0, 7):
        along = scores.diagonal(apart)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotated(q, turns).norm(dim=-1), q.norm(dim=-1), rtol=1e-5, atol=0)
    torch.testing.assert_close(rotated(q, turns)[..., :1, :], q[..., :1, :])


def test_the_first_weights_are_narrower_where_branches_end():
    model = Decoder(Shape(vocabulary=999, context=4, width=128, depth=8, heads=2, tied=False))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            std = 0.02 / math.sqrt(16) if "out.weight" in name else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
        else:
            assert (parameter == 1).all()


def test_the_head_is_the_embedding_if_asked_for():
    tied, untied = Decoder(SHAPE), Decoder(SHAPE._replace(tied=False))
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    difference = sum(p.numel() for p in untied.parameters()) - sum(
        p.numel() for p in tied.parameters()
    )
    assert difference == 31 * 24


def test_dropout_is_in_training_alone(tokens):
    model = Decoder(SHAPE._replace(dropout=0.5))
    assert torch.equal(model.eval()(tokens[:, :12]), model(tokens[:, :12]))
    assert not torch.equal(model.train()(tokens[:, :12]), model(tokens[:, :12]))
