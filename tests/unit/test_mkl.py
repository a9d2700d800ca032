"""What MKL keeps is found by asking it, and given back."""

from __future__ import annotations

import pytest
import torch

from anybatch import mkl


@pytest.fixture(autouse=True)
def asked_anew():
    mkl.packed_depth.cache_clear()
    yield
    mkl.packed_depth.cache_clear()


def test_the_same_depth_is_found_on_any_number_of_threads():
    before = torch.get_num_threads()
    found = set()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        mkl.packed_depth.cache_clear()
        found.add(mkl.packed_depth())
    torch.set_num_threads(before)
    assert len(found) == 1
    assert found <= {192, 384}


def test_nothing_of_the_product_that_was_asked_with_is_left():
    mkl.free_product_buffers()
    if (before := mkl.product_buffer_bytes()) is None:
        pytest.skip("this torch is built without MKL")
    mkl.packed_depth()
    after = mkl.product_buffer_bytes()
    assert after is not None
    assert after <= before


def test_a_torch_without_mkl_is_answered_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    mkl.free_product_buffers()
    assert mkl.packed_depth() == 192
