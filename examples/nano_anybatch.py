"""anybatch in one file: an executable specification of the package, to read in fifteen minutes.

    python examples/nano_anybatch.py

An optimizer step over a *global batch* of any size is a transaction over micro-batches and ranks:

    declare   a task: model, loss, optimizer, data, global batch
    plan      the largest micro-batch whose measured memory fits a budget
    stage     forward and backward, micro-batch by micro-batch; gradients and losses are sums
    vote      one all-reduce: did every rank succeed, and what are the totals?
    commit    divide by the total weight of the global batch, clip, update

If a rank runs out of memory, all ranks discard the staged step and stage it again, that rank with a
smaller micro-batch. The tests check that the package gives the same results as this file.
"""

import bisect
import itertools
import math
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset, default_collate


@dataclass(frozen=True)
class Task:
    """What to train. Every field affects the result, and none depends on the hardware."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], tuple[Tensor, Any]]  # (model, batch) -> sum, weight of the sum
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    data: Any  # len(data) samples, data[i]
    global_batch: int  # samples per optimizer step, over all micro-batches and ranks
    epochs: int = 1
    clip_norm: float | None = None  # largest 2-norm of the mean gradient
    ghost_batch: int | None = None  # samples that BatchNorm normalizes together
    seed: int = 0


def mix(*values: int) -> int:
    """Returns a 64-bit seed from integers (splitmix64): neighboring steps get unrelated seeds."""
    mask, state = (1 << 64) - 1, 0
    for value in values:
        state = (state ^ value) + 0x9E3779B97F4A7C15 & mask
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        state ^= state >> 31
    return state


def global_batches(task: Task) -> Iterator[list[int]]:
    """Yields the samples of each step, a function of (seed, epoch, length). The last can be fewer."""
    for epoch in range(task.epochs):
        generator = torch.Generator().manual_seed(mix(task.seed, epoch))
        order = torch.randperm(len(task.data), generator=generator)
        yield from (indices.tolist() for indices in order.split(task.global_batch))


class PeakBytes(TorchDispatchMode):
    """Measures the peak bytes of all tensors that are created inside `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak = {}, 0  # bytes by storage, and the largest sum

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in [t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor)]:
            if storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def plan(task: Task, budget_bytes: int) -> int:
    """Returns the largest micro-batch whose measured peak is within the budget, by bisection."""

    def peak(size: int) -> float:
        with PeakBytes() as memory:
            trial = Trainer(task, size)
            for index in range(2):  # in the second step, optimizer states exist
                trial.step(index, [0] * size)
        return memory.peak if trial.micro_batch == size else math.inf  # memory ran out

    with torch.random.fork_rng(devices=[]):
        fits = bisect.bisect_right(range(1, task.global_batch + 1), budget_bytes, key=peak)
    if not fits:
        raise MemoryError(f"A micro-batch of one sample takes more than {budget_bytes} bytes.")
    return fits


class Trainer:
    """One rank, which processes its share of each global batch in micro-batches of its own size."""

    def __init__(self, task: Task, micro_batch: int, shares: Sequence[float] = (1,)) -> None:
        self.task, self.micro_batch, self.shares = task, micro_batch, shares
        self.rank = dist.get_rank() if len(shares) > 1 else 0
        torch.manual_seed(task.seed)
        self.model = task.model()
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = task.optimizer(self.params)
        self.buckets = Buckets(self.params, is_alone=len(shares) == 1)
        self.losses: list[float] = []

    def step(self, index: int, samples: Sequence[int]) -> None:
        """Commits global step `index` over `samples`, or raises and leaves the state unchanged."""
        while True:
            totals, error = self.stage(index, samples)
            out_of_memory, failed, loss, weight, *used = self.vote(totals, error)
            if not out_of_memory and not failed and weight > 0 and math.isfinite(loss):
                return self.commit(loss, weight, used)
            self.put_back()
            if failed or not out_of_memory:
                raise error or ValueError(f"step {index}: {failed=}, {loss=}, {weight=}")
            if error is not None:
                self.micro_batch = (self.micro_batch + 1) // 2

    def stage(self, index: int, samples: Sequence[int]) -> tuple[Tensor, Exception | None]:
        """Sums gradients and (loss, weight) over this rank's samples, until the end or an error."""
        self.buckets.begin()
        self.before: list[Tensor] = []  # empty until forward can write buffers
        torch.manual_seed(mix(self.task.seed, index, self.rank))  # a repeated step draws the same
        totals = torch.zeros(2, dtype=torch.float64)
        try:
            self.before = [buffer.clone() for buffer in self.model.buffers()]
            for part in (parts := self.micro_batches(len(samples))):
                batch = default_collate([self.task.data[samples[i]] for i in part])
                loss, weight = self.task.loss(self.model, batch)
                self.buckets.is_last = part is parts[-1]  # then buckets are sent during backward
                loss.backward()
                totals += torch.tensor([loss.detach(), weight], dtype=torch.float64)
            # Nothing may fail after the vote, so fail here if there is no memory for Adam's update.
            torch.empty(3 * sum(p.nbytes for p in self.params), dtype=torch.uint8)
        except Exception as error:
            return totals, error.with_traceback(None)  # it would keep the tensors of the pass alive
        return totals, None

    def vote(self, totals: Tensor, error: Exception | None) -> list[float]:
        """Sums gradients and ballots over the ranks, even after an error. Returns the ballots' sum."""
        out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        out_of_memory |= "DefaultCPUAllocator" in str(error)  # RuntimeError on CPU
        out_of_memory &= self.micro_batch > 1 and self.task.ghost_batch is None  # can be smaller
        failed = error is not None and not out_of_memory
        used = [param in self.buckets.used for param in self.params]
        ballot = torch.tensor([out_of_memory, failed, *totals, *used], dtype=torch.float64)
        self.buckets.cross()
        if len(self.shares) > 1:
            dist.all_reduce(ballot)
        return ballot.tolist()

    def commit(self, loss: float, weight: float, used: list[float]) -> None:
        """Applies the update of the undivided global batch, the same on all ranks."""
        for param, count in zip(self.params, used, strict=True):
            # None without a gradient on any rank, so weight decay and momentum do not apply.
            param.grad = param.grad.div_(weight) if count else None
        if self.task.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.params, self.task.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for buffer in self.model.buffers() if len(self.shares) > 1 else []:
            dist.broadcast(buffer, 0)  # as in DDP; the package combines those of BatchNorm exactly
        self.losses.append(loss / weight)

    def micro_batches(self, total: int) -> list[range]:
        """Returns the passes of this rank: ranges that cover a contiguous part of the global batch.

            global batch    0 1 2 3 4 5 6 7 8 9       total 10
            shares 2 : 3    |-------|-----------|     rank 0 and rank 1
            micro-batches   |-----|-|---|---|---|     of 3 on rank 0, of 2 on rank 1

        With BatchNorm, each pass is a ghost batch, since BatchNorm normalizes over the samples of a
        pass. A single last sample, which has no variance, is added to the previous ghost batch.
        """
        ghost, size = self.task.ghost_batch, self.micro_batch
        edges = [*range(0, total, ghost or 1), total]
        if ghost and len(edges) > 2 and edges[-1] - edges[-2] == 1:
            del edges[-2]
        per_share = (len(edges) - 1) / sum(self.shares)
        start, stop = (round(per_share * sum(self.shares[: self.rank + i])) for i in (0, 1))
        if ghost:
            return [range(*ends) for ends in itertools.pairwise(edges[start : stop + 1])]
        return [range(i, min(i + size, stop)) for i in range(start, stop, size)]

    def put_back(self) -> None:
        """Discards the attempt. Of the state that outlives a step, staging changes only the buffers."""
        self.optimizer.zero_grad()
        for buffer, before in zip(self.model.buffers(), self.before, strict=False):
            buffer.copy_(before)


class Buckets:
    """Gradients in flat buffers that are summed over the ranks, in list order, in every attempt.

    When a rank fails in backward, it has sent some buckets, and the other ranks wait for the rest. So
    it sends the rest too, with any content: no rank blocks, and the vote discards the sums.
    """

    def __init__(self, params: list[nn.Parameter], is_alone: bool, size: int = 2) -> None:
        self.is_alone = is_alone
        reverse = params[::-1]  # approximately the order of backward
        self.groups = [reverse[i : i + size] for i in range(0, len(reverse), size)]
        self.flats = [torch.cat([p.detach().flatten() for p in group]) for group in self.groups]
        for param in params:
            param.register_post_accumulate_grad_hook(self._accumulated)

    def begin(self) -> None:
        """Starts an attempt: gradients are zero, and views of the buckets."""
        self.used: set[nn.Parameter] = set()  # parameters with a gradient from this rank
        self.final: set[nn.Parameter] = set()  # parameters whose gradient is complete
        self.works: list[Any] = []  # pending all-reduces, one per sent bucket
        for flat, group in zip(self.flats, self.groups, strict=True):
            views = flat.zero_().split([p.numel() for p in group])
            for param, view in zip(group, views, strict=True):
                param.grad = view.view_as(param)

    def cross(self) -> None:
        """Sends the remaining buckets, and waits for all sums."""
        self._send(len(self.flats))
        for work in self.works:
            work.wait()

    def _accumulated(self, param: nn.Parameter) -> None:
        self.used.add(param)
        if self.is_last:
            self.final.add(param)
            self._send(len(list(itertools.takewhile(self.final.issuperset, self.groups))))

    def _send(self, stop: int) -> None:
        for flat in self.flats[len(self.works) : stop] if not self.is_alone else []:
            self.works.append(dist.all_reduce(flat, async_op=True))


def train(task: Task, micro_batch: int, shares: Sequence[float] = (1,)) -> Trainer:
    """Trains `task` to the end. With several shares, all ranks of the process group must call it."""
    with torch.random.fork_rng(devices=[]):
        trainer = Trainer(task, micro_batch, shares)
        for index, samples in enumerate(global_batches(task)):
            trainer.step(index, samples)
    return trainer


class Network(nn.Sequential):
    """Demonstration model that runs out of memory in the middle of backward pass `failing_pass`."""

    def __init__(self, failing_pass: int = 0) -> None:
        super().__init__(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.double()[0].bias.register_hook(self.refuse)
        self.passes_left = failing_pass

    def refuse(self, _: Tensor) -> None:
        self.passes_left -= 1
        if self.passes_left == 0:
            raise torch.OutOfMemoryError("planted")


def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    inputs, targets, weights = batch
    return ((model(inputs)[:, 0] - targets).square() * weights).sum(), weights.sum()


def row(task: Task, micro_batch: int, shares: Sequence[float] = (1,)) -> None:
    trainer = train(task, micro_batch, shares)
    if trainer.rank == len(shares) - 1:
        losses = " ".join(f"{loss:.12f}" for loss in trainer.losses)
        print(f"{len(shares):5} {micro_batch:6} to {trainer.micro_batch:2}  {losses}", flush=True)


def run_rank(rank: int, task: Task, micro_batch: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for failing_pass in (0, 4 * rank):
        row(replace(task, model=partial(Network, failing_pass)), micro_batch - 10 * rank, (1, 2))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    x = torch.randn(150, 9, generator=torch.Generator().manual_seed(0)).double()
    data = TensorDataset(x[:, :8], x.sum(dim=1).sin(), x[:, 8].abs())
    adamw = partial(torch.optim.AdamW, lr=0.01)
    task = Task(Network, loss, adamw, data, global_batch=64, epochs=2, clip_norm=1.0)
    micro_batch = plan(task, budget_bytes=60_000)
    print("ranks  micro-batch  losses, the same in every row (micro-batch: of the last rank)")
    _ = row(task, task.global_batch), row(task, micro_batch)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (task, micro_batch, f"{folder}/store"), nprocs=2)


if __name__ == "__main__":
    main()
