"""Scripts as people write them train the same with `Step` in them, in one piece and cut."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from tests.equivalence.ported import SCRIPTS, as_written, changed_lines, trained

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


@scripts
def test_in_one_piece_it_is_the_script_s_own_loop(script: ModuleType):
    own = trained(script, cuttable=False)
    found = trained(script, cuttable=False, **as_written(script))
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
