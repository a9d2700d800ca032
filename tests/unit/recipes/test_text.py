"""The text recipe as a task: what it is made of, that it is exact, and what it refuses."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Subset, default_collate

import anybatch as ab
from anybatch.errors import InputError
from anybatch.events import Said
from anybatch.recipes.text import (
    TokenScore,
    accuracy,
    decay_groups,
    generated,
    loss,
    perplexity,
    report,
    text,
)
from anybatch.report.folder import unfinished_step

SMALL = {"context": 16, "width": 16, "depth": 2, "heads": 2, "lr": 1e-2}


@pytest.fixture
def data(tmp_path):
    """A file of 4,000 bytes: 235 windows of 16 tokens to train on, the last one not full."""
    path = tmp_path / "words.txt"
    path.write_bytes(("".join(f"žába {i:03}.\n" for i in range(400)) * 2).encode()[:4000])
    return path


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch):
    monkeypatch.setattr("anybatch.recipes.text.TOKENS_TOLD", 20)


@pytest.fixture
def task(data):
    return text(data=data, **SMALL)


def test_the_loss_is_a_sum_over_tokens_with_the_bytes_beside_it(task):
    model = task.build_model().double()
    samples = [task.train[i] for i in range(-5, 0)]
    whole = loss(model, default_collate(samples))
    parts = [loss(model, default_collate(some)) for some in (samples[:1], samples[1:])]
    targets = torch.stack([tokens[1:] for tokens, _ in samples])
    assert (targets == -100).any()
    assert whole.weight == (targets != -100).sum() == sum(part.weight for part in parts)
    torch.testing.assert_close(whole.sum, parts[0].sum + parts[1].sum)
    bits, num_bytes = whole.metrics["bits_per_byte"]
    torch.testing.assert_close(bits, whole.sum.detach() / math.log(2))
    assert num_bytes == whole.weight - 1  # the end of the text is a token and no byte


def test_one_piece_and_many_give_the_same_step(task):
    def step(micro_batch):
        with ab.Session(exact, ab.plan(exact, micro_batch=micro_batch)) as session:
            done = next(session.steps())
            return done, [p.detach().clone() for p in session.model.parameters()]

    last = Subset(task.train, range(len(task.train) - 20, len(task.train)))
    exact = replace(
        task, model=lambda: task.model().double(), train=last, global_batch=20, valid=None
    )
    (whole, at_once), (cut, in_pieces) = step(20), step(7)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-12)
    assert cut.metrics == pytest.approx(whole.metrics, rel=1e-12)
    assert whole.weight == 20 * 16 - (1 - task.train.num_tokens) % 16 < 320  # the last is not full
    for a, b in zip(at_once, in_pieces, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_held_out_figures_are_those_of_a_plain_computation(task):
    one = replace(task, steps=1, epochs=None)
    with ab.Session(one, ab.plan(one, micro_batch=5)) as session:
        found = session.evaluate()
        model = session.model.eval()
        nats = right = 0
        with torch.no_grad():
            for tokens, _ in (task.valid[i] for i in range(len(task.valid))):
                known = tokens[tokens >= 0].long()
                inputs, targets = known[None, :-1], known[1:]
                logits = model.head(model.norm(model.blocks(model.embedding(inputs))))[0]
                nats += float(F.cross_entropy(logits, targets, reduction="sum"))
                right += int((logits.argmax(-1) == targets).sum())
    num_tokens = task.valid.num_tokens - 1
    assert found.loss == pytest.approx(nats / num_tokens, rel=1e-5)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(nats / num_tokens), rel=1e-5)
    assert found.metrics["accuracy"] == pytest.approx(right / num_tokens)
    num_bytes = num_tokens - 1
    bits = nats / math.log(2) / num_bytes
    assert found.metrics["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_a_score_over_ranks_is_that_of_all_tokens():
    batches = [(10.0, 4, 1), (3.0, 5, 2), (7.0, 1, 0)]
    one, others = TokenScore(perplexity), [TokenScore(perplexity) for _ in range(2)]
    for score, batch in zip([one, *others], batches, strict=True):
        score.update(*map(torch.tensor, batch))
    one.merge_state(others)
    assert one.compute() == pytest.approx(math.exp(2.0))
    one.reset()
    assert math.isnan(one.compute())
    assert perplexity(1e9, 1.0, 0.0) == math.inf
    assert accuracy(0.0, 4.0, 1.0) == 0.25


@pytest.mark.slow
def test_it_learns_and_tells_in_the_end(data, tmp_path):
    said = []
    task = text(data=data, steps=40, global_batch=8, prompt="00", **{**SMALL, "lr": 0.06})
    result = ab.train(task, out=tmp_path / "run", sinks=[said.append])
    assert result.metrics["bits_per_byte"] < 5  # 8 at the start
    (event,) = [event for event in said if isinstance(event, Said)]
    assert f"of {data}; held out: the last " in event.text
    assert event.text == task.tell(result.model)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "What the model writes after" in page
    assert 'kind": "said' in (tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1]
    assert unfinished_step(tmp_path / "run") is None


def test_text_is_drawn_the_same_for_a_seed(task):
    model = task.build_model().eval()
    drawn = [list(generated(model, [97, 98], 256, 16, seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) <= 20


def test_text_ends_with_the_end(task):
    model = task.build_model().eval()
    with torch.no_grad():
        model.norm.weight.zero_()  # all tokens are equally likely
    endless = list(generated(model, [97], 999, 16, seed=0))
    assert len(endless) == 20
    assert list(generated(model, [97], endless[7], 16, seed=0)) == endless[:7]


def test_what_is_told_has_no_control_characters(task):
    model = task.build_model().eval()
    shown = report(model, 16, "a\x1b[2J", 0, "x")
    assert "\x1b" not in shown
    assert "a\N{REPLACEMENT CHARACTER}[2J" in shown
    assert report(model, 16, "", 0, "x")


def test_weight_decay_is_on_the_matrices_of_the_blocks(data):
    for tied in (True, False):
        model = text(data=data, tied=tied, **SMALL).build_model()
        decayed, rest = decay_groups(model, weight_decay=0.1)
        assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
        assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))
        assert all(p.ndim == 2 for p in decayed["params"])
        assert any(p is model.embedding.weight for p in rest["params"])


def test_options_reach_the_task(data):
    task = text(data=data, global_batch=64, epochs=3, seed=5, **SMALL)
    assert (task.global_batch, task.epochs, task.steps, task.seed) == (64, 3, None, 5)
    assert task.evaluate_every == 3  # four times in 3 epochs of 4 steps each
    task = text(data=data, steps=100, limit="2kB", **SMALL)
    assert (task.epochs, task.steps, task.train.num_tokens) == (None, 100, 1885)


def test_the_task_can_be_sent_to_another_process(task):
    sent = pickle.loads(pickle.dumps(task))
    assert torch.equal(sent.train[3][0], task.train[3][0])
    assert sent.tell(sent.build_model().eval()) == task.tell(task.build_model().eval())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": 0}, "context is 0"),
        ({"width": -1}, "width is -1"),
        ({"depth": 0}, "depth is 0"),
        ({"heads": 0}, "heads is 0"),
        ({"width": 50, "heads": 4}, "width is 50 and heads 4; give a width that the heads divide"),
        ({"width": 12, "heads": 4}, "12 and heads 4, 3 features each; .*even number"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"limit": "much"}, "limit is 'much', which is not a size"),
        ({"limit": "150"}, "the text that is held out has 7 tokens, too few for one window of 16"),
        ({"limit": "9"}, "the text to train on has 10 tokens, too few"),
        ({"global_batch": 0}, "global_batch is 0; give a whole number of at least 1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"steps": -3}, "steps is -3"),
    ],
)
def test_options_out_of_range_are_refused(data, options, said):
    with pytest.raises(InputError, match=said):
        text(data=data, **{**SMALL, **options})


def test_every_option_out_of_range_is_named_at_once(data):
    with pytest.raises(InputError, match=r"context is 0.*lr is -1.*dropout is 2.*heads is 0"):
        text(data=data, context=0, lr=-1, dropout=2, heads=0)
