"""A larger budget made steps slower.

Symptom (0.2): a small Llama of 1,200 MiB in one piece took 1.05 times the plain loop's time under
`memory="800MiB"`, in micro-batches of one sample, and 1.7 times under 1,000 MiB, in one piece.
Mechanism: `Step` tries the batch in one piece first, and one piece that fitted only with freed memory
returned to the operating system was taken before anything that cuts was tried.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.alone import alone
from torch import Tensor, nn

import anybatch as ab
from anybatch.engine import Rehearsed
from anybatch.step.trials import Trials

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux only")

WHOLE = 32


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def stepped(norm: nn.Module) -> tuple[int, str, list[tuple[int, str]]]:
    """Passes of a step, what its plan does with freed memory, and the passes that were rehearsed, of
    which the whole batch fits only if freed memory is returned."""
    tried: list[tuple[int, str]] = []
    real = Trials._run

    def run(self: Trials, choice: Any, size: int, *a: Any, **options: Any):
        tried.append((size, choice.freed_memory))
        found = real(self, choice, size, *a, **options)
        assert isinstance(found, Rehearsed)
        if size == WHOLE and choice.freed_memory == "kept":
            return dataclasses.replace(found, peak_bytes=1 << 40)
        return found

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), norm, nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(WHOLE, 16), torch.randint(5, (WHOLE,))
    with (
        pytest.MonkeyPatch.context() as patch,
        ab.Step(model, optimizer, loss, memory="64MiB", verbose=False) as step,
    ):
        patch.setattr(Trials, "_run", run)
        done = step(batch)
        assert step.plan is not None
        return done.num_micro_batches, step.plan.choice.freed_memory, tried


@pytest.mark.nightly
@alone
def test_a_batch_is_cut_before_freed_memory_is_returned():
    passes, freed_memory, tried = stepped(nn.LayerNorm(64))
    assert passes > 1
    assert freed_memory == "kept"
    assert (WHOLE, "returned") not in tried


@pytest.mark.slow
@alone
def test_a_batch_that_batch_norm_normalizes_over_is_not_cut():
    passes, freed_memory, _ = stepped(nn.BatchNorm1d(64))
    assert (passes, freed_memory) == (1, "returned")
