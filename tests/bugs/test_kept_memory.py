"""What glibc kept of freed memory went over the budget.

Symptom (0.1): with `memory="64MiB"` a script's steps held 90 MiB after some steps, or ended in "memory
ran out" under a plan that had been rehearsed at 50. Mechanism: the heap's holes grew with each pass for
a dozen passes, a rehearsal makes three, and only addresses were refused. What the script took between
two steps was counted by resident pages, so pages that it used again counted as its own.
"""

from __future__ import annotations

import sys

import pytest
import torch
from tests.alone import alone
from torch import Tensor, nn

import anybatch as ab
from anybatch.engine.limit import warm_up
from anybatch.events import Event, OutOfMemory
from anybatch.process.process_memory import status, trim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux only")

MIB = 1 << 20
BUDGET = 64


@pytest.mark.nightly
@alone
def test_a_budget_holds_what_is_kept_from_pass_to_pass():
    warm_up()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16384, 64, generator=generator)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    most, events = [0], list[Event]()

    def look() -> None:
        most[0] = max(most[0], status("RssAnon"))

    def loss(model: nn.Module, batch: Tensor) -> ab.Loss:
        found = model(batch)
        found.register_hook(lambda _: look())
        return ab.Loss(found.square().sum(), len(batch))

    trim()
    start = status("RssAnon")
    with ab.Step(model, optimizer, loss, memory=f"{BUDGET}MiB", sinks=[events.append]) as step:
        step(inputs[:8192])
        most[0] = 0  # the first call tried what does not fit
        for _ in range(15):
            step(inputs[torch.randperm(len(inputs), generator=generator)[:8192]])
    assert not [event for event in events if isinstance(event, OutOfMemory)]
    assert 0 < most[0] - start <= BUDGET * MIB + 4 * MIB  # with the script's own batch
