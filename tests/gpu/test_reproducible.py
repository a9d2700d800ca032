"""On CUDA a reproducible run has the same bits twice, and whatever is recomputed."""

from __future__ import annotations

import pytest
import torch
from tests.equivalence.reproducible import digest, task_of

import anybatch as ab

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trained(recompute: str) -> str:
    """The digest of the weights after twelve steps."""
    task = task_of(steps=12)
    plan = ab.plan(task, memory="4GiB", parallel="single", recompute=recompute)
    with ab.Session(task, plan) as session:
        for _ in session.steps():
            pass
        return digest(session.model)


def test_twice_and_recomputed():
    first = trained("none")
    assert trained("none") == first
    assert trained("all") == first
