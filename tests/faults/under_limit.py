"""Runs under a budget, in a process of their own: `python -m tests.faults.under_limit NAME`.

Prints what happened as one line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial

import torch
import torch.nn.functional as F
from tests.equivalence.reference import deviation
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.estimate import identify
from anybatch.events import Evaluated, Event, OutOfMemory, Replanned, StepDone
from anybatch.plans import Choice, Plan
from anybatch.recipes.digits import digits

MIB = 1 << 20


class Spikes(torch.autograd.Function):
    """The identity; takes memory that no plan can know of, in forward or in backward."""

    @staticmethod
    def forward(ctx, x, in_forward, in_backward):
        ctx.in_backward = in_backward
        if in_forward:
            torch.empty(in_forward, dtype=torch.uint8).fill_(1)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.in_backward:
            torch.empty(ctx.in_backward, dtype=torch.uint8).fill_(1)
        return grad, None, None


def layers():
    return nn.Sequential(
        nn.Linear(32, 256), *(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6))
    )


def mean_square(spikes, model, batch):
    """Mean square of the outputs. `spikes`: calls in training, by number, that take `bytes` per sample
    in forward or backward."""
    x, y = batch
    if torch.is_grad_enabled():
        spikes["calls"] += 1
    forward, backward = (
        spikes[where] * len(x) if spikes["calls"] in spikes["at"] else 0
        for where in ("forward", "backward")
    )
    out = Spikes.apply(model(x), forward, backward)
    return ab.Loss(F.mse_loss(out, y, reduction="sum"), y.numel())


def mlp(global_batch, spikes=None, steps=4):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2 * global_batch, 32, generator=draw)
    y = torch.randn(2 * global_batch, 256, generator=draw)
    spikes = {"calls": 0, "at": (), "forward": 0, "backward": 0} | (spikes or {})
    return ab.Task(
        model=layers,
        loss=partial(mean_square, spikes),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        train=TensorDataset(x, y),
        valid=TensorDataset(x[:100], y[:100]),
        global_batch=global_batch,
        steps=steps,
    )


def by_hand(task, micro_batch, budget=None):
    """Under a budget freed memory is returned, so that only what is in use counts."""
    freed_memory = "kept" if budget is None else "returned"
    return Plan(
        task=identify(task, task.build_model()),
        device="cpu",
        budget_bytes=budget,
        enforced=budget is not None,
        choice=Choice(
            micro_batch=micro_batch,
            evaluation_batch=min(64, micro_batch),
            freed_memory=freed_memory,
        ),
    )


def told(events: list[Event]) -> dict:
    def of(kind):
        return [dataclasses.asdict(e) for e in events if isinstance(e, kind)]

    for event in (replanned := of(Replanned)):
        event.pop("plan")
    return {
        "failures": of(OutOfMemory),
        "replanned": replanned,
        "steps": [e["step"] for e in of(StepDone)],
        "seen": [e["samples_seen"] for e in of(StepDone)],
        "losses": [e["loss"] for e in of(StepDone)],
        "evaluated": [e["loss"] for e in of(Evaluated)],
    }


def compared(task, undisturbed, **how) -> dict:
    """A run under a limit beside one without, under the micro-batch that the first ended with."""
    events: list[Event] = []
    result = ab.train(task, progress=False, sinks=[events.append], **how)
    final = result.plan.choice.micro_batch
    calm: list[Event] = []
    plan = by_hand(undisturbed, final)
    reference = ab.train(undisturbed, plan=plan, progress=False, sinks=[calm.append])
    return told(events) | {
        "final": final,
        "budget": result.plan.budget_bytes,
        "measured": result.ended.measured_peak_bytes,
        "deviation": deviation(result.model, reference.model),
        "expected": told(calm),
    }


def micro_batch_far_too_large():
    task = mlp(8192)
    return compared(task, mlp(8192), plan=by_hand(task, 8192, 32 * MIB))


def planned_in_this_process():
    """The planner tries passes that keep freed memory first, which do not fit."""
    return compared(mlp(4096), mlp(4096), memory="48MiB", micro_batch=4096)


def digits_pinned():
    task = partial(digits, global_batch=512, epochs=1)
    return compared(task(), task(), memory="22MiB", micro_batch=512)


def spikes(where):
    """Memory that passes over a known shape take now and then."""
    at = range(5, 1000, 3)
    spike = {"at": at, where: 8 * MIB}
    task, budget = mlp(256, spike, steps=7), 40 * MIB
    return compared(task, mlp(256, steps=7), plan=by_hand(task, 128, budget))


def nothing_fits():
    """The smallest micro-batch does not fit."""
    spike = {"at": range(1000), "forward": 64 * MIB}
    task = dataclasses.replace(mlp(16, spike), model=layers())
    before = [p.detach().clone() for p in task.model.parameters()]
    events: list[Event] = []
    message = ""
    try:
        plan = by_hand(task, 16, 32 * MIB)
        ab.train(task, plan=plan, progress=False, sinks=[events.append])
    except ab.NoPlanFits as error:
        message = str(error)
    same = all(torch.equal(a, b) for a, b in zip(before, task.model.parameters(), strict=True))
    return told(events) | {"message": message, "same": same}


class Branching(nn.Module):
    """What a trace on fake tensors cannot follow."""

    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, x):
        return self.layers(x) if x.detach().numpy().any() else self.layers(-x)


def untraced():
    """Planned by passes over real samples."""
    task = dataclasses.replace(mlp(8192), model=Branching)
    plan = ab.plan(task, memory="256MiB")
    assert plan.prediction is not None
    found = compared(task, dataclasses.replace(mlp(8192), model=Branching), plan=plan)
    return found | {"predicted": plan.prediction.peak_bytes, "method": plan.prediction.method}


RUNS = {
    "untraced": untraced,
    "far too large": micro_batch_far_too_large,
    "planned here": planned_in_this_process,
    "digits": digits_pinned,
    "spikes in forward": partial(spikes, "forward"),
    "spikes in backward": partial(spikes, "backward"),
    "nothing fits": nothing_fits,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(RUNS[sys.argv[1]]()))
