"""A leak shows in the memory that is in use after the steps."""

from __future__ import annotations

import random

import pytest

from anybatch.engine.growth import Growth, Leak
from anybatch.engine.sentences import nothing_leaner
from anybatch.oom import MemoryFailure
from anybatch.plans import Choice, Plan, TaskIdentity

MIB = 1 << 20


def leak_of(used: list[int]) -> Leak | None:
    growth = Growth()
    for step, num_bytes in enumerate(used, start=1):
        if growth.is_due():
            growth.add(step, num_bytes)
    return growth.leak()


def test_memory_that_grows_with_each_step_is_a_leak():
    found = leak_of([100 * MIB + step * MIB for step in range(1, 51)])
    assert found is not None
    assert found == Leak(1, 50, 101 * MIB, 150 * MIB)
    assert found.bytes_per_step == MIB


def test_over_a_long_run_it_is_seen_in_few_samples():
    found = leak_of([100 * MIB + step * 1000 for step in range(1, 100_001)])
    assert found is not None
    assert found.bytes_per_step == 1000
    assert found.since < 5_000
    assert found.until > 95_000


def test_it_is_told_since_when():
    used = [100 * MIB] * 30 + [100 * MIB + 2 * MIB * step for step in range(1, 31)]
    found = leak_of(used)
    assert found is not None
    assert 20 <= found.since <= 31
    assert found.bytes_per_step == pytest.approx(2 * MIB, rel=0.3)


def test_noise_does_not_hide_it():
    rng = random.Random(0)
    used = [100 * MIB + step * MIB + rng.randrange(MIB // 2) for step in range(60)]
    assert leak_of(used) is not None


@pytest.mark.parametrize(
    "used",
    [
        [],
        [100 * MIB, 200 * MIB, 300 * MIB],
        [100 * MIB] * 200,
        [100 * MIB + step for step in range(200)],  # next to nothing
        [100 * MIB] * 50 + [200 * MIB] * 50,  # once: a larger plan, or evaluations
        [(100 + step % 20) * MIB for step in range(400)],  # back and forth
        [300 * MIB - step * MIB for step in range(100)],
    ],
    ids=["none", "few", "flat", "little", "once", "waves", "falling"],
)
def test_what_does_not_grow_steadily_is_none(used: list[int]):
    assert leak_of(used) is None


def test_the_sentence_tells_how_much_and_since_when():
    choice = Choice(micro_batch=1, evaluation_batch=1, precision="fp32")
    identity = TaskIdentity(name="t", global_batch=8, parameters=1, trainable_parameters=1)
    plan = Plan(task=identity, device="cpu", budget_bytes=64 * MIB, enforced=True, choice=choice)
    failure = MemoryFailure("refused", None)
    told = nothing_leaner(plan, "forward", failure, Leak(10, 30, 10 * MIB, 50 * MIB))
    for words in ("2.00 MiB a step", "10.0 MiB after step 10", "50.0 MiB after step 30", ".item()"):
        assert words in told
    assert "too small" in nothing_leaner(plan, "forward", failure)
