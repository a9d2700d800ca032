"""Real limits on memory, lowered at random moments on random ranks, in runs of every kind.

A run trains a small task with several `Refusal`s planned in it. When its moment comes, a rank lowers
its own RLIMIT_DATA to what it has in use plus a little, so that the operating system refuses what is
asked for next, wherever that is: in the data set, in a kernel, in the network's library, in the
optimizer. The limit goes up again when the engine has met the failure, or at the next step if nothing
was refused. The run is compared with one that nothing disturbed.

`tests/faults/test_memory_campaign.py` runs a few of them, `benchmarks/survival/memory.py` hundreds.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import resource
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from tests.crew import Crew
from tests.heap import fill_heap, free_all
from torch import nn
from torch.utils.data import Dataset

import anybatch as ab
from anybatch.errors import PeerLost
from anybatch.estimate import identify
from anybatch.events import (
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Event,
    OutOfMemory,
    Replanned,
    StepDone,
)
from anybatch.parallel import SingleDevice
from anybatch.plans import Choice, Plan, Prediction, Recompute
from anybatch.process.process_memory import return_freed_memory, status
from anybatch.state import storage
from anybatch.state.checkpoints import Checkpoints

MIB = 1 << 20
KIND = {"dtype": torch.float64}
SPARE = (MIB // 4, MIB // 2, MIB)

PHASES = (
    "loading",
    "workers",
    "forward",
    "backward",
    "reduction",
    "evaluation",
    "prediction",
    "saving",
)
"""Where a limit may be lowered. `workers`: in a process that loads samples. `reduction`: when the
passes are over, before ranks speak. `saving`: while ranks plan a checkpoint (pass 0), or copy and write
it (pass 1). Not in the update and not while ranks speak, where a refusal ends the rank."""


@dataclass(frozen=True)
class Way:
    """One way of being parallel.

    Attributes:
        size: number of ranks.
        limited: whether the plan has a budget of its own, so that the limit is the engine's, or the
            limit is somebody else's.
    """

    parallel: str
    size: int = 1
    limited: bool = False
    norms: str = "ghosts"

    def __str__(self) -> str:
        more = ", norms synchronised" if self.norms == "synchronised" else ""
        return f"{self.parallel} on {self.size}{more}{', budget' if self.limited else ''}"


WAYS = (
    Way("single", limited=True),
    Way("single"),
    Way("replicate", 2, limited=True),
    Way("replicate", 3, limited=True),
    Way("replicate", 2),
    Way("replicate", 2, limited=True, norms="synchronised"),
    Way("shard", 2, limited=True),
    Way("shard", 3, limited=True),
)


@dataclass(frozen=True)
class Refusal:
    """A limit that is lowered once.

    Attributes:
        step: in which it happens, or after which.
        passes: how many times `phase` is gone through in that step before it happens.
        spare: bytes that are left.
        held: failures that it outlasts.
    """

    step: int
    phase: str
    ranks: tuple[int, ...]
    passes: int = 0
    spare: int = MIB // 2
    held: int = 1


@dataclass(frozen=True)
class Trial:
    """One run."""

    number: int
    way: Way
    task: str
    optimizer: str
    clip_norm: float | None
    workers: int
    refusals: tuple[Refusal, ...]
    steps: int = 10
    predicted: bool = False

    @property
    def saves_after(self) -> frozenset[int]:
        """Steps after which the run saves a checkpoint, disturbed or not."""
        return frozenset(r.step for r in self.refusals if r.phase == "saving")


@dataclass
class Told:
    """What one process says of its run.

    Attributes:
        lowered: (number of the refusal, rank), as they happened.
        met: numbers of those that the engine met as a failure, with the rank.
        seconds: of each step.
    """

    state: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    predicted: Any = None
    seconds: list[float] = field(default_factory=list)
    evaluation_seconds: list[float] = field(default_factory=list)
    failures: list[OutOfMemory] = field(default_factory=list)
    replanned: list[Replanned] = field(default_factory=list)
    saves: list[CheckpointSaved | CheckpointFailed] = field(default_factory=list)
    lowered: list[tuple[int, int]] = field(default_factory=list)
    met: list[tuple[int, int]] = field(default_factory=list)


# ---------------------------------------------------------------------------------------- the limit


class Squeeze:
    """The refusals of one process."""

    def __init__(self, refusals: Sequence[Refusal], rank: int) -> None:
        self.rank = rank
        self.step = 0
        self.told = Told()
        self._left = dict(enumerate(refusals))
        self._passed: dict[tuple[int, int], int] = {}
        self._before: tuple[int, int] | None = None
        self._now: Refusal | None = None
        self._number = -1
        self._failures = 0
        self._hoard: list[int] = []

    def passes(self, phase: str, rank: int | None = None) -> None:
        """Somebody is in `phase` now."""
        rank = self.rank if rank is None else rank
        for number, refusal in list(self._left.items()):
            if refusal.phase != phase or refusal.step != self.step or rank not in refusal.ranks:
                continue
            passed = self._passed[number, rank] = self._passed.get((number, rank), -1) + 1
            if passed == refusal.passes and self._before is None:
                self._lower(number, refusal, rank)

    def begin(self, step: int) -> None:
        """Step `step` begins: nothing of an earlier one is still held."""
        self.lift()
        self.step = step

    def failed(self) -> None:
        """The engine has met a failure on this rank."""
        if self._now is None:
            return
        if not self._failures:
            self.told.met.append((self._number, self.rank))
        self._failures += 1
        if self._failures >= self._now.held:
            self.lift()

    def lift(self) -> None:
        """The limit is what it was."""
        if self._before is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._before)
        self._before = self._now = None
        free_all(self._hoard)

    def _lower(self, number: int, refusal: Refusal, rank: int) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        self._now, self._number, self._failures = refusal, number, 0
        self.told.lowered.append((number, rank))
        self._left.pop(number, None)
        lower(0)  # also what the heap holds free is somebody else's now
        self._hoard = fill_heap(64 * MIB, MIB // 4)
        lower(refusal.spare)


def lower(spare: int) -> None:
    """Let this process have `spare` bytes more than it has."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = status("VmData") + spare
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


SQUEEZE: list[Squeeze] = []
"""The one of this process, for what is called from everywhere."""

RANK = [0]
"""Of the thread whose turn it is, where ranks are threads."""


def passes(phase: str) -> None:
    if SQUEEZE:
        SQUEEZE[-1].passes(phase, RANK[0])


# ---------------------------------------------------------------------------------------- the tasks


class InBackward(torch.autograd.Function):
    """The identity, whose backward pass says so."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        passes("backward")
        return grad


def phase_of(model: nn.Module) -> str:
    """The phase of a forward pass; the check of the loss, which computes no gradients, has its own."""
    if not model.training:
        return "evaluation"
    return "forward" if torch.is_grad_enabled() else "check"


class Convolutions(nn.Module):
    """With BatchNorm, whose statistics outlive a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False, **KIND)
        self.norm = nn.BatchNorm2d(16, **KIND)
        self.second = nn.Conv2d(16, 16, 3, padding=1, stride=2, bias=False, **KIND)
        self.other = nn.BatchNorm2d(16, **KIND)
        self.wide = nn.Linear(16, 40_000, **KIND)
        self.head = nn.Linear(40_000, 4, **KIND)

    def forward(self, x):
        passes(phase_of(self))
        x = F.relu(self.norm(self.first(x)))
        if torch.is_grad_enabled():
            x = InBackward.apply(x)
        x = F.relu(self.other(self.second(x))).mean((2, 3))
        return self.head(torch.tanh(self.wide(x)))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, **KIND)
        self.up = nn.Linear(width, 8 * width, **KIND)
        self.down = nn.Linear(8 * width, width, **KIND)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        if torch.is_grad_enabled():
            x = InBackward.apply(x)
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Decoder(nn.Module):
    """With dropout, and an embedding that is its head too."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(2000, 96, **KIND)
        self.layers = nn.ModuleList([Block(96, dropout) for _ in range(3)])
        self.head = nn.Linear(96, 2000, bias=False, **KIND)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        passes(phase_of(self))
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Images(Dataset):
    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 3, 32, 32, generator=draw, **KIND)
        self.y = torch.randint(0, 4, (count,), generator=draw)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Words(Dataset):
    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randint(0, 2000, (count, 25), generator=draw)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return (self.x[index],)


class Collate:
    """Takes memory beside the batch. In a worker, where there is no engine to meet the failure, the
    limit is lowered for one call at a time.

    Args:
        inside: calls, by number, in which a worker is refused memory.
    """

    def __init__(self, inside: Sequence[int] = ()) -> None:
        self._inside = set(inside)
        self._calls = 0

    def __call__(self, samples):
        worker = torch.utils.data.get_worker_info() is not None
        if not worker:
            passes("loading")
            self._take(samples)
            return torch.utils.data.default_collate(samples)
        self._calls += 1
        before = resource.getrlimit(resource.RLIMIT_DATA)
        if self._calls in self._inside:
            lower(MIB)
        try:
            self._take(samples)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
        return torch.utils.data.default_collate(samples)

    def _take(self, samples) -> None:
        torch.empty(len(samples) << 18, dtype=torch.uint8).fill_(1)


def of_images(model, batch):
    x, y = batch
    return ab.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def of_words(model, batch):
    (tokens,) = batch
    logits = model(tokens[:, :-1]).flatten(0, 1)
    losses = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
    return ab.Loss(losses, tokens[:, 1:].numel())


OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3),
    "momentum": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
}


def task_of(trial: Trial) -> ab.Task:
    images = trial.task == "convolutions"
    inside = [r.step * 2 for r in trial.refusals if r.phase == "workers"]
    data = Images if images else Words
    return ab.Task(
        name=trial.task,
        model=Convolutions if images else Decoder,
        loss=of_images if images else of_words,
        optimizer=OPTIMIZERS[trial.optimizer],
        train=data(96, 1),
        valid=data(40, 2),
        collate=Collate(inside),
        num_workers=trial.workers,
        global_batch=32,
        ghost_batch=4 if images else None,
        clip_norm=trial.clip_norm,
        evaluate_every=3,
        steps=trial.steps,
        seed=trial.number,
    )


def plan_of(trial: Trial, task: ab.Task) -> Plan:
    """A plan by hand, with rungs enough. What dropout draws depends on the micro-batch, so for the
    decoder the rungs differ in what is recomputed, and the result is the same to the bit."""
    way = trial.way
    if trial.task == "decoder":
        blocks = Recompute(blocks=("layers.*",)) if way.parallel != "shard" else Recompute()
        rungs = [
            Choice(micro_batch=8, evaluation_batch=16, recompute=recompute, freed_memory="returned")
            for recompute in (Recompute(), blocks)
        ] * 10
    else:
        sizes = (16, 8, 4) if way.norms == "ghosts" else (4,)
        rungs = [
            Choice(micro_batch=n, evaluation_batch=16, freed_memory="returned") for n in sizes
        ] * 10
    model = task.build_model()
    held = sum(p.nbytes for p in model.parameters())
    prediction = None
    if trial.predicted:  # more than the update takes, so that it may be refused before the vote
        prediction = Prediction(
            peak_bytes=0,
            evaluation_peak_bytes=0,
            step_seconds=0.0,
            commit_bytes=(4 * held // (way.size if way.parallel == "shard" else 1), held),
        )
    return Plan(
        task=identify(task, model),
        prediction=prediction,
        device="cpu",
        parallel=way.parallel,
        shares=(1.0,) * way.size,
        norms=way.norms,
        budget_bytes=600 * MIB if way.limited else None,
        enforced=way.limited,
        choice=rungs[0],
        ladder=tuple(rungs[1:]),
    )


# ------------------------------------------------------------------------------------------- the run


def run(rank: int, size: int, trial: Trial, disturbed: bool, folder: Path | None = None) -> Told:
    """The run of `trial` on one rank; for `tests.crew.Crew`. `folder`: for its checkpoints."""
    squeeze = Squeeze(trial.refusals if disturbed else (), rank)
    SQUEEZE.append(squeeze)
    RANK[0] = rank
    before = resource.getrlimit(resource.RLIMIT_DATA)
    # The ranks of a crew are daemons, which torch's worker processes may not be children of, and spawn.
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    return_freed_memory()  # else what the heap keeps of earlier steps would meet every wish
    if not trial.way.limited:  # somebody's limit, which is there from the start
        room = status("VmData") + (2 << 30)
        resource.setrlimit(resource.RLIMIT_DATA, (room, before[1]))
    try:
        with mock.patch.object(storage.Writer, "write_data", _written):
            return _run(trial, disturbed, folder, squeeze)
    finally:
        SQUEEZE.clear()
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _run(trial: Trial, disturbed: bool, folder: Path | None, squeeze: Squeeze) -> Told:
    saves_after = trial.saves_after
    if not disturbed:
        trial = replace(trial, refusals=())
    told = squeeze.told
    task = task_of(trial)

    def sink(event: Event) -> None:
        match event:
            case OutOfMemory():
                told.failures.append(event)
            case Replanned():
                told.replanned.append(event)
            case StepDone():
                told.losses.append(event.loss)
                told.seconds.append(event.seconds)
            case Evaluated():
                told.evaluated.append(event.loss)
                told.evaluation_seconds.append(event.seconds)
            case CheckpointSaved():
                told.saves.append(event)
            case CheckpointFailed():
                told.saves.append(event)
                squeeze.failed()

    torch.manual_seed(0)
    where = folder if saves_after else None
    with ab.Session(task, plan_of(trial, task), [sink], checkpoints=where) as session:
        ranks = {squeeze.rank: session}
        for number, one in ranks.items():
            _watch(one, number, squeeze, several=len(ranks) > 1)
        squeeze.begin(1)
        for step in session.steps():
            if squeeze.step in saves_after:
                session.save()
                session.saved(wait=True)
            squeeze.begin(step.step + 1)
        if trial.way.parallel == "shard":
            squeeze.begin(-1)
        told.predicted = session.predict_all(task.valid, _output)
        squeeze.begin(-1)
        model = session.model
        if trial.way.parallel == "shard":
            from anybatch.parallel.whole import full_state_dict

            told.state = full_state_dict(model)
        else:
            told.state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    return told


_write_data = storage.Writer.write_data


def _written(self: storage.Writer, *args: Any) -> Any:
    passes("saving")
    return _write_data(self, *args)


def _output(model, batch):
    passes("prediction")
    return model(batch[0][:, :-1] if batch[0].dim() == 2 else batch[0]).flatten(1)[:, :4].clone()


def _watch(one: Any, number: int, squeeze: Squeeze, several: bool) -> None:
    """Let `squeeze` know where the engine of a rank is."""
    engine, group, replica = one._engine, one._group, one._replica

    def before(owner: Any, name: str, phase: str) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            RANK[0] = number
            squeeze.passes(phase, number)
            return method(*args, **kwargs)

        setattr(owner, name, wrapped)

    before(group, "staged", "reduction")
    if one._archive is not None:
        before(one._archive.checkpoints, "save", "saving")
    if several:
        before(replica, "accumulate", "turn")
        before(replica, "evaluate", "turn")
        before(one._evaluation, "_output", "turn")

    recover = engine.thread.recover

    def recovers(*args: Any) -> None:
        squeeze.failed()
        recover(*args)

    engine.thread.recover = recovers


# -------------------------------------------------------------------------------------- the campaign


def draw(seed: int, count: int, ways: Sequence[Way] = WAYS, per_run: int = 6) -> list[Trial]:
    """So many trials that they hold at least `count` refusals, over all ways and phases in turn."""
    dice = random.Random(seed)
    trials: list[Trial] = []
    planned = 0
    while planned < count:
        number = len(trials)
        way = ways[number % len(ways)]
        images = way.norms == "synchronised" or dice.random() < 0.5
        workers = 1 if dice.random() < 0.3 else 0
        steps = 12
        refusals: list[Refusal] = []
        for step in sorted(dice.sample(range(1, steps + 1), per_run)):
            refusals.append(_refusal(dice, way, step, workers, images))
        trials.append(
            Trial(
                number,
                way,
                "convolutions" if images else "decoder",
                dice.choice(sorted(OPTIMIZERS)),
                dice.choice((None, 0.5)),
                workers,
                tuple(refusals),
                steps,
                predicted=dice.random() < 0.5,
            )
        )
        planned += per_run
    return trials


def _refusal(dice: random.Random, way: Way, step: int, workers: int, images: bool) -> Refusal:
    phases = ["forward", "forward", "backward", "backward", "reduction"]
    phases += ["workers"] if workers else ["loading"]
    if step % 3 == 0:  # an evaluation follows it
        phases += ["evaluation"] * 3
    else:
        phases += ["saving"]
    if step == 12:
        phases = ["prediction"]
    phase = dice.choice(phases)
    return Refusal(
        step + (phase == "prediction"),
        phase,
        _some(dice, way),
        dice.randrange(2),
        dice.choice(SPARE),
        dice.choice((1, 1, 1, 2)),
    )


def _some(dice: random.Random, way: Way) -> tuple[int, ...]:
    return tuple(sorted(dice.sample(range(way.size), dice.randint(1, way.size))))


# ------------------------------------------------------------------------------------- the judgement

TOLERANCE = 1e-9
"""Largest relative distance of weights, buffers, losses and predictions in float64."""


@dataclass(frozen=True)
class Judged:
    """A disturbed run beside the undisturbed one.

    Attributes:
        error: what ended the run, or is wrong with its checkpoints; empty: nothing.
        num_lowered: limits lowered, each counted once for each rank that lowered its own.
        by_phase: the same by phase.
        num_met: of these, ended in a failure that the engine met; the others passed unnoticed.
        num_told: failures that events told of.
        replanned: reasons for a change of the plan.
        recoveries: seconds that steps with failures took beyond the median step, for each failure.
        step_seconds: the median step of the undisturbed run.
    """

    trial: Trial
    error: str = ""
    deviation: float = float("inf")
    num_lowered: int = 0
    by_phase: tuple[tuple[str, int], ...] = ()
    num_met: int = 0
    num_told: int = 0
    replanned: tuple[str, ...] = ()
    recoveries: tuple[float, ...] = ()
    step_seconds: float = 0.0


def judge(crew: Any, trial: Trial) -> Judged:
    """Run `trial` with and without what disturbs it, on a `tests.crew.Crew`."""
    with TemporaryDirectory() as folder:
        calm = crew(trial.way.size, run, trial, False, Path(folder, "calm"))
        ours = Path(folder, "disturbed")
        outcomes = crew.outcomes(trial.way.size, run, trial, True, ours)
        errors = [(rank, error) for rank, (error, _) in enumerate(outcomes) if error is not None]
        if errors:  # a peer that was lost is not the cause
            rank, error = min(errors, key=lambda one: type(one[1]) is PeerLost)
            return Judged(trial, f"rank {rank}: {type(error).__name__}: {error}")
        all_told = [told for _, told in outcomes]
        return _judged(trial, all_told, calm[0], _fault_of_saves(trial, all_told[0], ours))


def _fault_of_saves(trial: Trial, told: Told, folder: Path) -> str:
    """What is wrong with the checkpoints in `folder`: each has to be told of, as saved or failed, and
    the last that was saved has to be there, intact to the last byte."""
    steps = [event.step for event in told.saves]
    if steps != sorted(trial.saves_after):
        return f"checkpoints are told of at the steps {steps}"
    saved = [event.step for event in told.saves if isinstance(event, CheckpointSaved)]
    found = Checkpoints(folder, SingleDevice()).newest()
    there = None if found is None else found.step
    if there != (saved[-1] if saved else None):
        return f"the newest checkpoint is of step {there}, and told were {saved}"
    return "a newer checkpoint is damaged" if found is not None and found.passed_over else ""


def _judged(trial: Trial, ours: Sequence[Told], calm: Told, error: str) -> Judged:
    first = ours[0]
    median = statistics.median(calm.seconds)
    lowered = [one for told in ours for one in told.lowered]
    phases = Counter(trial.refusals[number].phase for number, _ in lowered)
    in_steps = Counter(
        event.step for event in _attempts(first.failures) if event.phase not in _OUTSIDE
    )
    recoveries = [
        max(0.0, first.seconds[step - 1] - median) / failures for step, failures in in_steps.items()
    ]
    return Judged(
        trial,
        error,
        deviation=_deviation(first, calm),
        num_lowered=len(lowered),
        by_phase=tuple(sorted(phases.items())),
        num_met=sum(len(told.met) for told in ours),
        num_told=len(first.failures) + sum(isinstance(e, CheckpointFailed) for e in first.saves),
        replanned=tuple(event.reason for event in first.replanned),
        recoveries=tuple(recoveries),
        step_seconds=median,
    )


_OUTSIDE = ("evaluation", "prediction")


def _attempts(failures: Sequence[OutOfMemory]) -> Iterator[OutOfMemory]:
    """One event for each attempt that failed: several ranks may fail in one, and are told in order."""
    last: OutOfMemory | None = None
    for event in failures:
        if last is None or event.step != last.step or event.rank <= last.rank:
            yield event
        last = event


def _deviation(ours: Told, calm: Told) -> float:
    if ours.state.keys() != calm.state.keys() or len(ours.losses) != len(calm.losses):
        return float("inf")
    pairs = [(ours.state[name], value) for name, value in calm.state.items()]
    pairs += [
        (torch.tensor(mine, **KIND), torch.tensor(theirs, **KIND))
        for mine, theirs in ((ours.losses, calm.losses), (ours.evaluated, calm.evaluated))
    ]
    pairs.append((ours.predicted, calm.predicted))
    return max(
        float((mine.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-12))
        for mine, theirs in pairs
    )


@contextmanager
def crew_of_one_heap(size: int = 3) -> Iterator[Crew]:
    """A crew whose processes have one heap for all threads, as a run under a budget has."""
    crew = Crew()
    before = os.environ.get("MALLOC_ARENA_MAX")
    os.environ["MALLOC_ARENA_MAX"] = "1"
    try:
        crew(size, _nothing)
    finally:
        if before is None:
            del os.environ["MALLOC_ARENA_MAX"]
        else:
            os.environ["MALLOC_ARENA_MAX"] = before
    try:
        yield crew
    finally:
        crew.close()


def _nothing(rank: int, size: int) -> None:
    """The processes have started."""
