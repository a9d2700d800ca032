"""A loss in chunks trains as the plain loop does: in code that knows nothing of chunks, under any way
to recompute, on several ranks, and in models of transformers as they are."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.reference import assert_equal, plan_for, train, train_plainly
from torch import nn

import anybatch as ab
from anybatch.compute import chunked_loss
from anybatch.compute.chunked_loss import noting
from anybatch.plans import Recompute

KIND = {"dtype": torch.float64}
WORDS, WIDTH, LENGTH = 61, 8, 6


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Logits of any number are left out."""
    monkeypatch.setattr(chunked_loss, "PLAIN_LOGITS", 0)
    monkeypatch.setattr(chunked_loss, "_LEAST", chunked_loss.ContextVar("least", default=0))


class Language(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, **KIND)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH, **KIND), nn.Linear(WIDTH, WIDTH, **KIND), nn.GELU())
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied, **KIND)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids_bt):
        x_btd = self.embed(ids_bt)
        for block in self.blocks:
            x_btd = x_btd + block(x_btd)
        return self.head(x_btd)


def total(model, ids_bt):
    logits, targets = model(ids_bt[:, :-1]), ids_bt[:, 1:]
    value = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=3, reduction="sum"
    )
    return ab.Loss(value, (targets != 3).sum())


def task_of(tied=False, loss=total, **changes):
    generator = torch.Generator().manual_seed(1)
    return ab.Task(
        model=partial(Language, tied),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        train=list(torch.randint(WORDS, (26, LENGTH + 1), generator=generator)),
        global_batch=10,
        steps=6,
        clip_norm=1.0,
        **changes,
    )


WAYS = {
    "nothing": Recompute(),
    "blocks": Recompute(blocks=("blocks.*",)),
    "matmuls kept": Recompute(blocks=("blocks.*",), keep="matmuls"),
    "the whole model": Recompute(blocks=(".",)),
    "the whole model, matmuls kept": Recompute(blocks=(".",), keep="matmuls"),
    "host": Recompute(to_host=True),
    "nested": Recompute(blocks=("blocks.*",), nested=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("micro_batch", [3, 10])
def test_parameters_are_those_of_the_plain_loop(way, tied, micro_batch):
    task = task_of(tied)
    with noting() as computed:
        found = train(task, micro_batch, recompute=WAYS[way], chunked_head="head")
    assert computed == []
    assert_equal(found, train_plainly(task), 1e-9)


def test_what_looks_at_its_logits_trains_the_same():
    def looking(model, ids_bt):
        logits, targets = model(ids_bt[:, :-1]), ids_bt[:, 1:]
        value = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        hits = (logits.argmax(-1) == targets).sum()
        return ab.Loss((value * (targets % 3)).sum(), (targets % 3).sum(), {"hits": hits})

    task = task_of(loss=looking)
    with noting() as computed:
        found = train(task, 4, chunked_head="head")
    assert computed
    assert_equal(found, train_plainly(task), 1e-9)


def test_an_evaluation_is_that_of_the_whole_logits():
    task = dataclasses.replace(task_of(), valid=task_of().train)
    plans = [plan_for(task, 4, chunked_head=head) for head in ("", "head")]
    whole, cut = (ab.train(task, plan=plan, progress=False).loss for plan in plans)
    assert cut == pytest.approx(whole, rel=1e-9)


def as_rank(rank, size, tied):
    ranks = {"parallel": "replicate", "shares": (1.0,) * size}
    plan = plan_for(task_of(tied), 3, chunked_head="head", **ranks)
    with ab.Session(task_of(tied), plan) as session:
        list(session.steps())
        return [param.detach() for param in session.model.parameters()]


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_two_ranks_train_as_one(crew, tied):
    plain = train_plainly(task_of(tied))
    for found in crew(2, as_rank, tied):
        for one, other in zip(found, plain.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_transformers_are_trained_by_their_own_loss(name):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": WORDS, "num_hidden_layers": 2}
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=WORDS,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    else:
        config = transformers.LlamaConfig(
            **small, hidden_size=16, intermediate_size=24, num_attention_heads=2
        )

    def make():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config)  # its loss is in float32

    def loss(model, ids_bt):
        return ab.model_loss(model, {"input_ids": ids_bt, "labels": ids_bt})

    sgd = partial(torch.optim.SGD, lr=0.1)  # Adam makes much of a gradient that rounding makes
    task = dataclasses.replace(task_of(loss=loss), model=make, optimizer=sgd)
    with noting() as computed:
        found = train(task, 4, chunked_head="lm_head")
    assert computed == []
    assert_equal(found, train_plainly(task), 1e-4)
