"""What is said of a batch, and of a noise scale that is not there."""

import math

import numpy as np
import pytest
from tests.unit.report.fake_run import make_plan

from anybatch.insight.noise import latest
from anybatch.insight.noise_series import Series, block_of
from anybatch.insight.noise_text import lines, samples_of, steps_of, unmeasured
from anybatch.plans import Choice, Exchange


def measured(steps=200, scale=1000.0, size=4096, part=512, spread=1e-4, tokens_per_sample=0.0):
    """Blocks of steps whose gradients have this noise scale, scattered a little."""
    rng, series = np.random.default_rng(0), Series()
    for step in range(1, steps + 1):
        one, other = (1 + spread * rng.standard_normal(2)).clip(0.1)
        whole = math.sqrt(one * (1 + scale / size))
        small = math.sqrt(other * (1 + scale / part))
        series.add(block_of(step, size, size, whole, part, small, tokens_per_sample))
    return series.blocks


def told(plan=None, **knobs):
    return dict(lines(plan or make_plan(), measured(**knobs)))


def test_nothing_is_told_where_nothing_was_measured():
    assert lines(make_plan(), ()) == []


def test_the_scale_with_its_interval_and_what_the_batch_costs():
    found = told()
    assert found["noise scale"].startswith("1,000 samples (")
    assert found["noise scale"].endswith("over steps 101 to 200")
    assert found["batch of 4,096"] == "1.24x the minimum of steps, 5.1x the minimum of samples"
    assert found["half of it"] == "+20% steps, -40% samples for the same progress"
    assert found["twice as much"] == "-10% steps, +80% samples for the same progress"
    assert "SGD" in found["assuming"]


def test_where_the_batch_is_in_tokens_the_scale_is_too():
    plan = make_plan()
    plan = plan.model_copy(
        update={"task": plan.task.model_copy(update={"batch_rule": "81920tokens"})}
    )
    found = told(plan, tokens_per_sample=20.0)
    assert found["noise scale"].startswith("20,000 tokens (")
    assert found["batch of 81,920"] == "1.24x the minimum of steps, 5.1x the minimum of tokens"
    assert found["twice as much"] == "-10% steps, +80% tokens for the same progress"
    scale = latest(measured(tokens_per_sample=20.0))
    assert scale.tokens == pytest.approx(20 * scale.samples)
    assert latest(measured()).tokens is None


def test_a_batch_far_above_the_scale_saves_no_steps():
    assert told(scale=100.0)["batch of 4,096"].endswith("a larger one would hardly save a step")


def test_a_batch_far_below_it_is_cheap_to_enlarge():
    found = told(scale=100_000.0)["batch of 4,096"]
    assert found.endswith("a larger one would save steps at hardly any cost in samples")


def test_without_noise_work_is_in_proportion_to_the_batch():
    steps = [block_of(step, 4096, 4096, 1.0, 512, 1.0) for step in range(1, 31)]
    found = dict(lines(make_plan(), steps))
    assert found["noise scale"].startswith("0 samples (0 to 0)")
    assert found["batch of 4,096"] == "the minimum of steps: a larger one would not save any"
    assert found["half of it"] == "+0% steps, -50% samples for the same progress"
    assert found["twice as much"] == "+0% steps, +100% samples for the same progress"


def test_a_gradient_that_noise_hides_gives_a_lower_end_alone():
    found = told(scale=1e6, spread=0.5)
    assert found["noise scale"].startswith("at least ")
    assert found["batch of 4,096"].startswith("at least ")
    assert "twice as much" not in found


def plan_of(micro_batch=4096, ranks=1, **changes):
    plan = make_plan()
    choice = Choice(micro_batch=micro_batch, evaluation_batch=1)
    several = {"shares": (1.0,) * ranks, "parallel": "replicate"} if ranks > 1 else {}
    return plan.model_copy(update={"choice": choice, **several, **changes})


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_of(), "with micro_batch=2048 it is"),
        (plan_of(64, ranks=2, parallel="shard"), 'with parallel="replicate"'),
        (plan_of(64, ranks=2, exchange=Exchange(every=2)), "local steps"),
        (plan_of(64, ranks=2, exchange=Exchange(stale=True)), "stale gradients"),
        (plan_of(64, ranks=2, norms="synchronised"), "a smaller ghost batch"),
        (
            plan_of(64, task=make_plan().task.model_copy(update={"longest": 9, "grain": 8})),
            "in order of the length of its samples",
        ),
        (plan_of(64), "it takes 10 steps at the least, and there were 7"),
        (plan_of(2048, ranks=2), "it takes 10 steps at the least"),
    ],
)
def test_why_there_is_none_and_how_to_get_it(plan, words):
    sentence = unmeasured(plan, 7)
    assert words in sentence
    assert sentence.count(". ") == 0
    assert sentence.endswith(".")


def test_at_the_noise_scale_both_are_twice_their_least():
    assert (steps_of(100, 100), samples_of(100, 100)) == (2, 2)


@pytest.mark.parametrize("size", [1, 10, 1000, 1e6])
def test_steps_and_samples_lie_on_the_hyperbola(size):
    assert (steps_of(size, 300) - 1) * (samples_of(size, 300) - 1) == pytest.approx(1)


def test_samples_are_steps_times_the_batch():
    of_one, of_other = 32 * steps_of(32, 300), 256 * steps_of(256, 300)
    assert of_other / of_one == pytest.approx(samples_of(256, 300) / samples_of(32, 300))


def test_without_noise_samples_have_no_least():
    assert (steps_of(64, 0), samples_of(64, 0)) == (1, math.inf)
