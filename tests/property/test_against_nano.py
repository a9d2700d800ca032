"""Random tasks give what the executable specification in `examples/nano_anybatch.py` gives."""

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.property.nano_cases import (
    OPTIMIZERS,
    Case,
    assert_alike,
    by_nano,
    by_session,
    by_step,
)

cases = st.builds(
    Case,
    kind=st.sampled_from(["mlp", "conv", "conv and norm", "tokens"]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
    global_batch=st.integers(1, 64),
    num_full=st.integers(1, 3),
    rest=st.integers(0, 63),
    epochs=st.integers(1, 2),
    num_passes=st.integers(1, 7),
    clip_norm=st.sampled_from([None, 0.1, 1.0]),
    dropout=st.sampled_from([0.0, 0.0, 0.5]),
    is_frozen=st.booleans(),
    ghost_batch=st.integers(2, 8),
    failing=st.lists(st.integers(1, 20), max_size=2, unique=True).map(tuple),
    seed=st.integers(0, 2**31),
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_session(case):
    ours = by_session(case, case.failures)
    theirs = by_nano(case, () if case.ghosts else case.failures)
    assert_alike(ours, theirs, case.dtype)


@pytest.mark.slow
@settings(max_examples=50)
@given(case=cases)
def test_sessions_train_as_nano_does(case):
    check_session(case)


@pytest.mark.nightly
@settings(max_examples=400)
@given(case=cases)
def test_many_sessions_train_as_nano_does(case):
    check_session(case)


@settings(max_examples=50)
@given(case=cases)
def test_steps_around_a_loop_train_as_nano_does(case):
    plain = dataclasses.replace(case, dropout=0.0)  # a loop draws from its own generators
    assert_alike(by_step(plain), by_nano(plain), case.dtype)
