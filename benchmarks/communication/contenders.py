"""Who trains: each contender is a function that gives a function which does one global step.

All of them train the same perceptron with SGD on the same samples: of each global batch, rank 0 the
first half and rank 1 the second, cut into as many micro-batches as `accumulation` says.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.estimate import identify
from anybatch.plans import Choice, Exchange, Outer, Plan

WIDTH, LAYERS, NUM_STEPS = 1024, 4, 100_000
BUCKETS_MIB = (1, 2, 4, 8, 25)
"""Bucket sizes that the hand-tuned loop is tuned over; 25 is DDP's default."""


@dataclass(frozen=True)
class Work:
    """What is trained."""

    micro_batch: int
    accumulation: int
    lr: float = 0.01

    @property
    def share(self) -> int:
        """Samples per rank and step."""
        return self.micro_batch * self.accumulation

    def samples(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of four global batches, the same everywhere."""
        draw = torch.Generator().manual_seed(1)
        count = 8 * self.share
        inputs = torch.randn(count, 784, generator=draw)
        return inputs, torch.randint(10, (count,), generator=draw)


Step = Callable[[], None]


def build_model() -> nn.Sequential:
    """About four million parameters, 16 MB in float32, in layers of equal size."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(784, WIDTH), nn.ReLU()]
    for _ in range(LAYERS - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def make_optimizer(params: object, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ by hand


def by_hand(
    work: Work, stack: ExitStack, *, bucket: int = 25, naive: bool = False
) -> tuple[nn.Module, Step]:
    """A loop around DistributedDataParallel. `naive`: gradients cross in every micro-batch."""
    model = build_model()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket)
    optimizer = make_optimizer(model.parameters(), work.lr)
    inputs, labels = work.samples()
    rank, share, position = dist.get_rank(), work.share, [0]

    def step() -> None:
        first = position[0] + rank * share
        optimizer.zero_grad(set_to_none=False)  # keeps the views into DDP's buckets
        total = torch.zeros(())
        for number in range(work.accumulation):
            start = first + number * work.micro_batch
            part = slice(start, start + work.micro_batch)
            last = number + 1 == work.accumulation
            with nullcontext() if last or naive else ddp.no_sync():
                loss = F.cross_entropy(ddp(inputs[part]), labels[part]) / work.accumulation
                loss.backward()
            total += loss.detach()
        optimizer.step()
        float(total)  # the loss is looked at in every step, as anybatch does
        position[0] = (position[0] + 2 * share) % len(inputs)

    return model, step


# ---------------------------------------------------------------------------------------- anybatch


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ab.Loss:
    inputs, labels = batch
    return ab.Loss(F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels))


def anybatch(
    work: Work, stack: ExitStack, *, exchange: Exchange | None = None
) -> tuple[nn.Module, Step]:
    """A session under a plan written by hand."""
    inputs, labels = work.samples()
    task = ab.Task(
        model=build_model,
        loss=loss,
        optimizer=partial(make_optimizer, lr=work.lr),
        train=TensorDataset(inputs, labels),
        global_batch=2 * work.share,
        steps=NUM_STEPS,
        shuffle=False,
    )
    plan = Plan(
        task=identify(task, build_model()),
        parallel="replicate",
        shares=(1.0, 1.0),
        device="cpu",
        exchange=exchange or Exchange(),
        choice=Choice(micro_batch=work.micro_batch, evaluation_batch=work.micro_batch),
    )
    session = stack.enter_context(ab.Session(task, plan))
    steps = session.steps()
    return session.model, lambda: void(next(steps))


def void(_: object) -> None:
    """A step is done; what it returned is not needed."""


EXACT = {
    "anybatch, replicate": anybatch,
    "DDP by hand, naive": partial(by_hand, naive=True),
}
"""Compared with each other and with the hand-tuned loop, which is added once it is tuned."""

RELAXED = {
    "replicate": anybatch,
    "compress bf16": partial(anybatch, exchange=Exchange(compress="bf16")),
    "compress fp16": partial(anybatch, exchange=Exchange(compress="fp16")),
    "local steps, every 4": partial(anybatch, exchange=Exchange(every=4)),
    "local steps, every 8, outer": partial(anybatch, exchange=Exchange(every=8, outer=Outer())),
    "stale": partial(anybatch, exchange=Exchange(stale=True)),
    "stale, bf16": partial(anybatch, exchange=Exchange(stale=True, compress="bf16")),
}
