"""The plain loop that every plan must agree with: the whole global batch in one forward pass.

Nothing of the engine is used. What it shares with anybatch is the definition of the task: which samples
make up a step (`anybatch.data.Steps`, `permutation`) and what a loss function returns.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import anybatch as ab
from anybatch.data import Steps, permutation, steps_of
from anybatch.estimate import identify
from anybatch.plans import Choice


@dataclass
class Trained:
    """What a loop leaves behind."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def train_plainly(task: ab.Task) -> Trained:
    """`task`, trained as one would by hand with memory for any batch."""
    model = copy.deepcopy(task.model) if isinstance(task.model, nn.Module) else task.build_model()
    # In a model in training mode, what its user put into evaluation mode stays in it.
    kept = [part for part in model.modules() if model.training and not part.training]
    model.train()
    for part in kept:
        part.eval()
    ghost = imitate_ghost_batches(model, task.ghost_batch or 32)
    optimizer = task.optimizer(task.parameters_of(model))
    scheduler = task.scheduler(optimizer) if task.scheduler else None
    base = [group["lr"] for group in optimizer.param_groups]
    steps = steps_of(task)
    seen, result = 0, Trained(model, optimizer)
    for step in range(steps.total_steps):
        indices = samples_of(task, steps, step)
        batch = (task.collate or default_collate)([task.train[i] for i in indices])
        ghost.num_samples = len(indices)
        loss = mean_loss(task.loss(model, batch))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if task.clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(
                [p for group in optimizer.param_groups for p in group["params"]], task.clip_norm
            )
            result.norms.append(float(norm))
        if task.schedule is not None:
            progress = ab.Progress(
                step=step,
                samples=seen,
                epoch=steps.epoch_of(step),
                total_steps=steps.total_steps,
                total_samples=steps.total_samples,
            )
            for group, rate in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = rate * task.schedule(progress)
        result.rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        seen += len(indices)
        result.losses.append(loss.item())
    return result


def train(task: ab.Task, micro_batch: int, sinks: Any = (), **knobs: Any) -> Trained:
    """`task`, trained by anybatch under a plan written by hand."""
    task = own_model(task)
    result = Trained(nn.Module())
    with ab.Session(task, plan_for(task, micro_batch, **knobs), sinks) as session:
        for done in session.steps():
            result.losses.append(done.loss)
            result.rates.append(done.learning_rate)
            if done.grad_norm is not None:
                result.norms.append(done.grad_norm)
        result.model = session.model
        result.optimizer = session._replica.optimizer
    return result


def own_model(task: ab.Task) -> ab.Task:
    """`task` on a copy of its model, so that another run of it begins at the same place."""
    if isinstance(task.model, nn.Module):
        return dataclasses.replace(task, model=copy.deepcopy(task.model))
    return task


def plan_for(task: ab.Task, micro_batch: int, **knobs: Any) -> ab.Plan:
    """A plan written by hand. `knobs`: those of `Choice` and `Plan`."""
    model = task.model if isinstance(task.model, nn.Module) else task.build_model()
    plan = {k: knobs.pop(k) for k in ab.Plan.model_fields if k in knobs}
    choice = {"evaluation_batch": micro_batch, "micro_batch": micro_batch, **knobs}
    return ab.Plan(task=identify(task, model), device="cpu", choice=Choice(**choice), **plan)


def samples_of(task: ab.Task, steps: Steps, step: int) -> list[int]:
    """The samples of global step `step`, in order."""
    return [
        int(index)
        for span in steps.samples_of(step)
        for index in permutation(task.seed, span.epoch, len(task.train), task.shuffle)[
            span.start : span.stop
        ]
    ]


def mean_loss(returned: Any) -> Tensor:
    """The mean loss of a batch from whatever a loss function may return."""
    if isinstance(returned, Tensor):
        return returned
    total, weight = (returned.sum, returned.weight) if isinstance(returned, ab.Loss) else returned
    return total / weight


class imitate_ghost_batches:  # noqa: N801 - used as a function
    """BatchNorm layers of `model` normalise ghost batch by ghost batch, by arithmetic of their own."""

    def __init__(self, model: nn.Module, size: int) -> None:
        self.size = size
        self.num_samples = 0
        for norm in model.modules():
            if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                norm.forward = lambda x, norm=norm: self._normalise(norm, x)

    def _cut(self) -> list[int]:
        left, sizes = self.num_samples, []
        while left:
            sizes.append(min(self.size, left))
            left -= sizes[-1]
        if len(sizes) > 1 and sizes[-1] == 1:
            sizes[-2:] = [sizes[-2] + 1]
        return sizes

    def _normalise(self, norm: Any, x: Tensor) -> Tensor:
        if not norm.training:
            return type(norm).forward(norm, x)
        per_sample = len(x) // self.num_samples
        pieces = x.split([size * per_sample for size in self._cut()])
        return torch.cat([self._one(norm, piece) for piece in pieces])

    def _one(self, norm: Any, x: Tensor) -> Tensor:
        dims = [0, *range(2, x.dim())]
        shape = [1, -1] + [1] * (x.dim() - 2)
        mean, var = x.mean(dims), x.var(dims, correction=0)
        if norm.track_running_stats:
            with torch.no_grad():
                norm.num_batches_tracked += 1
                factor = norm.momentum
                if factor is None:
                    factor = 1.0 / float(norm.num_batches_tracked)
                count = x.numel() // x.size(1)
                norm.running_mean.lerp_(mean.detach(), factor)
                norm.running_var.lerp_(var.detach() * count / (count - 1), factor)
        out = (x - mean.view(shape)) / (var.view(shape) + norm.eps).sqrt()
        if norm.affine:
            out = out * norm.weight.view(shape) + norm.bias.view(shape)
        return out


def deviation(ours: nn.Module, theirs: nn.Module) -> float:
    """Largest relative distance between two models' parameters and floating buffers."""
    left, right = ours.state_dict(), theirs.state_dict()
    assert left.keys() == right.keys()
    return max(
        (float((left[n].double() - v.double()).norm() / v.double().norm().clamp_min(1e-12)))
        for n, v in right.items()
    )


def assert_equal(ours: Trained, theirs: Trained, tolerance: float = 1e-6) -> None:
    """Same parameters, buffers, losses, learning rates and gradient norms."""
    assert len(ours.losses) == len(theirs.losses) > 0
    assert deviation(ours.model, theirs.model) <= tolerance
    torch.testing.assert_close(
        torch.tensor(ours.losses, dtype=torch.float64),
        torch.tensor(theirs.losses, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
    )
    assert ours.rates == theirs.rates
    if theirs.norms:
        torch.testing.assert_close(ours.norms, theirs.norms, rtol=tolerance, atol=tolerance)
