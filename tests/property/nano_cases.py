"""Small tasks, trained by anybatch and by its specification, `examples/nano_anybatch.py`."""

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from examples import nano_anybatch as nano
from tests.equivalence.reference import plan_for
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import anybatch as ab
from anybatch.errors import LossError
from anybatch.plans import Choice

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


@dataclass(frozen=True)
class Case:
    """A task, how it is cut, and in which backward passes memory runs out."""

    kind: str = "mlp"
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64
    global_batch: int = 16
    num_full: int = 2  # global batches of an epoch
    rest: int = 0  # samples of the last one, beside the full ones
    epochs: int = 1
    num_passes: int = 3  # of a global batch, about
    clip_norm: float | None = None
    dropout: float = 0.0
    is_frozen: bool = False  # the first layer
    ghost_batch: int = 4
    failing: tuple[int, ...] = ()
    seed: int = 0

    @property
    def num_samples(self):
        return self.num_full * self.global_batch + self.rest % self.global_batch

    @property
    def ghosts(self):
        return self.ghost_batch if self.kind == "conv and norm" else None

    @property
    def micro_batch(self):
        size = -(-self.global_batch // self.num_passes)
        unit = self.ghosts or 1
        return min(-(-size // unit) * unit, self.global_batch)

    @property
    def smaller(self):
        """The micro-batches to take when memory runs out, one after the other."""
        unit, sizes = self.ghosts or 1, [self.micro_batch]
        while sizes[-1] > unit:
            sizes.append(-(-sizes[-1] // 2 // unit) * unit)
        return sizes[1:]

    @property
    def failures(self):
        """`failing`, as far as there is a smaller micro-batch to go on with."""
        return self.failing[: len(self.smaller)]


class Passes:
    """The number of passes. An attribute or a list of the model would be put back with the step."""

    number = 0


class Model(nn.Module):
    """Layers of a kind, a parameter that no pass uses, and memory that runs out in `failing` passes."""

    def __init__(self, case, failing=()):
        super().__init__()
        dropout = nn.Dropout(0.0 if case.ghosts else case.dropout)
        if case.kind == "mlp":
            layers = [nn.Linear(5, 8), nn.Tanh(), dropout, nn.Linear(8, 3)]
        elif case.kind == "tokens":
            layers = [nn.Embedding(9, 6), nn.Linear(6, 8), nn.Tanh(), dropout, nn.Linear(8, 3)]
        else:
            norm = [nn.BatchNorm2d(4)] if case.ghosts else []
            layers = [nn.Conv2d(2, 4, 2, bias=False), *norm, nn.ReLU(), dropout, nn.Flatten()]
            layers += [nn.Linear(16, 3)]
        self.layers = nn.Sequential(*layers)
        self.unused = nn.Linear(2, 2)
        if case.is_frozen:
            self.layers[0].requires_grad_(False)
        self.to(case.dtype)
        self.failing = failing
        self.passes = Passes()

    def forward(self, inputs):
        outputs = self.layers(inputs)
        if self.failing:
            outputs.register_hook(self.refuse)
        return outputs

    def refuse(self, _):
        self.passes.number += 1
        if self.passes.number in self.failing:
            raise MemoryError


def samples_of(case):
    """Inputs, targets of which some are ignored, and weights of which some are zero."""
    draw = torch.Generator().manual_seed(case.seed)
    shape = {"mlp": (5,), "tokens": (7,)}.get(case.kind, (2, 3, 3))
    inputs = torch.randn(case.num_samples, *shape, generator=draw, dtype=torch.float64)
    if case.kind == "tokens":
        inputs = (inputs.abs() * 4).long().clamp(max=8)
        targets = torch.randint(3, (case.num_samples, 7), generator=draw)
        targets[torch.rand(case.num_samples, 7, generator=draw) < 0.4] = -100
    else:
        inputs = inputs.to(case.dtype)
        targets = torch.randint(3, (case.num_samples,), generator=draw)
    weights = (torch.rand(case.num_samples, generator=draw) * 1.5 - 0.3).clamp(min=0.0)
    return TensorDataset(inputs, targets, weights.to(case.dtype))


def loss_of(model, batch):
    return ab.Loss(*loss(model, batch))


def loss(model, batch):
    """A sum and its weight: the number of tokens that count, or the total weight of the samples."""
    inputs, targets, weights = batch
    logits = model(inputs)
    if targets.dim() == 2:
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total, (targets != -100).sum()
    return (F.cross_entropy(logits, targets, reduction="none") * weights).sum(), weights.sum()


@dataclass
class Trained:
    """Where training led, and whether a step was refused since its weight is zero."""

    model: nn.Module
    losses: list[float]
    is_refused: bool = False


def task_of(case, failing=()):
    return nano.Task(
        model=partial(Model, case, failing),
        loss=loss,
        optimizer=OPTIMIZERS[case.optimizer],
        data=samples_of(case),
        global_batch=case.global_batch,
        epochs=case.epochs,
        clip_norm=case.clip_norm,
        ghost_batch=case.ghosts,
        seed=case.seed,
    )


def by_nano(case, failing=(), shares=(1,)):
    """`case`, trained by the specification; memory runs out in passes `failing` of this rank."""
    task = task_of(case, failing)
    with torch.random.fork_rng(devices=[]):
        trainer = nano.Trainer(task, case.micro_batch, shares)
        done = Trained(trainer.model, trainer.losses)
        try:
            for index, samples in enumerate(nano.global_batches(task)):
                trainer.step(index, samples)
        except ValueError:
            done.is_refused = True
    return done


def by_session(case, failing=(), **knobs):
    """`case`, trained by `Session` under a plan with these `knobs`."""
    task = task_of(case, failing)
    ours = ab.Task(
        model=task.model,
        loss=loss_of,
        optimizer=task.optimizer,
        train=task.data,
        global_batch=task.global_batch,
        epochs=task.epochs,
        clip_norm=task.clip_norm,
        ghost_batch=task.ghost_batch,
        seed=task.seed,
    )
    ladder = tuple(Choice(micro_batch=size, evaluation_batch=1) for size in case.smaller)
    with ab.Session(ours, plan_for(ours, case.micro_batch, ladder=ladder, **knobs)) as session:
        done = Trained(session.model, [])
        try:
            for step in session.steps():
                done.losses.append(step.loss)
        except LossError:
            done.is_refused = True
    return done


def by_step(case):
    """`case`, trained by `Step` in a loop over the global batches."""
    task = task_of(case)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        done = Trained(task.model(), [])
        optimizer = task.optimizer([p for p in done.model.parameters() if p.requires_grad])
        options = {"clip_norm": task.clip_norm, "ghost_batch": task.ghost_batch}
        with ab.Step(
            done.model, optimizer, loss_of, micro_batch=case.micro_batch, **options
        ) as step:
            try:
                for samples in nano.global_batches(task):
                    done.losses.append(step(default_collate([task.data[i] for i in samples])).loss)
            except LossError:
                done.is_refused = True
    return done


def assert_alike(ours, theirs, dtype):
    """Same losses, parameters and buffers, to the last digits of `dtype`."""
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert ours.is_refused == theirs.is_refused
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
    expected = {name: value.double() for name, value in theirs.model.state_dict().items()}
    whole = math.hypot(*(float(value.norm()) for value in expected.values()))
    for name, value in ours.model.state_dict().items():
        distance = float((value.double() - expected[name]).norm())
        # One that has come near 0 differs by the rounding of what cancelled.
        scale = max(float(expected[name].norm()), whole / 100)
        assert distance <= tolerance * scale, name
