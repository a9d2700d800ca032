"""Every event has a sentence, and figures keep a steady width."""

from __future__ import annotations

import math

import pytest
from tests.unit.report.fake_run import make_events, make_out_of_memory, make_step

from anybatch.events import Resumed, Stalled, Starved, Straggler
from anybatch.report import describe
from anybatch.report.sentences import format_number


def test_every_event_is_one_sentence():
    for event in make_events(60):
        sentence = describe(event)
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert "\n" not in sentence


def test_memory_that_ran_out_in_evaluation_is_no_matter_of_the_step():
    event = make_out_of_memory(40, phase="evaluation", micro_batch=1024, requested_bytes=None)
    assert describe(event) == (
        "Out of memory in the evaluation after step 40 (1,024 samples at a time): 9.10 GiB of"
        " 10.0 GiB in use; it starts again."
    )


def test_other_ranks_are_named():
    event = make_out_of_memory(1, rank=3, budget_bytes=None)
    assert describe(event).startswith(
        "Out of memory in step 1 on rank 3 (backward, micro-batch 512)"
    )
    assert "in use;" in describe(event)


def test_who_slows_the_others_down_is_told():
    slow = Straggler(time=0.0, step=120, rank=3, seconds=2.4, others=1.2)
    assert describe(slow) == (
        "Rank 3 is repeatedly slow: 2.4 s for its part of step 120, where the others take 1.2 s."
    )


@pytest.mark.parametrize(
    ("step", "phase", "told"),
    [
        (7, "loading", "in step 7, loading"),
        (7, "update", "in step 7, update"),
        (7, "evaluation", "after step 7, evaluation"),
        (0, "set-up", "before the first step, set-up"),
        (0, "forward", "before the first step, forward"),
    ],
)
def test_what_stood_still_is_told_with_its_place(step, phase, told):
    stood = Stalled(time=0.0, step=step, seconds=400.0, phase=phase)
    assert describe(stood) == f"Training stalled for 6 min 40 s {told}, and has resumed."


def test_what_would_help_a_step_that_waits_is_told():
    def told(num_workers, wanted):
        return describe(
            Starved(
                time=0.0,
                step=6,
                step_seconds=1.02,
                data_seconds=0.99,
                num_workers=num_workers,
                wanted_workers=wanted,
            )
        )

    assert told(0, 4) == (
        "97% of a step is spent waiting for samples (990 ms of 1.0 s): num_workers=4 in the task would"
        " load them meanwhile."
    )
    assert "num_workers=8 instead of 2" in told(2, 8)
    assert "num_workers" not in told(8, None)


def test_checkpoints_that_are_passed_over_are_told_before_the_one_that_is_taken():
    faults = ("the checkpoint runs/a/step-9 is not intact: a byte.",)
    event = Resumed(time=0.0, step=8, samples_seen=80, folder="runs/a/step-8", passed_over=faults)
    assert describe(event) == (
        "The checkpoint runs/a/step-9 is not intact: a byte."
        " Resuming after step 8, from runs/a/step-8."
    )


def test_a_run_that_finds_nothing_to_go_on_from_says_so():
    event = Resumed(time=0.0, step=0, samples_seen=0, folder="runs/a/checkpoints")
    assert describe(event) == (
        "No checkpoint in runs/a/checkpoints yet: training starts from the beginning."
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.41, "0.4100"),
        (2.0, "2.000"),
        (123.456, "123.5"),
        (1234.56, "1235"),
        (98765.4, "98,765"),
        (0.0, "0.000"),
        (-0.5, "-0.5000"),
        (1.5e-7, "1.500e-07"),
        (3e12, "3.000e+12"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_four_digits(value: float, text: str):
    assert format_number(value) == text


def test_a_step_has_a_sentence_too():
    assert describe(make_step(1200, loss=0.5)) == "Step 1,200 is done: loss 0.5000."
