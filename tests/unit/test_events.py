"""Events as lines of a log: what is written is read back."""

import dataclasses
import json
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from anybatch import events
from anybatch.events import Event, OutOfMemory, RunStarted, StepDone, from_json, to_json

NUMBERS = st.floats(allow_nan=False)
COUNTS = st.integers(0, 1 << 62)
TEXTS = st.text(max_size=6) | st.sampled_from(["nan", "inf", "-inf", "event"])
JSON = st.recursive(
    st.none() | st.booleans() | COUNTS | TEXTS | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
BY_TYPE = {
    "str": TEXTS,
    "int": COUNTS,
    "float": NUMBERS,
    "bool": st.booleans(),
    "int | None": st.none() | COUNTS,
    "float | None": st.none() | NUMBERS,
    "tuple[str, ...]": st.lists(TEXTS, max_size=3).map(tuple),
    "tuple[float, ...]": st.lists(NUMBERS, max_size=3).map(tuple),
    "tuple[float | None, ...]": st.lists(st.none() | NUMBERS, max_size=3).map(tuple),
    "tuple[int, ...]": st.lists(COUNTS, max_size=3).map(tuple),
    "Mapping[str, Any]": st.dictionaries(TEXTS, JSON, max_size=3),
    "Mapping[str, str]": st.dictionaries(TEXTS, TEXTS, max_size=3),
    "Mapping[str, int]": st.dictionaries(TEXTS, COUNTS, max_size=3),
    "Mapping[str, float]": st.dictionaries(TEXTS, NUMBERS, max_size=3),
}
KINDS = sorted(
    (c for c in vars(events).values() if isinstance(c, type) and issubclass(c, Event)),
    key=lambda c: c.kind,
)


def some(kind):
    return st.builds(kind, **{f.name: BY_TYPE[f.type] for f in dataclasses.fields(kind)})


@given(st.one_of([some(kind) for kind in KINDS if kind is not Event]))
def test_an_event_is_read_back_as_it_was_written(event):
    line = to_json(event)
    assert "\n" not in line
    assert from_json(line) == event
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def step(**more):
    return StepDone(
        **{
            "time": 1.0,
            "step": 1,
            "epoch": 0,
            "samples": 4,
            "samples_seen": 4,
            "loss": 0.5,
            "weight": 4.0,
            "learning_rate": 0.1,
            "grad_norm": None,
            "loss_scale": None,
            "seconds": 0.1,
            "memory_bytes": 10,
            "micro_batch": 2,
        }
        | more
    )


def test_numbers_that_json_cannot_hold():
    event = step(loss=math.inf, grad_norm=-math.inf, metrics={"a": math.nan, "b": math.inf})
    back = from_json(to_json(event))
    assert isinstance(back, StepDone)
    assert (back.loss, back.grad_norm, back.metrics["b"]) == (math.inf, -math.inf, math.inf)
    assert math.isnan(back.metrics["a"])
    assert json.loads(to_json(event))["loss"] == "inf"


def test_words_that_look_like_numbers_stay_words():
    event = OutOfMemory(
        time=1.0,
        step=0,
        rank=0,
        phase="nan",
        micro_batch=1,
        requested_bytes=None,
        in_use_bytes=0,
        budget_bytes=None,
        message="inf",
    )
    assert from_json(to_json(event)) == event


def test_a_plan_in_an_event_is_read_back_as_plain_data():
    plan = {"choice": {"recompute": {"blocks": ["a", "b"]}}, "ladder": []}
    event = RunStarted(
        time=1.0,
        task="t",
        device="cpu",
        num_samples=None,
        total_steps=3,
        plan=plan,
        versions={},
        notices=("a",),
    )
    back = from_json(to_json(event))
    assert isinstance(back, RunStarted)
    assert back.plan == plan
    assert back.notices == ("a",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "Expecting value"),
        ("[]", "not an event"),
        ("3", "not an event"),
        ("{}", "not an event"),
        ('{"kind": "party"}', "not an event"),
        ('{"kind": ["step"]}', "not an event"),
        ('{"kind": "event", "time": 1}', "not an event"),
        ('{"kind": "overflow", "time": 1.0}', "'overflow' cannot be read: step: Field required"),
        (to_json(step())[:-1] + ', "speed": 1}', "'step' cannot be read: speed: Unexpected"),
    ],
)
def test_a_line_that_is_no_event(line, message):
    with pytest.raises(ValueError, match=message):
        from_json(line)
