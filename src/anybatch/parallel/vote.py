"""Vote: a small all-reduce by which all ranks learn whether all of them succeeded; and the base class
of the groups that hold votes.

The vote carries everything that the ranks need to know about each other in a step, so a step needs one
exchange for the gradients and one for the vote:

    failures | flags | wishes | totals per rank | notes | loss, weight, metrics, ...
"""

from __future__ import annotations

import contextlib
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anybatch.compute import Replica
from anybatch.errors import InputError, PeerFailed, PeerLost
from anybatch.oom import is_memory_error
from anybatch.parallel.buffers import Buffers, Held
from anybatch.parallel.collectives import gather_objects, overwrite
from anybatch.parallel.failures import RankReport
from anybatch.parallel.group import NUM_FIXED, Agreed, Group, Wish

T = TypeVar("T")

_INLINE = NUM_FIXED + 2 * 8
"""Number of totals sent with the vote itself: the fixed ones and eight metrics. More of them need a
second all-reduce."""


@final
class Vote:
    """Votes among the ranks of torch.distributed's default group.

    Args:
        device: device of the tensors that the group communicates.
    """

    def __init__(self, device: torch.device) -> None:
        self._rank = dist.get_rank()
        self._size = dist.get_world_size()
        self._device = device

    def hold(
        self,
        totals: Tensor | None,
        note: float = 0.0,
        flags: Sequence[bool] = (),
        meanwhile: Callable[[], None] | None = None,
        wish: Wish = Wish.NOTHING,
    ) -> tuple[Agreed | None, list[int]]:
        """Hold a vote. Returns what all ranks agreed on, or None if a rank failed; and for each flag,
        the number of ranks on which it is set.

        Args:
            totals, note, wish: see `Group.agree`.
            flags: flags to count; the same number on every rank.
            meanwhile: called while the vote is in transit, to hide its latency.

        Raises `PeerLost` if a rank is gone.
        """
        size = self._size
        mine = torch.zeros(0) if totals is None else totals
        slots = [0.0] * (2 * size)
        slots[self._rank], slots[size + self._rank] = len(mine), note
        wishes = [bool(wish & one) for one in Wish]
        head = torch.tensor(
            [totals is None, *flags, *wishes, *slots],
            dtype=torch.float64,
            pin_memory=self._device.type == "cuda",  # else the copy would wait for all of backward
        )
        ballot = torch.zeros(len(head) + _INLINE, dtype=torch.float64, device=self._device)
        ballot[: len(head)].copy_(head, non_blocking=True)
        ballot[len(head) : len(head) + len(mine)] = mine[:_INLINE]
        with calling("in the vote at the end of a step"):
            work = cast(Any, dist.all_reduce(ballot, async_op=True))
            if meanwhile is not None:
                meanwhile()
            work.wait()
            read = ballot.tolist()
            raised = [int(count) for count in read[1 : 1 + len(flags)]]
            if read[0]:
                return None, raised
            rest = read[1 + len(flags) :]
            wished, rest = wish_of(rest[: len(wishes)]), rest[len(wishes) :]
            lengths = tuple(int(n) for n in rest[:size])
            values = rest[2 * size :]
            if max(lengths) > _INLINE:
                more = torch.zeros(max(lengths) - _INLINE, dtype=torch.float64, device=self._device)
                more[: max(0, len(mine) - _INLINE)] = mine[_INLINE:]
                dist.all_reduce(more)
                values += more.tolist()
        notes = tuple(rest[size : 2 * size])
        return Agreed(values[: max(lengths)], lengths, notes, wished), raised

    def any_of(self, own: Sequence[bool]) -> list[bool]:
        """The elementwise logical OR of `own` over all ranks. Raises `PeerLost` if a rank is gone."""
        held = torch.tensor(own, dtype=torch.uint8, device=self._device)
        with calling("in the vote at the end of a step"):
            dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return [bool(one) for one in held.tolist()]


class DistributedGroup(Group, ABC):
    """The ranks of torch.distributed's default group.

    Args:
        shares: parts of the global batch by rank.
        device: device of this rank.
    """

    def __init__(self, shares: Sequence[float], device: torch.device) -> None:
        self.rank: int = dist.get_rank()
        self.shares: Sequence[float] = tuple(shares)
        self._device = device
        self._vote = Vote(device)
        self._buffers: Buffers | None = None

    def prepare(self, model: nn.Module) -> None:
        """See `Group`. All ranks get the parameters and buffers of rank 0."""
        same_weights(model)

    def staged(self, held: Held) -> None:
        if self._buffers is not None:
            self._buffers.staged(self.rank, held)

    def committed(self, replica: Replica) -> None:
        if self._buffers is not None:
            with calling("while buffers were put together"):
                self._buffers.settle()

    def exchange(self, value: T) -> list[T]:
        return exchange(value)


def wish_of(counts: Sequence[float]) -> Wish:
    """The combined wishes, given the number of ranks with each wish."""
    return reduce(
        or_, (one for one, count in zip(Wish, counts, strict=True) if count), Wish.NOTHING
    )


def same_weights(model: nn.Module) -> None:
    """Overwrite parameters and buffers of `model` with those of rank 0. Raises `PeerLost` if a rank is
    gone."""
    with calling("while the weights were sent"), torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            overwrite(tensor, 0)


def leads() -> bool:
    """Whether this process is rank 0, or the only one: it produces output and writes files."""
    return not dist.is_initialized() or dist.get_rank() == 0


def exchange(value: T) -> list[T]:
    """The `value` of every rank of the default group, in rank order; of this process alone if there is
    no group.

    Raises `PeerLost` if a rank is gone.
    """
    if not dist.is_initialized():
        return [value]
    with calling("while the ranks told each other what happened"):
        return gather_objects(value)


def from_rank_0(work: Callable[[], T], group: Group | None = None) -> T:
    """Call `work` on rank 0 alone, and return its result on every rank of `group` (None: of the default
    group, if there is one).

    Raises the error of `work` on rank 0; on the others, an equal `InputError`, or `PeerFailed` for an
    error of any other type. Raises `PeerLost` if a rank is gone.
    """
    result: Any = None
    wrong: Exception | None = None
    if leads() if group is None else group.rank == 0:
        try:
            result = work()
        except Exception as error:
            wrong = error
    report = None if wrong is None else RankReport.of(wrong)
    sentence = str(wrong) if isinstance(wrong, InputError) else ""
    message = (result, report, sentence)
    result, report, sentence = (exchange(message) if group is None else group.exchange(message))[0]
    if wrong is not None:
        raise wrong
    if sentence:
        raise InputError(sentence)
    if report is not None:
        raise PeerFailed(f"rank 0 failed with {report.error}", report.exit_status)
    return result


@contextlib.contextmanager
def calling(when: str) -> Iterator[None]:
    """Context manager around collectives: converts torch's error for a rank that does not answer to
    `PeerLost`."""
    try:
        yield
    except RuntimeError as error:
        # An error in a kernel of this rank is raised by the next call that waits for the device.
        if is_memory_error(error) or isinstance(error, torch.AcceleratorError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PeerLost(
            f"a rank did not answer {when}: it has ended or hangs; its own output says why.", reason
        ) from error
