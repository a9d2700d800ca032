"""What may be asked of the exchange between ranks: named in the plan, and never contradictory."""

from __future__ import annotations

import pytest

import anybatch as ab
from anybatch.plans import Choice, Exchange, Outer, Plan, TaskIdentity

CHOICE = Choice(micro_batch=4, evaluation_batch=4)

NORMED = TaskIdentity(
    name="t", global_batch=16, parameters=9, trainable_parameters=9, ghost_batch=4
)


def plan(exchange=None, **changes):
    fields = {
        "task": TaskIdentity(name="t", global_batch=16, parameters=9, trainable_parameters=9),
        "parallel": "replicate",
        "shares": (1.0, 1.0),
        "device": "cpu",
        "choice": CHOICE,
        "exchange": exchange or Exchange(),
    }
    return Plan(**{**fields, **changes})


def precision(name):
    return CHOICE.model_copy(update={"precision": name})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Exchange(every=4, stale=True), "ask for one of the two"),
        (lambda: Exchange(outer=Outer()), "every is 1"),
        (lambda: Exchange(every=0), "greater than or equal to 1"),
        (lambda: Exchange(compress="int8"), "'bf16' or 'fp16'"),
        (lambda: Outer(lr=0.0), "greater than 0"),
        (lambda: Outer(momentum=1.0), "less than 1"),
        (
            lambda: plan(Exchange(stale=True), parallel="single", shares=(1.0,)),
            "parallel is 'single' and norms 'ghosts': make them 'replicate'",
        ),
        (lambda: plan(Exchange(every=2), parallel="shard"), "parallel is 'shard'"),
        (lambda: Exchange(compress="powersgd"), "choose 'bf16' or 'fp16'"),
        (lambda: plan(parallel="ddp"), "choose 'replicate'"),
        (lambda: plan(parallel="in-process"), "choose 'replicate'"),
        (lambda: plan(Exchange(stale=True), choice=precision("fp16")), "take bf16"),
        (lambda: plan(Exchange(every=2), choice=precision("fp16-weights")), "float32 weights"),
        (lambda: plan(Exchange(every=2), balance="measured"), "make balance 'fixed'"),
        (
            lambda: plan(Exchange(stale=True), norms="synchronised", task=NORMED),
            "norms 'synchronised'",
        ),
        (lambda: plan(Exchange(every=2), shares=(0.0, 1.0)), "leaves a rank without samples"),
        (lambda: plan(Exchange(every=2), shares=(1.0,) * 17), "a global batch of 16"),
    ],
)
def test_contradictions_are_told_in_a_sentence(make, words):
    with pytest.raises(ValueError, match="(?s)" + words.replace("(", r"\(")):
        make()


def test_a_plan_file_with_a_contradiction_names_it():
    text = plan().to_json().replace('"stale": false', '"stale": true')
    text = text.replace('"parallel": "replicate"', '"parallel": "shard"')
    with pytest.raises(ab.InputError, match="gradients applied one step late"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        (Exchange(compress="bf16"), "gradients sent in bf16"),
        (Exchange(every=8), "local steps, weights averaged every 8 steps"),
        (
            Exchange(every=8, outer=Outer(), compress="fp16"),
            (
                "local steps, weights moved by an outer optimizer (lr 0.7, Nesterov momentum 0.9)"
                " every 8 steps; movements sent in fp16"
            ),
        ),
        (Exchange(stale=True), "gradients applied one step late"),
    ],
)
def test_what_is_not_exact_is_named(exchange, words):
    assert not exchange.is_exact
    assert exchange.describe() == words
    assert ("exchange", f"not exact: {words}") in plan(exchange).explain()
    (notice,) = exchange.notices()
    assert words in notice
    assert ("rank 0's share" in notice) == (exchange.every > 1)


def test_what_is_exact_needs_no_words():
    assert Exchange().is_exact
    assert Exchange().notices() == ()
    assert "exchange" not in dict(plan().explain())


def test_it_is_part_of_the_plan_file():
    given = plan(Exchange(every=8, outer=Outer(lr=0.5), compress="bf16"))
    assert Plan.from_json(given.to_json()) == given
