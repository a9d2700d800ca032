"""Scripts as people write them train the same with `Step` in them, in one piece and cut."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.equivalence.ported import SCRIPTS, changed_lines, language_model, parameters_of

scripts = pytest.mark.parametrize("script", SCRIPTS.values(), ids=list(SCRIPTS))


@pytest.fixture(autouse=True)
def nothing_is_warned_of(one_thread: None) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.fixture
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def trained(script: ModuleType, cuttable: bool, **options: Any) -> torch.Tensor:
    """The parameters after ten steps; without options those of the script's own loop."""
    torch.manual_seed(0)
    work = script.make(cuttable)
    if options:
        script.by_step(work, verbose=False, **options)
    else:
        script.by_hand(work)
    return parameters_of(work)


@scripts
def test_in_one_piece_it_is_the_script_s_own_loop(script: ModuleType):
    own = trained(script, cuttable=False)
    # GPT's own loop is cut: in float32 AdamW makes much of how gradients that are nearly 0 are rounded.
    options = {"micro_batch": 4} if script is language_model else {"memory": "1GiB"}
    found = trained(script, cuttable=False, **options)
    assert float((found - own).abs().max()) <= 1e-6


@scripts
@pytest.mark.parametrize("micro_batch", [1, 5])
def test_when_cut_it_is_the_same_too(script: ModuleType, micro_batch: int, double: None):
    own = trained(script, cuttable=True)
    found = trained(script, cuttable=True, micro_batch=micro_batch)
    assert float((found - own).abs().max()) <= 1e-10


@scripts
def test_few_lines_change(script: ModuleType):
    gone, come = changed_lines(script)
    assert gone + come <= 30
