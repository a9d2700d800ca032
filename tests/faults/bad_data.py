"""Data with bad samples in it, and the plain loop that knows which they are, for `test_bad_data.py`."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from tests.equivalence.reference import plan_for
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import anybatch as ab
from anybatch.data import Steps, open_training, permutation
from anybatch.errors import AnybatchError
from anybatch.events import Skipped

WIDTH = 4

RAISES, MISSING, ODD, NAN, INF, STEEP = "raises", "missing", "odd", "nan", "inf", "steep"
"""How a sample is bad: it raises, is not there, cannot be collated, has a loss that is no number or is
infinite; or all is well with its loss, and its gradient is no number."""

UNSEEN = "unseen"
"""Steep, but in evaluation mode all is well with it."""

KINDS = (RAISES, MISSING, ODD, NAN, INF, STEEP)
"""Those that can be told of a sample."""


def sample(index: int, kind: str | None) -> tuple[Any, ...]:
    """Input, target and steepness of sample `index`."""
    if kind == RAISES:
        raise ValueError(f"sample {index} is broken")
    if kind == MISSING:
        raise IndexError(f"there is no {index}")
    x = torch.randn(
        WIDTH, generator=torch.Generator().manual_seed(1000 + index), dtype=torch.float64
    )
    target = x.sum() + 0.1 * index
    if kind == ODD:
        return x, None, torch.tensor(0.0)  # default_collate knows nothing of None
    if kind == NAN:
        x = x * float(NAN)
    elif kind == INF:
        target = target * float(INF)
    steepness = {STEEP: 2.0, UNSEEN: 1.0}.get(kind or "", 0.0)
    return x, target, torch.tensor(steepness, dtype=torch.float64)


class Faulty(Dataset[Any]):
    """Samples 0 to `length`, of which `bad` are bad: index to kind."""

    def __init__(self, length: int, bad: dict[int, str] | None = None) -> None:
        self.length = length
        self.bad = bad or {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return sample(index, self.bad.get(index))


class FaultyStream(IterableDataset[Any]):
    """The same in order; its iterator goes on after an error, unless it is a generator."""

    def __init__(self, length: int, bad: dict[int, str], generator: bool = False) -> None:
        self.length = length
        self.bad = bad
        self.generator = generator

    def __iter__(self) -> Any:
        made = (lambda index: sample(index, self.bad.get(index)), range(self.length))
        return (made[0](index) for index in made[1]) if self.generator else map(*made)


class Model(nn.Module):
    """A small net, with BatchNorm if asked for."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 6, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64) if norm else nn.Identity()
        self.head = nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.body(x)))).squeeze(1)


class NormModel(Model):
    """With BatchNorm."""

    def __init__(self) -> None:
        super().__init__(norm=True)


def loss_of(model: nn.Module, batch: Any) -> ab.Loss:
    """Weighted squares. A steep sample adds the root of zero: no loss, and a gradient without end."""
    x, target, steep = batch
    errors = model(x) - target
    weights = 1.0 + target.abs()
    seen = steep > (0.0 if model.training else 1.0)
    roots = (errors * 0.0).abs().sqrt() * seen if seen.any() else 0.0
    return ab.Loss((errors.square() * weights + roots).sum(), weights.sum())


def half_life(progress: ab.Progress) -> float:
    """A schedule that goes by samples."""
    return 0.5 ** (progress.samples / 40)


def task_of(train: Any, **options: Any) -> ab.Task:
    """The task that all tests train; `options` of `Task`."""
    options = {"global_batch": 12, "epochs": 2, "model": Model, "schedule": half_life} | options
    return ab.Task(
        loss=loss_of,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.02),
        train=train,
        bad_data=options.pop("bad_data", "skip"),
        **options,
    )


@dataclass
class Ran:
    """What a rank has to tell."""

    state: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    num_skipped: int = 0
    samples_seen: int = 0
    error: str = ""
    kind: str = ""
    seconds: float = 0.0

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """(epoch, sample), sorted."""
        return sorted((e.epoch, index) for e in self.skipped for index in e.samples)


def run(task: ab.Task, plan: ab.Plan, hook: Any = None) -> Ran:
    """`task` trained under `plan` to its end, or to the error that ends it. `hook` gets the session."""
    ran, events, begun = Ran(), [], time.monotonic()
    with ab.Session(task, plan, [events.append]) as session:
        if hook is not None:
            hook(session)
        try:
            ran.losses = []
            for step in session.steps():
                ran.losses.append(step.loss)
        except AnybatchError as error:
            ran.error, ran.kind = str(error), type(error).__name__
        else:
            if task.valid is not None:
                ran.evaluated = [session.evaluate().loss]
        ended = session.ended(0.0, finished=not ran.error)
        ran.state = {name: whole(value) for name, value in session.model.state_dict().items()}
    ran.seconds = time.monotonic() - begun
    ran.num_skipped, ran.samples_seen = ended.num_skipped, ended.samples_seen
    ran.skipped = [event for event in events if isinstance(event, Skipped)]
    return ran


def whole(value: Tensor) -> Tensor:
    """`value`, put together if it is divided over ranks."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def as_rank(rank: int, size: int, task_args: Any, micro_batch: int, parallel: str) -> Ran:
    """One of `size` ranks; `task_args`: those of `task_of`, the data first."""
    data, options = task_args
    task = task_of(data, **options)
    plan = plan_for(task, micro_batch, parallel=parallel, shares=(1.0,) * size)
    return run(task, plan)


def fails_on(rank: int, size: int, task_args: Any, micro_batch: int, bad_rank: int) -> Ran:
    """As `as_rank`, but samples are bad on `bad_rank` alone."""
    data, options = task_args
    if rank != bad_rank:
        data = Faulty(data.length)
    return as_rank(rank, size, (data, options), micro_batch, "replicate")


@dataclass
class Plain:
    """What the plain loop has: after every step the weights, and the losses."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)


def train_plainly(task: ab.Task, length: int, bad: dict[int, str], shuffle: bool = True) -> Plain:
    """A plain loop over the samples that are not bad, one piece per step, or per ghost batch. A step in
    which nothing is left, or whose gradient is no number, makes no update."""
    model = task.build_model()
    optimizer = task.optimizer(list(model.parameters()))
    steps = Steps(length, task.global_batch, task.last, epochs=task.epochs)
    plain, taken = Plain(model), 0
    for number in range(steps.total_steps or 0):
        spans = steps.samples_of(number)
        indices = [
            int(index)
            for span in spans
            for index in permutation(task.seed, span.epoch, length, shuffle)[span.start : span.stop]
        ]
        kept = [index for index in indices if bad.get(index) in (None, UNSEEN)]
        progress = ab.Progress(number, taken, spans[0].epoch, None, None)
        taken += len(indices)
        if not kept or any(index in bad for index in kept):
            continue
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * half_life(progress)
        optimizer.zero_grad()
        size = task.ghost_batch or len(kept)
        starts = list(range(0, len(kept), size))
        if len(kept) - starts[-1] == 1 and len(starts) > 1:
            starts.pop()  # a rest of one joins its neighbour
        cuts = zip(starts, [*starts[1:], len(kept)], strict=True)
        found = [loss_of(model, batch_of(kept[start:stop])) for start, stop in cuts]
        weight = sum(one.weight for one in found)
        total = sum(one.sum for one in found) / weight
        total.backward()
        optimizer.step()
        plain.losses.append(float(total.detach()))
    return plain


def batch_of(indices: list[int]) -> Any:
    """Good samples, as one batch."""
    return [torch.stack(parts) for parts in zip(*(sample(i, None) for i in indices), strict=True)]


class Deadly(Faulty):
    """The worker of rank 1 that comes to sample 23 is killed."""

    def __getitem__(self, index: int) -> Any:
        if index == 23 and os.environ.get("RANK") == "1" and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Hanging(Faulty):
    """Whoever comes to sample 23 in a worker stays there, deaf to all that asks it to end. If it
    `tells`, then on standard output."""

    tells = False

    def __getitem__(self, index: int) -> Any:
        if index == 23 and get_worker_info() is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if self.tells:
                os.write(1, b"hangs\n")
            time.sleep(3600)
        return super().__getitem__(index)


class Slow(Faulty):
    """Each sample takes a while, but none takes long."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.15)
        return super().__getitem__(index)


def hang() -> None:
    """Prints the ids of this process and of the workers that it waits for in vain, and, before or
    after, that one of them hangs."""
    data = Hanging(40)
    data.tells = True
    task = task_of(data, shuffle=False, num_workers=2)
    _, loader = open_training(task, pin_memory=False)
    loader.begin(0, lambda extent: [range(extent.num_samples)])
    for _ in range(2):
        step = loader.next_step()
        if step is not None and step.index == 1:
            pids = (os.getpid(), *(child.pid for child in psutil.Process().children()))
            os.write(1, f"{' '.join(map(str, pids))}\n".encode())
        list(step.micro_batches)
