"""Rules of the global batch: what they say, how they are written, what is refused."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import anybatch as ab
from anybatch.batch_rule import (
    as_text,
    in_words,
    largest_target,
    parse_batch_rule,
    rate_factor,
    read_rule,
    target_at,
)
from anybatch.data import permutation
from anybatch.errors import InputError
from anybatch.events import StepDone

X = torch.arange(64.0).reshape(64, 1) / 64


def task(batch, **changes):
    fields = {
        "model": lambda: nn.Linear(1, 1),
        "loss": lambda model, batch: (model(batch[0]) ** 2).mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "train": TensorDataset(X),
        "epochs": 1,
    }
    return ab.Task(global_batch=batch, **{**fields, **changes})


@pytest.mark.parametrize(
    ("text", "rule", "again"),
    [
        ("4096", 4096, "4096"),
        ("4K", 4096, "4096"),
        ("512Ktokens", ab.Tokens(524_288), "524288tokens"),
        ("0.5M tokens", ab.Tokens(524_288), "524288tokens"),
        ("100 tok", ab.Tokens(100), "100tokens"),
        ("64:4096:0.3", ab.Ramp(64, 4096, 0.3), "64:4096:0.3"),
        ("64 : 4K : 1 : sqrt", ab.Ramp(64, 4096, 1.0, "sqrt"), "64:4096:1.0:sqrt"),
        (
            "64Ktokens:512Ktokens:0.3:linear",
            ab.Ramp(ab.Tokens(65_536), ab.Tokens(524_288), 0.3, "linear"),
            "65536tokens:524288tokens:0.3:linear",
        ),
    ],
)
def test_a_rule_is_written_and_read(text, rule, again):
    assert parse_batch_rule(text) == rule
    assert as_text(rule) == again
    assert read_rule(again) == rule


def test_a_shape_is_told_apart_but_not_read_back():
    stages = ab.Ramp(8, 64, 0.5, shape=lambda done: int(4 * done) / 4)
    squared = ab.Ramp(8, 64, 0.5, shape=lambda done: done**2)
    assert len({as_text(ramp) for ramp in (stages, squared, ab.Ramp(8, 64, 0.5))}) == 3
    assert read_rule(as_text(stages)) == ab.Ramp(8, 64, 0.5)
    assert [target_at(stages, done) for done in (0, 0.1, 0.25, 0.49, 0.5, 1)] == [
        8,
        8,
        36,
        50,
        64,
        64,
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("many", "'many'"),
        ("1.5", "whole number"),
        ("0tokens", "whole number"),
        ("64:4096", "three parts"),
        ("64:4096:soon", "'soon' is no number"),
        ("64:4096:1.5", "above 0 and at most 1"),
        ("64:4096:0.5:cubic", "'linear', 'sqrt' or None"),
        ("64:512tokens:0.5", "two numbers of samples"),
    ],
)
def test_what_is_no_rule_is_refused(text, says):
    with pytest.raises(ab.InputError, match=r"--global-batch") as caught:
        parse_batch_rule(text, "--global-batch")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ab.Tokens(0),
        lambda: ab.Tokens(True),
        lambda: ab.Ramp(0, 4, 0.5),
        lambda: ab.Ramp(2, 4, 0.0),
        lambda: ab.Ramp(2, 4, 0.5, shape=3),
        lambda: ab.Ramp(ab.Tokens(4, of=[1]), ab.Tokens(8, of=[2]), 0.5),
        lambda: target_at(ab.Ramp(2, 4, 0.5, shape=lambda done: math.nan), 0.1),
    ],
)
def test_what_cannot_be_a_batch_is_refused(make):
    with pytest.raises(ab.InputError):
        make()


class Stream(IterableDataset):
    """Samples without an index."""

    def __iter__(self):
        return iter([(x,) for x in X])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: task(ab.Tokens(8)), "no lengths are given"),
        (lambda: task(ab.Tokens(8, of=[1] * 64), train=Stream()), "before they are read"),
        (lambda: task(ab.Tokens(8, of=[1] * 64), last="drop"), "use 'keep' or 'wrap'"),
        (lambda: task(ab.Ramp(2, 4, 0.5), last="drop"), "use 'keep' or 'wrap'"),
        (
            lambda: task(
                ab.Ramp(2, 4, 0.5, "linear"),
                scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
                scheduler_interval="step",
            ),
            "give schedule instead of scheduler",
        ),
        (lambda: ab.plan(task(ab.Ramp(2, 4, 0.5), train=Stream())), "steps=... or samples=..."),
        (lambda: ab.plan(task(ab.Tokens(8, of=[1] * 3))), "3 lengths for 64 training samples"),
    ],
)
def test_a_task_that_cannot_have_the_batch_says_why(make, says):
    with pytest.raises(ab.InputError) as caught:
        make()
    assert says in str(caught.value)


def test_the_rate_follows_by_the_rule_that_is_asked_for():
    at = [0.0, 0.25, 0.5, 1.0]
    linear, root = (ab.Ramp(10, 40, 0.5, rule) for rule in ("linear", "sqrt"))
    assert [rate_factor(linear, done) for done in at] == [0.25, 0.625, 1, 1]
    assert [rate_factor(root, done) for done in at] == pytest.approx([0.5, 0.625**0.5, 1, 1])
    assert [rate_factor(ab.Ramp(10, 40, 0.5), done) for done in at] == [1, 1, 1, 1]
    assert largest_target(ab.Ramp(40, 10, 0.5)) == 40


def test_a_plan_is_for_the_largest_step_and_says_how_smaller_ones_run():
    plan = ab.plan(task(ab.Ramp(4, 48, 0.5)), micro_batch=16, rehearsal=False)
    assert plan.task.global_batch == 48
    assert plan.task.batch_rule == "4:48:0.5"
    assert [plan.passes_for(n) for n in (4, 16, 17, 48)] == [1, 1, 2, 3]
    told = dict(plan.explain())
    assert told["smaller steps"].endswith("1 at 4 samples, 3 at 48")
    assert told["global batch"].startswith(in_words(ab.Ramp(4, 48, 0.5)))
    assert ab.Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ab.InputError, match=r"batch_rule is '4:48:0.5' in the plan and ''"):
        ab.train(task(48), plan=plan, progress=False)
    edited = plan.to_json().replace("4:48:0.5", "4:48")
    with pytest.raises(ab.InputError, match="three parts"):
        ab.Plan.from_json(edited)


class Asked(TensorDataset):
    """Remembers how many samples were asked for at a time."""

    sizes: ClassVar[list[int]] = []

    def __getitems__(self, indices):
        self.sizes.append(len(indices))
        return [self[i] for i in indices]


def test_a_rehearsal_runs_passes_of_the_largest_step():
    growing = task(ab.Ramp(2, 32, 0.5), train=Asked(X), epochs=20)
    plan = ab.plan(growing, rehearsal=False, micro_batch=32)
    Asked.sizes.clear()
    with ab.Session(growing, plan) as session:
        session.rehearsed(is_fixed=True)
        assert max(Asked.sizes) == 32
        Asked.sizes.clear()
        next(session.steps())
        assert Asked.sizes == [2]


def test_a_stream_has_the_steps_of_a_ramp():
    sizes = {}
    for name, data in (("stream", Stream()), ("table", TensorDataset(X))):
        one = task(ab.Ramp(2, 9, 0.6), train=data, epochs=None, samples=150, shuffle=False)
        result = ab.train(one, progress=False)
        sizes[name] = result.ended.steps, result.ended.samples_seen
    assert sizes["stream"] == sizes["table"]
    assert sizes["stream"][1] == 150


def test_steps_count_their_tokens():
    lengths = [3, 1, 4, 1, 5, 9, 2, 6] * 8
    done: list[StepDone] = []

    ab.train(
        task(ab.Tokens(10, of=lengths), last="wrap"),
        micro_batch=4,
        progress=False,
        sinks=[lambda event: done.append(event) if isinstance(event, StepDone) else None],
    )

    order = permutation(0, 0, len(lengths)).tolist()
    taken = [sum(lengths[i] for i in order[: one.samples_seen]) for one in done]
    assert [one.tokens_seen for one in done] == taken
    assert taken[-1] == sum(lengths)


def test_a_function_needs_its_largest_batch():
    with pytest.raises(InputError, match=r"global_batch is a function; give Ramp\(start, stop"):
        task(lambda done: int(64 * done) + 1)
