"""BatchNorm on several ranks, as real processes: the parameters and buffers of one process.

Each scenario runs on the first 1, 2, 3 or 4 of the same processes and leaves its results in a file. Two
ways are compared with a plain process: ghost batches that lie whole on a rank, with the running
statistics put together after the step, and ghost batches divided over the ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from anybatch.compute import recompute
from anybatch.compute.ghost_norm import GhostBatches
from anybatch.data import ghosts, share
from anybatch.errors import InputError
from anybatch.parallel.buffers import Buffers
from anybatch.parallel.norms import NormExchange, PassAbandoned
from anybatch.plans import Recompute

NUM_RANKS = 4
STEPS = 2


class Counted(nn.Module):
    """Counts its passes, and keeps a constant beside."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int16))
        self.register_buffer("mask", torch.tril(torch.ones(3, 3, dtype=torch.bool)))

    def forward(self, x):
        self.passes.data.add_(1)
        return x


class Images(nn.Module):
    """(B, 2, 4, 4) images. One norm is called twice, one never, one is frozen, and their order in
    forward is not that of registration."""

    def __init__(self, dtype=torch.float64, norm=nn.BatchNorm2d, **options):
        super().__init__()
        torch.manual_seed(0)
        self.last = norm(6, **options)
        self.never = norm(9)
        self.counted = Counted()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False), norm(4, **options), nn.ReLU(inplace=True)
        )
        self.again = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm(4, **options), nn.GELU())
        self.frozen = norm(4).eval()
        self.up = nn.Conv2d(4, 6, 1)
        self.head = nn.Linear(6, 3)
        self.to(dtype)

    def forward(self, x):
        x = self.body(self.counted(x))
        x = self.frozen(self.again(self.again(x)))
        x = self.last(self.up(x) + 7.0)
        return self.head(x.mean((2, 3)))

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self


class Sequence(nn.Module):
    """(B, T) tokens, flattened into the first dim, so a sample is several rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)
        self.double()

    def forward(self, x):
        rows = (x.flatten(1)[:, :6].abs() * 2).long().clamp(max=4)
        return self.head(self.norm(self.embed(rows).flatten(0, 1))).unflatten(0, rows.shape).mean(1)


MODELS = {
    "images": Images,
    "float32": lambda: Images(torch.float32),
    "cumulative": lambda: Images(momentum=None),
    "not affine": lambda: Images(affine=False),
    "not tracking": lambda: Images(track_running_stats=False),
    "momentum 1": lambda: Images(momentum=1.0),
    "torch's SyncBatchNorm": lambda: Images(norm=nn.SyncBatchNorm),
    "tokens": Sequence,
}
WAYS = {
    "kept": Recompute(),
    "blocks": Recompute(blocks=("body", "again")),
    "matmuls kept": Recompute(blocks=("body", "again"), keep="matmuls"),
    "nested": Recompute(blocks=("again",), nested=True),
    "host": Recompute(to_host=True),
}


@dataclass(frozen=True)
class Case:
    """A model, how the batch lies on the ranks, and a fault."""

    model: str = "images"
    way: str = "kept"
    num_samples: int = 13
    ghost: int = 6
    shares: tuple[float, ...] = (1.0,)
    divided: bool = True
    fault: tuple[int, int] | None = None

    def parts(self, rank):
        """The samples of each pass of `rank`, and their ghosts."""
        sizes = ghosts(self.num_samples, self.ghost)
        starts = [0, *itertools.accumulate(sizes)]
        if self.divided:
            for start, size in zip(starts, sizes, strict=False):
                part = share(size, self.shares, rank)
                yield range(start + part.start, start + part.stop), [len(part)]
        else:
            mine = share(self.num_samples, self.shares, rank, unit=self.ghost)
            for start, size in zip(starts, sizes, strict=False):
                if start in mine:
                    yield range(start, start + size), [size]


DIVIDED = [
    *(Case(shares=(1.0,) * n) for n in (1, 2, 3, 4)),
    *(Case(model, shares=(1.0, 1.0)) for model in MODELS if model != "images"),
    *(Case(way=way, shares=(1.0, 2.0)) for way in WAYS),
    Case(num_samples=9, ghost=5, shares=(0.0, 5.0, 2.0, 1.0)),
    Case(num_samples=6, ghost=32, shares=(1.0, 1.0)),
    Case(num_samples=7, ghost=2, shares=(1.0, 1.0, 1.0)),  # the last rank has rows in one pass
    Case(num_samples=2, ghost=2, shares=(1.0, 1.0, 1.0)),  # and in none
    Case(num_samples=3, ghost=2, shares=(1.0, 0.0, 4.0)),
]
WHOLE = [
    *(Case(model, shares=(1.0, 2.0), num_samples=13, ghost=3, divided=False) for model in MODELS),
    Case(shares=(0.0, 1.0, 3.0, 2.0), num_samples=27, ghost=4, divided=False),
    Case(num_samples=5, ghost=4, shares=(1.0, 1.0), divided=False),
]
FAULTS = [
    Case(way="blocks", num_samples=7, ghost=3, shares=(1.0, 1.0), fault=(rank, position))
    for position in range(24)
    for rank in (0, 1)
    if position % 2 == rank or position in (0, 21, 22, 23)
]
"""In each step 22 exchanges and the end of staging; then it begins again. Each fails on one rank; the
first, the last, the end and the first of the next step on the other, too."""


@dataclass
class Result:
    """What a rank is left with."""

    state: dict = field(default_factory=dict)
    outcomes: list = field(default_factory=list)
    error: str = ""


class Faulty:
    """An exchange that fails once, before the exchange of this number, or the end of staging."""

    def __init__(self, exchange, at):
        self.exchange, self.left = exchange, at
        self.begin_pass = exchange.begin_pass

    def meet(self, *args):
        self.count()
        return self.exchange.meet(*args)

    def count(self):
        self.left -= 1
        if self.left == -1:
            raise MemoryError


# ------------------------------------------------------------------------------------ plain process


def samples_of(case, step):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(case.num_samples, 2, 4, 4, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 3, (case.num_samples,), generator=draw)
    return x.to(torch.float32) if case.model == "float32" else x, y


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_plainly(case):
    """One process and torch's own norms, one pass per ghost batch."""
    model = MODELS[case.model]()
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):  # whose forward is the same without a group
            module.forward = _BatchNorm.forward.__get__(module)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        x, y = samples_of(case, step)
        optimizer.zero_grad()
        sizes = ghosts(case.num_samples, case.ghost)
        for inputs, targets in zip(x.split(sizes), y.split(sizes), strict=True):
            (F.cross_entropy(model(inputs), targets, reduction="sum") / len(x)).backward()
        optimizer.step()
    return model.state_dict()


# -------------------------------------------------------------------------------------- on the ranks


def train_on_ranks(case, group):
    """This rank's part, as the engine does it: stage, finish, vote, commit or put back."""
    rank = dist.get_rank(group)
    model, result = MODELS[case.model](), Result()
    exchange = NormExchange(torch.device("cpu"), group, group)
    norms = GhostBatches(model)
    if case.divided:
        norms.exchange = exchange
        if case.fault and case.fault[0] == rank:
            norms.exchange = Faulty(exchange, case.fault[1])
    undo = recompute.install(model, WAYS[case.way])
    size = dist.get_world_size(group)
    buffers = Buffers(model, torch.device("cpu"), size, synchronised=case.divided, group=group)
    optimizer = optimizer_of(model)
    step = 0
    while step < STEPS:
        saved = {
            (m, name): None if b is None else b.clone()
            for m in model.modules()
            for name, b in m._buffers.items()
        }
        exchange.begin()
        model.zero_grad(set_to_none=True)
        outcome = "done"
        try:
            stage(model, norms, case, rank, samples_of(case, step))
            buffers.staged(rank, lambda *place, saved=saved: saved[place])
            if isinstance(norms.exchange, Faulty):
                norms.exchange.count()
        except PassAbandoned:
            outcome = "abandoned"
        except MemoryError:
            outcome = "failed"
        exchange.finish(failed=outcome == "failed")
        gradients = [
            p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()
        ]
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
        buffers.gather()
        vote = torch.tensor(float(outcome != "done"))
        dist.all_reduce(vote, group=group)
        result.outcomes.append(outcome)
        if vote:
            for (module, name), value in saved.items():
                module._buffers[name] = value
            continue
        for param, gradient in zip(model.parameters(), gradients, strict=True):
            param.grad = gradient / case.num_samples
        optimizer.step()
        buffers.settle()
        step += 1
    undo()
    norms.undo()
    result.state = model.state_dict()
    return result


def stage(model, norms, case, rank, samples):
    x, y = samples
    for part, sizes in case.parts(rank):
        with norms.cut(sizes):
            if part:
                with recompute.keeping(WAYS[case.way], model, torch.device("cpu")):
                    output = model(x[part.start : part.stop])
                loss = F.cross_entropy(output, y[part.start : part.stop], reduction="sum")
                loss.backward()


class Parting(nn.Module):
    """Goes another way where samples are large, as no model with synchronised norms can."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)

    def forward(self, x):
        x = self.one(x) if x.mean() < 5 else self.other(x)
        return self.one(x) if x.size(0) < 3 else x


def part_ways(group, first, rows):
    """The outcome on this rank of a pass that is not the same on all."""
    rank = dist.get_rank(group)
    model, exchange = Parting(), NormExchange(torch.device("cpu"), group, group)
    norms = GhostBatches(model, exchange)
    result = Result()
    x = torch.randn(rows[rank], 2) + first[rank]
    exchange.begin()
    try:
        with norms.cut([len(x)]):
            model(x)
    except InputError as error:
        result.error = str(error)
    except PassAbandoned:
        result.error = "abandoned"
    exchange.finish(failed=bool(result.error))
    return result


PARTED = {"other norm": ((0.0, 9.0), (4, 4)), "a norm less": ((0.0, 0.0), (4, 2))}


def run_rank(rank, size, folder):
    torch.manual_seed(rank)
    groups = {n: dist.new_group(range(n)) for n in range(1, NUM_RANKS + 1)}
    results = {}
    for case in dict.fromkeys([*DIVIDED, *WHOLE, *FAULTS]):
        if rank < len(case.shares):
            results[case] = train_on_ranks(case, groups[len(case.shares)])
    if rank < 2:
        for name, (first, rows) in PARTED.items():
            results[name] = part_ways(groups[2], first, rows)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()  # the sockets stay until all have read


# -------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def results(tmp_path_factory, crew):
    """What each rank is left with, by rank and case."""
    folder = tmp_path_factory.mktemp("ranks")
    crew(NUM_RANKS, run_rank, str(folder))
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(NUM_RANKS)]


def describe(case):
    parts = [case.model, case.way, f"{case.num_samples} in ghosts of {case.ghost}"]
    shares = ":".join(f"{share:g}" for share in case.shares)
    return ", ".join([*parts, f"shares {shares}", "divided" if case.divided else "whole"])


def assert_as_one_process(case, results):
    plain = train_plainly(case)
    states = [results[rank][case].state for rank in range(len(case.shares))]
    tolerance = 1e-5 if case.model == "float32" else 1e-10
    for name, expected in plain.items():
        for state in states:
            assert torch.equal(state[name], states[0][name]), name
        if name != "counted.passes":  # there is no rule for it
            torch.testing.assert_close(states[0][name], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*DIVIDED, *WHOLE], ids=describe)
def test_ranks_compute_what_one_process_does(case, results):
    assert_as_one_process(case, results)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAULTS, ids=lambda c: "rank {} at {}".format(*c.fault))
def test_after_a_failure_anywhere_the_step_is_redone(case, results):
    assert_as_one_process(case, results)
    outcomes = [results[rank][case].outcomes for rank in range(2)]
    failing, other = case.fault[0], 1 - case.fault[0]
    step = outcomes[failing].index("failed")
    assert step == case.fault[1] // 23
    assert len(outcomes[0]) == len(outcomes[1]) == STEPS + 1
    # Before the last exchange of a step the other rank sees it there; after it, in the vote only.
    assert outcomes[other][step] == ("abandoned" if case.fault[1] % 23 < 22 else "done")


@pytest.mark.slow
def test_ranks_at_different_norms_all_say_so(results):
    for rank in range(2):
        assert results[rank]["other norm"].error == (
            "the ranks took different ways through the model in a pass, so its BatchNorm cannot be"
            " synchronised: let the same norms run whatever the samples, or use a ghost batch that one"
            " rank can hold."
        )


@pytest.mark.slow
def test_a_rank_that_ends_a_pass_before_the_others_is_no_hang(results):
    assert "the ranks took different ways through the model" in results[1]["a norm less"].error
    assert results[0]["a norm less"].error == ""
