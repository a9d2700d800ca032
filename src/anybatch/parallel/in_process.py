"""InProcess: several devices from one process, each a rank in a thread; no process is started.

Threads that ran Python at the same time would share the random generators, the data sets and the
user's own code. So they take turns on the host, while their devices work at the same time:

    host      | rank 0 | rank 1 | rank 2 | rank 0 | rank 1 | rank 2 |
    device 0    .... pass ............   .... pass ............
    device 1             .... pass ............   .... pass ............
    device 2                      .... pass ............   .... pass ..........

A rank queues a pass on its device and hands the turn on; nobody waits for a device before the vote.
Each rank sees its own random state, switched with the turn, and its own current device. Gradients are
added up in the order of the ranks, in the flat buckets that they live in, so every rank has the same
bits. Every rank holds one model and its optimizer; none holds more.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from types import TracebackType
from typing import Any, Self, TypeVar, final

import torch
from torch import Tensor, nn

from anybatch.compute import Replica
from anybatch.compute.buckets import Buckets
from anybatch.data import restore, snapshot
from anybatch.errors import InputError, PeerFailed
from anybatch.parallel.buffers import BufferAgreement, Held
from anybatch.parallel.failures import first_line
from anybatch.parallel.group import Agreed, Group, Wish
from anybatch.parallel.thread_state import ThreadState
from anybatch.parallel.turns import Turns
from anybatch.task import Task

T = TypeVar("T")


@final
class InProcess(Group):
    """One rank among those of an `InProcessRanks`, which makes it.

    Attributes:
        device: of this rank.
    """

    in_one_process: bool = True

    def __init__(
        self, rank: int, shares: Sequence[float], device: torch.device, common: _Common
    ) -> None:
        self.rank: int = rank
        self.shares: Sequence[float] = tuple(shares)
        self.device: torch.device = device
        self._common = common
        self._buckets: Buckets | None = None
        self._agreement: BufferAgreement | None = None
        self._changes: Tensor | None = None  # of this rank's buffers in this attempt
        self._all_changes: Tensor = torch.zeros(0)

    def own(self, task: Task) -> Task:
        """`task` for this rank: every rank trains a model of its own, so all but rank 0 get a copy of
        one that was built before. To be called before any rank has moved it to its device."""
        if self.rank == 0 or not isinstance(task.model, nn.Module):
            return task
        return dataclasses.replace(task, model=copy.deepcopy(task.model))

    def prepare(self, model: nn.Module) -> None:
        """See `Group`: those of rank 0."""
        self._meet("prepare", model, _send_weights)

    def adopt(self, replica: Replica) -> None:
        """See `Group`."""
        self._buckets = replica.flatten()
        self._agreement = BufferAgreement(replica.model)
        self._common.staging = self._meet("adopt", self._buckets, _staging)

    def begin(self) -> None:
        """See `Group`."""
        self._changes = None

    def between_passes(self) -> None:
        """Let the other ranks have their turn while the device works."""
        self._common.turns.pass_on(self.rank)

    def staged(self, held: Held) -> None:
        """See `Group`."""
        if self._agreement is not None and self._agreement.size:
            # What follows waits for the device: not before all of them have been given their work.
            self.between_passes()
            self._changes = self._agreement.contribution(held)

    def gather(self, failed: bool) -> None:
        """See `Group`. Takes no memory on the devices."""
        add_up = partial(_add_up, self._common.staging)
        mine = None
        if not failed and self._buckets is not None:
            self._buckets.complete()
            mine = self._buckets, self._changes
        changes = self._meet("gather", mine, add_up)
        if changes is not None:
            self._all_changes = changes

    def agree(
        self, totals: Tensor | None, note: float = 0.0, wish: Wish = Wish.NOTHING
    ) -> Agreed | None:
        """See `Group`. Waits for all devices once."""
        own = [] if self._buckets is None else self._buckets.used
        counted = self._meet("agree", _Vote(totals, note, wish, own), _count)
        if counted is None:
            return None
        agreed, used = counted
        if self._buckets is not None and not all(own):
            self._buckets.drop_unused(used)
        return agreed

    def committed(self, replica: Replica) -> None:
        """See `Group`: the buffers."""
        if self._agreement is not None and self._agreement.size:
            self._agreement.settle(self._all_changes, self._broadcast)

    def exchange(self, value: T) -> list[T]:
        """See `Group`. What others gave are copies, as where ranks are processes."""
        everyone: Sequence[T] = self._meet("exchange", value, tuple)
        return [one if r == self.rank else copy.deepcopy(one) for r, one in enumerate(everyone)]

    def close(self) -> None:
        """See `Group`."""
        self._buckets = self._agreement = None
        self._common.staging = {}

    def _broadcast(self, mine: Sequence[Tensor | None], source: int) -> list[Tensor | None]:
        """See `buffers.Broadcast`."""
        spread = partial(_spread, source, self._common.devices)
        return self._meet("committed", mine, spread)[self.rank]

    def _meet(self, kind: str, value: Any, combine: Callable[[Sequence[Any]], Any]) -> Any:
        return self._common.turns.meet(self.rank, kind, value, combine)


@final
class InProcessRanks:
    """The ranks of this process and their threads. A context manager: the threads end with it.

    `run` does one thing on all ranks, each in its own thread, rank 0 in that of the caller. What work
    leaves behind in a rank's thread (random state, the place of autograd's queue) is there in the next
    run.

    Args:
        devices: of the ranks, in their order. A device may come twice.
        shares: of the global batch, by rank; default all the same.

    Attributes:
        groups: the group as each rank sees it.

    Raises `InputError` if there is no device, or not one share for each.
    """

    def __init__(
        self,
        devices: Sequence[torch.device | str],
        shares: Sequence[float] | None = None,
    ) -> None:
        self._devices = tuple(torch.device(device) for device in devices)
        shares = (1.0,) * len(self._devices) if shares is None else tuple(shares)
        if not self._devices or len(shares) != len(self._devices):
            raise InputError(
                f"there are {len(shares)} shares for {len(self._devices)} devices: name at least one"
                " device, and give one share for each."
            )
        size = len(self._devices)
        self._generators = _Generators(self._devices)
        self._turns = Turns(size, self._generators.save, self._generators.load)
        common = _Common(self._turns, self._devices)
        self.groups: tuple[InProcess, ...] = tuple(
            InProcess(rank, shares, device, common) for rank, device in enumerate(self._devices)
        )
        self._threads: list[threading.Thread] = []
        self._run: _Run | None = None

    def run(self, work: Callable[[InProcess], T]) -> T:
        """Do `work(group)` on every rank, and return what it gives on rank 0.

        Raises what a rank raised first, with a note of the rank. Other ranks that meet it get
        `PeerFailed`, and have ended when this returns.
        """
        before = self._run
        if before and (before.at_work or before.caller != threading.get_ident()):
            raise RuntimeError(
                "the ranks are at work already: a run cannot be begun inside another"
            )
        self._settle()
        self._start_threads()
        run = _Run(work, ThreadState(self._devices))
        try:
            self._run = run
            self._turns.begin()
            self._perform(0, run)
        finally:  # whatever has happened here, no other rank is left behind
            self._settle()
        return self._outcome(run)

    def close(self) -> None:
        """End the threads."""
        self._settle()
        threads, self._threads = self._threads, []
        if threads:
            self._turns.begin()  # without a run, which tells them to end
            self._turns.end(0)
            for thread in threads:
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start_threads(self) -> None:
        for rank in range(len(self._threads) + 1, len(self._devices)):
            thread = threading.Thread(
                target=self._stay, args=(rank,), name=f"anybatch-rank-{rank}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def _stay(self, rank: int) -> None:
        """What the thread of `rank` does: a run each time that it gets its first turn of it."""
        while True:
            self._turns.wait(rank)
            run = self._run
            if run is None:
                self._turns.end(rank)
                return
            self._generators.load(rank)
            self._perform(rank, run)
            self._finish(rank, run)
            del run  # it holds what was raised

    def _perform(self, rank: int, run: _Run) -> None:
        group = self.groups[rank]
        try:
            run.at_work = run.at_work or rank == 0
            run.results[rank] = run.state.run(partial(run.work, group), group.device)
        except BaseException as error:
            run.failures.append((rank, error))
        finally:
            if rank == 0:
                run.at_work = False
            self._generators.save(rank)

    def _settle(self) -> None:
        """Wait until all ranks have ended. If interrupts cut even this short, the next call does it."""
        run = self._run
        if run is not None:
            interrupt = self._turns.insist(partial(self._settled, run))
            if interrupt is not None:
                run.failures.append((0, interrupt))

    def _settled(self, run: _Run) -> None:
        self._finish(0, run)
        self._turns.wait_for_all()
        self._generators.load(0)
        self._run = None

    def _finish(self, rank: int, run: _Run) -> None:
        for failed, error in run.failures:
            if failed == rank:
                self._turns.break_off(f"rank {rank} failed with {first_line(error)}")
        self._turns.end(rank)

    def _outcome(self, run: _Run) -> Any:
        failures = run.failures
        if not failures:
            return run.results[0]
        causes = [one for one in failures if not isinstance(one[1], PeerFailed)]
        rank, first = (causes or failures)[0]
        if len(self._devices) > 1:
            place = f"on rank {rank} of {len(self._devices)}, {self._devices[rank]}"
            first.add_note(f"raised {place}")
        try:
            raise first
        finally:  # else the traceback would hold, through this frame, what it holds
            failures.clear()
            del first, causes


@final
class _Run:
    """One piece of work on all ranks."""

    def __init__(self, work: Callable[[InProcess], Any], state: ThreadState) -> None:
        self.work: Callable[[InProcess], Any] = work
        self.state: ThreadState = state
        self.results: dict[int, Any] = {}
        self.failures: list[tuple[int, BaseException]] = []  # in the order of time
        self.at_work: bool = False  # rank 0 is
        self.caller: int = threading.get_ident()


@final
class _Common:
    """What the ranks share.

    Attributes:
        turns: who runs.
        devices: of the ranks.
        staging: see `_staging`.
    """

    def __init__(self, turns: Turns, devices: Sequence[torch.device]) -> None:
        self.turns: Turns = turns
        self.devices: Sequence[torch.device] = devices
        self.staging: dict[torch.device, Tensor] = {}


@final
class _Generators:
    """The random state of each rank: that of the host's generators, and of its device's where several
    ranks have the same one."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._shared = [
            device if device.type == "cuda" and devices.count(device) > 1 else None
            for device in devices
        ]
        self._saved = [self._now(rank) for rank in range(len(devices))]

    def save(self, rank: int) -> None:
        """Remember the generators as they are, for `rank`."""
        self._saved[rank] = self._now(rank)

    def load(self, rank: int) -> None:
        """Put them as they were for `rank`."""
        host, own = self._saved[rank]
        restore(host)
        device = self._shared[rank]
        if own is not None and device is not None:
            torch.cuda.set_rng_state(own, device)

    def _now(self, rank: int) -> tuple[tuple[Any, ...], Tensor | None]:
        device = self._shared[rank]
        return snapshot(), None if device is None else torch.cuda.get_rng_state(device)


# ------------------------------------------------------------------------- what is done when all met


@dataclass(frozen=True, slots=True)
class _Vote:
    totals: Tensor | None
    note: float
    wish: Wish
    used: Sequence[bool]


@torch.no_grad()
def _send_weights(models: Sequence[nn.Module]) -> None:
    """Those of rank 0 to all."""
    sources = [*models[0].parameters(), *models[0].buffers()]
    for model in models[1:]:
        for target, source in zip((*model.parameters(), *model.buffers()), sources, strict=True):
            if target is source:
                raise RuntimeError("two ranks train the same model: each must have its own")
            target.copy_(source, non_blocking=True)


def _staging(ranks: Sequence[Buckets]) -> dict[torch.device, Tensor]:
    """On each device of rank 0's buckets, room for the largest bucket that comes from another device:
    taken once, so that adding up cannot run out of memory."""
    rooms: dict[torch.device, int] = {}
    for other in ranks[1:]:
        for target, source in zip(ranks[0].flats, other.flats, strict=True):
            if target.device != source.device:
                rooms[target.device] = max(rooms.get(target.device, 0), target.nbytes)
    return {d: torch.empty(size, dtype=torch.uint8, device=d) for d, size in rooms.items()}


@torch.no_grad()
def _add_up(
    staging: dict[torch.device, Tensor], ranks: Sequence[tuple[Buckets, Tensor | None] | None]
) -> Tensor | None:
    """Every bucket becomes the sum over the ranks, in their order, on every rank. Returns how all ranks
    changed their buffers. Nothing is done if one of them failed: none of it would count."""
    there = [rank for rank in ranks if rank is not None]
    if len(there) < len(ranks):
        return None
    for flats in zip(*(buckets.flats for buckets, _ in there), strict=True):
        total, *others = flats
        for other in others:
            if other.device != total.device:
                room = staging[total.device][: other.nbytes].view(other.dtype)
                other = room.copy_(other, non_blocking=True)
            total.add_(other)
        for other in others:
            other.copy_(total, non_blocking=True)
    changes = [change for _, change in there if change is not None]
    return torch.stack(changes) if changes else None


def _spread(
    source: int, devices: Sequence[torch.device], ranks: Sequence[Sequence[Tensor | None]]
) -> list[list[Tensor | None]]:
    """For each rank its own copy of what rank `source` has, on its own device."""
    given = ranks[source]
    return [
        list(given)
        if rank == source
        else [
            None
            if tensor is None
            else tensor.detach().to(
                tensor.device if tensor.device.type == "cpu" else device, copy=True
            )
            for tensor in given
        ]
        for rank, device in enumerate(devices)
    ]


def _count(votes: Sequence[_Vote]) -> tuple[Agreed, list[bool]] | None:
    """The vote of all ranks, and which parameters any of them has a gradient for; None if one has
    failed."""
    totals = [vote.totals for vote in votes if vote.totals is not None]
    if len(totals) < len(votes):
        return None
    values = [total.tolist() for total in totals]  # waits for the devices, one after the other
    lengths = tuple(len(each) for each in values)
    sums = [0.0] * max(lengths)
    for each in values:
        for i, value in enumerate(each):
            sums[i] += value
    used = [any(each) for each in zip(*(vote.used for vote in votes), strict=True)]
    wished = reduce(or_, (vote.wish for vote in votes))
    return Agreed(sums, lengths, tuple(vote.note for vote in votes), wished), used
